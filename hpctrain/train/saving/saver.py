"""Save checkpoints on all ranks, synchronously or beside training.

Both modes have the same stages: plan and fork the writers (`begin`), wait until all of them have
finished (`poll` with the step's agreement, or `finish`), write the engine's metadata, let rank 0
publish, wait for the result. While the run directory is away, a save waits. A save that has lost
its files is repeated: `postponed` is set until a later one is published. Does not belong here: what
makes a checkpoint valid and the fencing protocol (`hpctrain.checkpoints`), when to save (`loop`).
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import CheckpointError, HpctrainError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError, published_steps
from hpctrain.records.manifest import (
    Manifest,
    checkpoint_name,
    digest_file,
    partial_name,
    read_manifest,
    read_rank_digests,
    read_writers,
)
from hpctrain.records.run_records import SaveRecord
from hpctrain.train import storage
from hpctrain.train.datasets.skipped_samples import Skips
from hpctrain.train.engine import Form, Position, Snapshot, Writing
from hpctrain.train.faults import is_full
from hpctrain.train.job import Job
from hpctrain.train.saving.publication import Publication, save_record
from hpctrain.train.saving.writer import open_writer
from hpctrain.train.step_agreement import Control, WriterState
from hpctrain.train.storage import (
    Need,
    NoSpaceError,
    check_room,
    exhausted,
    is_away,
    lost_in,
    newest_size,
    stale_or,
)

_POLL_SECONDS = 0.01
_RETRY_SECONDS = 1.0
# With more saves in a row that have lost their files, the run fails.
_MOST_POSTPONED = 5
# Functions of this file in which a rank waits for others, as the supervisor recognises them in
# stacks (`hpctrain.judge.odd_stacks`; its unit test compares the two).
WAITS_FOR_RANKS = ("_agree_or_rest",)
WAITS_FOR_OWN_WRITER = "_wait_for_own_writer"
WAITS_FOR_OTHER_WRITERS = "_wait_for_other_writers"


def save_error(error: Exception) -> HpctrainError:
    """Return what every rank raises for an error that ended the publication of a checkpoint.

    Rank 0 broadcasts it, so it holds a message only: the content of others may not be picklable.
    """
    known = isinstance(error, CheckpointError | OSError | ValueError)
    message = str(error) if known else repr(error)
    if isinstance(error, StaleEpochError):
        return StaleEpochError(message)
    if isinstance(error, StorageError):
        return StorageError(message)
    return NoSpaceError(message) if is_full(error) else CheckpointError(message)


@dataclass
class _Pending:
    """A save in progress. `publishing`: all writers have finished, and rank 0 publishes."""

    position: Position
    directory: Path
    writing: Writing
    started_at: float
    stall_seconds: float
    publishing: bool = False


class Saver:
    """Writes checkpoints of one launch, one at a time.

    `published` is called on rank 0 for each published checkpoint. `postponed` is True on all ranks
    after a save that has lost its files, until one is published.
    """

    def __init__(
        self,
        job: Job,
        snapshot: Snapshot,
        control: Control,
        published: Callable[[SaveRecord], None],
        skips: Skips,
    ) -> None:
        self._job = job
        self._snapshot = snapshot
        self._control = control
        self._published = published
        self._writer = open_writer(job.launch.rank, job.run, snapshot.buffers)
        self._publisher = Publisher(job, skips, snapshot.form)
        self._estimate_bytes: int | None = None
        self._pending: _Pending | None = None
        self.newest_step: int | None = None
        self.postponed = False
        self._postponed_in_a_row = 0
        self._lost_metadata = False

    @property
    def busy(self) -> bool:
        return self._pending is not None

    @property
    def writer_state(self) -> WriterState:
        """State of this rank's writer, and then of the publisher on rank 0."""
        if self._lost_metadata:
            return WriterState.AWAY
        if self._pending is not None and self._pending.publishing:
            return self._publisher.state
        return self._writer.state()

    def begin(self, position: Position) -> None:
        """Plan a save of `position` and start the writers; waits for an earlier save first.

        Raises NoSpaceError when there is no room, if possible before anything is written.
        """
        waited_seconds = self._wait()
        started_at = time.monotonic()
        directory = self._prepare_directory(position.step)
        try:
            writing = self._snapshot.plan(position, directory)
            self._writer.start(writing, directory)
        except Exception as error:
            if is_full(error) or exhausted(directory):
                self._clear(directory)
                name = checkpoint_name(position.step)
                raise NoSpaceError(f"no room for {name}: {error}") from error
            raise
        stall_seconds = waited_seconds + time.monotonic() - started_at
        self._pending = _Pending(position, directory, writing, started_at, stall_seconds)

    def poll(self, agreed: WriterState) -> None:
        """Advance the pending checkpoint by one stage if all ranks are ready; never waits."""
        pending = self._pending
        if pending is None or agreed is WriterState.RUNNING:
            return
        began_at = time.monotonic()
        if agreed is WriterState.AWAY:
            self._postpone(pending)
            return
        if agreed is not WriterState.FINISHED:
            self._fail(pending, agreed)
        elif pending.publishing:
            self._pending, self.newest_step = None, pending.position.step
            self.postponed, self._postponed_in_a_row = False, 0
        else:
            self._start_publishing(pending)
        pending.stall_seconds += time.monotonic() - began_at
        if self._pending is None and self._job.launch.leads:
            manifest = self._publisher.published
            assert manifest is not None, "agreed on a checkpoint that is not published"
            publish_seconds = self._publisher.published_at - pending.started_at
            self._published(save_record(manifest, pending.stall_seconds, publish_seconds))

    def finish(self) -> None:
        """Wait until the pending checkpoint, if any, is published."""
        if self._pending is not None:
            self._wait(self._pending)

    def leave(self) -> None:
        """Finish at the end of a launch, and wait for retention for a limited time."""
        self.finish()
        self._publisher.join()

    def abandon(self) -> None:
        """Abandon the pending checkpoint; its files are never published."""
        self._writer.abandon()

    def _wait(self, charged: _Pending | None = None) -> float:
        """Wait until no save is pending; returns the seconds, added to the stall of `charged`.

        The supervisor reads stacks to find whose writer does not end, and recognizes the functions
        called here by name (`hpctrain.judge.odd_stacks`).
        """
        waited_seconds = 0.0
        while self._pending is not None:
            began_at = time.monotonic()
            if self._pending.publishing:
                agreed = self._agree_or_rest()
            elif self._writer.state() is WriterState.RUNNING:
                agreed = self._wait_for_own_writer()
            else:
                agreed = self._wait_for_other_writers()
            seconds = time.monotonic() - began_at
            waited_seconds += seconds
            if charged is not None:
                charged.stall_seconds += seconds
            self.poll(agreed)
        return waited_seconds

    def _wait_for_own_writer(self) -> WriterState:
        return self._agree_or_rest()

    def _wait_for_other_writers(self) -> WriterState:
        return self._agree_or_rest()

    def _agree_or_rest(self) -> WriterState:
        agreed = self._control.worst_writer(self.writer_state)
        if agreed is WriterState.RUNNING:
            time.sleep(_POLL_SECONDS)
        return agreed

    def _prepare_directory(self, step: int) -> Path:
        """Check for free space and make the directory on rank 0; all ranks raise its problem."""
        root = self._job.run.checkpoints
        directory = root / partial_name(step, self._job.launch.epoch)
        if self._estimate_bytes is None:
            self._estimate_bytes = self._snapshot.estimated_bytes(self._control)
        deadline = time.monotonic() + storage.PATIENCE_SECONDS
        while True:
            problem: HpctrainError | Literal["retry"] | None = None
            if self._job.launch.leads:
                problem = self._make_room(directory, self._estimate_bytes, deadline)
            problem = self._control.from_leader(problem)
            if problem is None:
                return directory
            if isinstance(problem, HpctrainError):
                raise problem
            time.sleep(_RETRY_SECONDS)

    def _make_room(
        self, directory: Path, estimate_bytes: int, deadline: float
    ) -> HpctrainError | Literal["retry"] | None:
        """Check the free space and make the directory on rank 0; returns what prevents that.

        While the run directory is away, all ranks try again until `deadline`.
        """
        run, world_size = self._job.run, self._job.launch.world_size
        first = Need(estimate_bytes, 2 * world_size, "estimated from the parameters")
        try:
            run.require()
            root = directory.parent
            if root.is_dir():
                problem = check_room(root, newest_size(root, world_size) or first)
                if problem is not None:
                    return NoSpaceError(problem)
            shutil.rmtree(directory, ignore_errors=True)
            run.make_directory(directory)
        except OSError as error:
            if is_full(error):
                return NoSpaceError(str(error))
            if not is_away(error, run) and not lost_in(run.directory, error):
                return CheckpointError(str(error))
            return "retry" if time.monotonic() < deadline else StorageError(str(error))
        return None

    def _start_publishing(self, pending: _Pending) -> None:
        """Write the engine's metadata once all writers have finished, then publish on rank 0."""
        try:
            pending.writing.finish(self._writer.collect())
        except Exception as error:
            if is_full(error) or exhausted(pending.directory):
                self._clear(pending.directory)
                raise NoSpaceError(f"no room for the metadata: {error}") from error
            if not lost_in(pending.directory, error) and not is_away(error, self._job.run):
                raise
            self._lost_metadata = True  # all ranks learn of it in the next agreement
        pending.publishing = True
        if self._lost_metadata:
            return
        if self._job.launch.leads:
            self._publisher.start(pending.position, pending.directory)

    def _postpone(self, pending: _Pending) -> None:
        """Drop a save that was interrupted because the run directory was away.

        Raises StorageError, on all ranks, when that happens too often in a row.
        """
        self._pending, self._lost_metadata = None, False
        self._writer.abandon()
        self.postponed = True
        self._postponed_in_a_row += 1
        name = checkpoint_name(pending.position.step)
        if self._postponed_in_a_row > _MOST_POSTPONED:
            times = f"{self._postponed_in_a_row} saves in a row, the last one of {name}"
            raise StorageError(f"{self._job.run.directory} was away during {times}")
        if self._job.launch.leads:
            with contextlib.suppress(OSError):
                shutil.rmtree(pending.directory, ignore_errors=True)
            print(f"event=save_put_off checkpoint={name} reason=run_directory_away", flush=True)

    def _fail(self, pending: _Pending, agreed: WriterState) -> None:
        if pending.publishing:
            problem = self._control.from_leader(self._publisher.problem)
            assert problem is not None, "the publisher failed without a problem"
            if agreed is WriterState.NO_SPACE:
                self._clear(pending.directory)
            raise problem
        message = f"the writer of {checkpoint_name(pending.position.step)} failed on "
        if self._writer.state() in (WriterState.FAILED, WriterState.NO_SPACE):
            message += f"this rank: {self._writer.failure_reason()}"
        else:
            message += "another rank"
        if agreed is WriterState.NO_SPACE:
            self._clear(pending.directory)
            raise NoSpaceError(message)
        raise CheckpointError(message)

    def _clear(self, directory: Path) -> None:
        """Delete unusable files: the records of how this launch ends need free space."""
        self._writer.abandon()
        if self._job.launch.leads:
            shutil.rmtree(directory, ignore_errors=True)


