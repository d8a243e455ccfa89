"""Publish a written checkpoint in a thread of rank 0: manifest, fenced rename, retention.

Flushing the files of hundreds of ranks and deleting an old checkpoint take seconds on a shared
file system, so a thread does it beside training. The other ranks learn the result from rank 0's
vote. Does not belong here: what makes a checkpoint valid and the fencing protocol (see
`hpctrain.checkpoints`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.publish import (
    Retention,
    publish,
    published_steps,
)
from hpctrain.records.manifest import (
    Manifest,
    checkpoint_name,
    digest_file,
    read_manifest,
    read_rank_digests,
    read_writers,
    remove_rank_digests,
)
from hpctrain.train.datasets.skipped_samples import Skips
from hpctrain.train.engine import Form, Position
from hpctrain.train.job import Job
from hpctrain.train.saving.evaluated_checkpoints import steps_to_evaluate
from hpctrain.train.saving.save_problem import SaveProblem, SaveProblemKind
from hpctrain.train.step_agreement import WriterState
from hpctrain.train.storage import fence_of, outlast, stale_or

# How long the end of a launch waits for the deletion of old checkpoints, which may stay incomplete.
_RETIRE_SECONDS = 10.0


class Publisher:
    """Publishes one checkpoint at a time; `published` is its manifest once it is published."""

    def __init__(self, job: Job, skips: Skips, form: Form) -> None:
        self._job = job
        self._form = form
        self._skips = skips
        self._thread: threading.Thread | None = None
        self._retiring = threading.Lock()
        self._retention = Retention(job.run.checkpoints)
        self.state = WriterState.FINISHED
        self.problem: SaveProblem | None = None
        self.published: Manifest | None = None
        self.published_at = 0.0

    def start(self, position: Position, directory: Path) -> None:
        """Start to publish the files in `directory`."""
        self.state, self.problem, self.published = WriterState.RUNNING, None, None
        self._thread = threading.Thread(
            target=self._publish, args=(position, directory), name="publisher", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the deletion of old checkpoints, for a limited time."""
        if self._thread is not None:
            self._thread.join(_RETIRE_SECONDS)

    def _publish(self, position: Position, directory: Path) -> None:
        """Publish in the thread; sets `published` or `problem`, and `state` last."""
        job, manifests = self._job, list[Manifest]()

        def publish_once() -> None:
            if not manifests:
                manifests.append(self._manifest(position, directory))
            publish(job.run.checkpoints, manifests[0], fence_of(job.run, job.launch))

        try:
            outlast(job.run, publish_once)
        except Exception as raised:
            # All ranks raise the problem; they learn of it by the state, so it is set first.
            self.problem = SaveProblem.of(stale_or(raised, job.run, job.launch))
            full = self.problem.kind is SaveProblemKind.FULL
            self.state = WriterState.NO_SPACE if full else WriterState.FAILED
            return
        self.published, self.published_at = manifests[0], time.monotonic()
        self.state = WriterState.FINISHED
        remove_rank_digests(job.run.checkpoints / checkpoint_name(position.step))
        with contextlib.suppress(OSError):  # left to the next checkpoint
            self._retire_old()

    def _manifest(self, position: Position, directory: Path) -> Manifest:
        config = self._job.config
        shards = read_rank_digests(directory)
        on_disk = {path.name for path in directory.glob(self._form.shards)}
        missing = on_disk - {file.name for file in shards}
        if missing:
            raise CheckpointError(f"no digest was written for {', '.join(sorted(missing))}")
        own = tuple(digest_file(directory, name) for name in self._form.leader_files)
        writers = read_writers(directory)
        return Manifest(
            step=position.step,
            epoch=self._job.launch.epoch,
            engine=config.engine,
            layout=config.layout_words,
            world_size=self._job.launch.world_size,
            consumed_samples=position.consumed_samples,
            time=time.time(),
            writers=(*(0 for _ in own), *(writers[file.name] for file in shards)),
            files=own + shards,
            library_version=self._form.library_version,
        )

    def _retire_old(self) -> None:
        """Delete old checkpoints, unless an earlier deletion is still running.

        Kept are those pinned by the launcher, those that are still to be evaluated, and the last
        one before each range of skipped data.
        """
        if not self._retiring.acquire(blocking=False):
            return
        try:
            config, root = self._job.config, self._job.run.checkpoints
            pinned = set(self._job.launch.pinned_steps) | steps_to_evaluate(self._job.run)
            if self._skips.skips:
                steps = published_steps(root)
                manifests = [read_manifest(root / checkpoint_name(step)) for step in steps]
                consumed = {m.step: m.consumed_samples for m in manifests if m is not None}
                pinned |= self._skips.pinned(consumed)
            self._retention.retire(config.keep_checkpoints, config.keep_every_steps, pinned)
        finally:
            self._retiring.release()
