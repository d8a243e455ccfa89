"""What rank 0 does once all ranks have written: manifest, publishing, retention, beside training.

Flushing the files of hundreds of ranks and deleting an old checkpoint take seconds on a shared
file system, so a thread does it; the ranks learn of its end by rank 0's vote. Belongs here: that
thread. Does not belong here: what makes a checkpoint good and the fencing protocol (see
`hpctrain.checkpoints`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from hpctrain.checkpoints.manifest import (
    Manifest,
    checkpoint_name,
    digest_file,
    read_manifest,
    read_rank_digests,
    read_writers,
)
from hpctrain.checkpoints.publish import (
    publish,
    published_steps,
    retire,
)
from hpctrain.errors import CheckpointError
from hpctrain.train.datasets.skipped_samples import Skips
from hpctrain.train.engine import Form, Position
from hpctrain.train.job import Job
from hpctrain.train.saving.save_problem import SaveProblem, SaveProblemKind
from hpctrain.train.step_agreement import WriterState
from hpctrain.train.storage import fence_of, outlast, stale_or

# How long the end of a launch waits for old checkpoints to be deleted; the next launch goes on.
_RETIRE_SECONDS = 10.0


class Publisher:
    """At most one checkpoint at a time; `published` is its manifest once it counts."""

    def __init__(self, job: Job, skips: Skips, form: Form) -> None:
        self._job = job
        self._form = form
        self._skips = skips
        self._thread: threading.Thread | None = None
        self._retiring = threading.Lock()
        self.state = WriterState.FINISHED
        self.problem: SaveProblem | None = None
        self.published: Manifest | None = None
        self.published_at = 0.0

    def start(self, position: Position, directory: Path) -> None:
        """Begin to make the files in `directory` a checkpoint that counts."""
        self.state, self.problem, self.published = WriterState.RUNNING, None, None
        self._thread = threading.Thread(
            target=self._run, args=(position, directory), name="publisher", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Give the deletion of old checkpoints some time at the end of a launch."""
        if self._thread is not None:
            self._thread.join(_RETIRE_SECONDS)

    def _run(self, position: Position, directory: Path) -> None:
        job, made = self._job, list[Manifest]()

        def make_it_count() -> None:
            if not made:
                made.append(self._manifest(position, directory))
            publish(job.run.checkpoints, made[0], fence_of(job.run, job.launch))

        try:
            outlast(job.run, make_it_count)
        except Exception as error:
            self._fail(stale_or(error, job.run, job.launch))
            return
        self.published, self.published_at = made[0], time.monotonic()
        self.state = WriterState.FINISHED
        with contextlib.suppress(OSError):  # left to the next checkpoint
            self._retire_old()

    def _fail(self, error: Exception) -> None:
        """Set the problem, which all ranks raise, before the state by which they learn of it."""
        self.problem = SaveProblem.of(error)
        full = self.problem.kind is SaveProblemKind.FULL
        self.state = WriterState.NO_SPACE if full else WriterState.FAILED

    def _manifest(self, position: Position, directory: Path) -> Manifest:
        config = self._job.config
        shards = read_rank_digests(directory)
        on_disk = {path.name for path in directory.glob(self._form.shards)}
        missing = on_disk - {file.name for file in shards}
        if missing:
            raise CheckpointError(f"no digest was left for {', '.join(sorted(missing))}")
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
        )

    def _retire_old(self) -> None:
        """Left to the next checkpoint while an earlier deletion is still going on."""
        if not self._retiring.acquire(blocking=False):
            return
        try:
            config, root = self._job.config, self._job.run.checkpoints
            retire(root, config.keep_checkpoints, config.keep_every_steps, self._pinned(root))
        finally:
            self._retiring.release()

    def _pinned(self, root: Path) -> set[int]:
        """What retention must leave: named by the launcher, or the last before skipped data."""
        if not self._skips.skips:
            return set(self._job.launch.pinned_steps)
        manifests = [read_manifest(root / checkpoint_name(step)) for step in published_steps(root)]
        consumed = {one.step: one.consumed_samples for one in manifests if one is not None}
        return self._skips.pinned(consumed) | self._job.launch.pinned_steps