# -- Publish a written checkpoint in a thread of rank 0 ------------------------------------------
# Flushing the files of hundreds of ranks takes seconds on a shared file system, so a thread does it
# beside training. The other ranks learn the result from rank 0's vote.


class Publisher:
    """Publishes one checkpoint at a time; `published` is its manifest once it is published."""

    def __init__(self, job: Job, skips: Skips, form: Form) -> None:
        self._job = job
        self._form = form
        self._skips = skips
        self._publication = Publication(
            job.run,
            job.launch,
            keep=job.config.keep_checkpoints,
            keep_every_steps=job.config.keep_every_steps,
            pinned=self._before_skips,
        )
        self.state = WriterState.FINISHED
        self.problem: HpctrainError | None = None
        self.published: Manifest | None = None
        self.published_at = 0.0

    def start(self, position: Position, directory: Path) -> None:
        """Start to publish the files in `directory`."""
        self.state, self.problem, self.published = WriterState.RUNNING, None, None
        threading.Thread(
            target=self._publish, args=(position, directory), name="publisher", daemon=True
        ).start()

    def join(self) -> None:
        """Wait for the deletion of old checkpoints, for a limited time."""
        self._publication.join()

    def _publish(self, position: Position, directory: Path) -> None:
        """Publish in the thread; sets `published` or `problem`, and `state` last."""
        job = self._job
        try:
            manifest = self._publication.publish(lambda: self._manifest(position, directory))
        except Exception as raised:
            # All ranks raise the problem; they learn of it by the state, so it is set first.
            self.problem = save_error(stale_or(raised, job.run, job.launch))
            full = isinstance(self.problem, NoSpaceError)
            self.state = WriterState.NO_SPACE if full else WriterState.FAILED
            return
        self.published, self.published_at = manifest, time.monotonic()
        self._publication.retire(position.step)
        self.state = WriterState.FINISHED

    def _manifest(self, position: Position, directory: Path) -> Manifest:
        shards = read_rank_digests(directory)
        on_disk = {path.name for path in directory.glob(self._form.shards)}
        missing = on_disk - {file.name for file in shards}
        if missing:
            raise CheckpointError(f"no digest was written for {', '.join(sorted(missing))}")
        writers = read_writers(directory)
        files = dict.fromkeys((digest_file(directory, name) for name in self._form.leader_files), 0)
        files |= {file: writers[file.name] for file in shards}
        return self._job.manifest(
            position.step, position.consumed_samples, files, self._form.library_version
        )

    def _before_skips(self) -> set[int]:
        """Find the last checkpoint before each range of skipped data, which stays."""
        if not self._skips.skips:
            return set()
        root = self._job.run.checkpoints
        manifests = [read_manifest(root / checkpoint_name(step)) for step in published_steps(root)]
        consumed = {m.step: m.consumed_samples or 0 for m in manifests if m is not None}
        return set(self._skips.pinned(consumed))
