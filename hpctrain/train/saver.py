"""Saving: from the state of all ranks to a published checkpoint, at once or beside training.

Both ways go through the same stages: plan and fork the writers (`begin`), learn that all of them
are through (`poll` with the step's agreement, or `finish`), write the engine's metadata, let
rank 0 publish, learn that it counts. Belongs here: this sequence on all ranks. Does not belong
here: what makes a checkpoint good and the fencing protocol (`hpctrain.checkpoints`), when to save
(`loop`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoints.manifest import checkpoint_name, partial_name
from hpctrain.errors import CheckpointError
from hpctrain.store.signs import SaveRecord
from hpctrain.train.control import Control, WriterState
from hpctrain.train.engine import Position, Snapshot, Writing
from hpctrain.train.faults import is_full
from hpctrain.train.job import Job
from hpctrain.train.publisher import Publisher, raise_problem
from hpctrain.train.room import Need, NoSpaceError, check_room, exhausted, newest_size
from hpctrain.train.skips import Skips
from hpctrain.train.writer import Writer

_POLL_SECONDS = 0.01


@dataclass
class _Pending:
    """A save under way. `publishing`: all writers are through, rank 0 makes it count."""

    position: Position
    directory: Path
    writing: Writing
    started_at: float
    stall_seconds: float
    publishing: bool = False


class Saver:
    """Writes checkpoints of one launch; at most one is being written at a time.

    `published` is told about each checkpoint that counts, on rank 0.
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
        self._writer = Writer(job.launch.rank)
        self._publisher = Publisher(job, skips, snapshot.form)
        self._estimate_bytes: int | None = None
        self._pending: _Pending | None = None
        self.newest_step: int | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None

    @property
    def writer_state(self) -> WriterState:
        """Of this rank: its writer, and on rank 0 then the publisher."""
        if self._pending is not None and self._pending.publishing:
            return self._publisher.state
        return self._writer.state()

    def begin(self, position: Position) -> None:
        """Plan a save of `position` and start the writers; waits for an earlier one first.

        Raises NoSpaceError when there is no room for it, if possible before anything is written.
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
        """Take the pending checkpoint one stage further if all ranks are ready; never waits."""
        pending = self._pending
        if pending is None or agreed is WriterState.RUNNING:
            return
        began_at = time.monotonic()
        if agreed is not WriterState.FINISHED:
            self._fail(pending, agreed)
        elif pending.publishing:
            self._pending, self.newest_step = None, pending.position.step
        else:
            self._hand_over(pending)
        pending.stall_seconds += time.monotonic() - began_at
        if self._pending is None and self._job.launch.leads:
            self._tell(pending)

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one, until it counts."""
        if self._pending is not None:
            self._wait(self._pending)

    def leave(self) -> None:
        """At the end of a launch: `finish`, and give retention time to end."""
        self.finish()
        self._publisher.join()

    def abandon(self) -> None:
        """Leave the pending checkpoint unfinished; its files never count."""
        self._writer.abandon()

    def _wait(self, charged: _Pending | None = None) -> float:
        """Until nothing is pending: the seconds waited, added to the stall of `charged`."""
        waited_seconds = 0.0
        while self._pending is not None:
            began_at = time.monotonic()
            agreed = self._agree_while_waiting(self._pending)
            seconds = time.monotonic() - began_at
            waited_seconds += seconds
            if charged is not None:
                charged.stall_seconds += seconds
            self.poll(agreed)
        return waited_seconds

    def _agree_while_waiting(self, pending: _Pending) -> WriterState:
        """What all ranks agree on about their writers.

        Which of the functions below a rank is in tells the supervisor, who reads stacks, whose
        writer does not end (`hpctrain.supervise.stacks` knows them by their names).
        """
        if pending.publishing:
            return self._wait_for_publisher()
        if self._writer.state() is WriterState.RUNNING:
            return self._wait_for_own_writer()
        return self._wait_for_other_writers()

    def _wait_for_own_writer(self) -> WriterState:
        return self._agree_or_rest(self._writer.state())

    def _wait_for_other_writers(self) -> WriterState:
        return self._agree_or_rest(self._writer.state())

    def _wait_for_publisher(self) -> WriterState:
        return self._agree_or_rest(self.writer_state)

    def _agree_or_rest(self, own: WriterState) -> WriterState:
        agreed = self._control.worst_writer(own)
        if agreed is WriterState.RUNNING:
            time.sleep(_POLL_SECONDS)
        return agreed

    def _prepare_directory(self, step: int) -> Path:
        """Rank 0 looks for room and makes the directory; its problem, if any, is everybody's."""
        root = self._job.run.checkpoints
        directory = root / partial_name(step, self._job.launch.epoch)
        if self._estimate_bytes is None:
            self._estimate_bytes = self._snapshot.estimated_bytes(self._control)
        problem = None
        if self._job.launch.leads:
            world_size = self._job.launch.world_size
            first = Need(self._estimate_bytes, 2 * world_size, "estimated from the parameters")
            problem = check_room(root, newest_size(root, world_size) or first)
            if problem is None:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True, mode=0o700)
        problem = self._control.from_leader(problem)
        if problem is not None:
            raise NoSpaceError(problem)
        return directory

    def _hand_over(self, pending: _Pending) -> None:
        """All writers are through: the engine's metadata, then rank 0 publishes."""
        try:
            pending.writing.finish(self._writer.collect())
        except Exception as error:
            if is_full(error) or exhausted(pending.directory):
                self._clear(pending.directory)
                raise NoSpaceError(f"no room for the metadata: {error}") from error
            raise
        pending.publishing = True
        if self._job.launch.leads:
            self._publisher.start(pending.position, pending.directory)

    def _fail(self, pending: _Pending, agreed: WriterState) -> None:
        if pending.publishing:
            problem = self._control.from_leader(self._publisher.problem)
            assert problem is not None, "the publisher failed and says nothing"
            if agreed is WriterState.NO_SPACE:
                self._clear(pending.directory)
            raise_problem(problem)
        message = self._failure(pending)
        if agreed is WriterState.NO_SPACE:
            self._clear(pending.directory)
            raise NoSpaceError(message)
        raise CheckpointError(message)

    def _failure(self, pending: _Pending) -> str:
        name = checkpoint_name(pending.position.step)
        if self._writer.state() in (WriterState.FAILED, WriterState.NO_SPACE):
            return f"the writer of {name} failed on this rank: {self._writer.what_happened()}"
        return f"the writer of {name} failed on another rank"

    def _clear(self, directory: Path) -> None:
        """Its files can never count, and the records of how this launch ends need room."""
        self._writer.abandon()
        if self._job.launch.leads:
            shutil.rmtree(directory, ignore_errors=True)

    def _tell(self, pending: _Pending) -> None:
        manifest = self._publisher.published
        assert manifest is not None, "told of a checkpoint that does not count"
        self._published(
            SaveRecord(
                step=manifest.step,
                epoch=manifest.epoch,
                time=manifest.time,
                stall_seconds=pending.stall_seconds,
                publish_seconds=self._publisher.published_at - pending.started_at,
                size_bytes=manifest.total_bytes,
            )
        )
