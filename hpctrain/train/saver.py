"""Saving: from the state of all ranks to a published checkpoint, at once or beside training.

Both ways go through the same steps: plan and fork the writers (`begin`), learn that all of them
are through (`poll` with the step's agreement, or `finish`), write megatron-core's metadata, then
rank 0 publishes. Belongs here: this sequence on all ranks. Does not belong here: what makes a
checkpoint good and the fencing protocol (`hpctrain.checkpoints`), when to save (`loop`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from hpctrain.checkpoints.manifest import (
    Manifest,
    checkpoint_name,
    digest_file,
    partial_name,
    read_rank_digests,
)
from hpctrain.checkpoints.publish import Fence, StaleEpochError, publish, retire
from hpctrain.errors import CheckpointError
from hpctrain.store.epochs import current_epoch
from hpctrain.train.control import Control, WriterState
from hpctrain.train.job import Job
from hpctrain.train.snapshot import Position, Snapshot, layout_of, sharding_metadata
from hpctrain.train.writer import Writer

_POLL_SECONDS = 0.02
# What the ranks write before the writers start and after they are through, by rank 0.
_LEADER_FILES = ("common.pt", ".metadata", "metadata.json")


@dataclass
class _Pending:
    position: Position
    directory: Path
    request: Any
    started_at: float


class Saver:
    """Writes checkpoints of one launch; at most one is being written at a time.

    `published` is told the step of each checkpoint that counts, on rank 0.
    """

    def __init__(
        self,
        job: Job,
        snapshot: Snapshot,
        control: Control,
        published: Callable[[int, float], None],
    ) -> None:
        self._job = job
        self._snapshot = snapshot
        self._control = control
        self._published = published
        self._writer = Writer(job.launch.rank)
        self._strategy: Any = None
        self._pending: _Pending | None = None
        self.newest_step: int | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None

    @property
    def writer_state(self) -> WriterState:
        return self._writer.state()

    def begin(self, position: Position) -> None:
        """Plan a save of `position` and start the writers; waits for an earlier one first."""
        self.finish()
        started_at = time.monotonic()
        directory = self._prepare_directory(position.step)
        request = dist_checkpointing.save(
            self._snapshot.sharded(position),
            directory,
            self._save_strategy(),
            async_sharded_save=True,
            content_metadata=_plain(sharding_metadata()),
        )
        self._writer.start(request)
        self._pending = _Pending(position, directory, request, started_at)

    def poll(self, agreed: WriterState) -> None:
        """Publish the pending checkpoint once all writers are through; never waits for them."""
        if self._pending is None or agreed is WriterState.RUNNING:
            return
        if agreed is WriterState.FAILED:
            raise CheckpointError(self._failure())
        pending, self._pending = self._pending, None
        self._writer.collect()
        for finalize in pending.request.finalize_fns:
            finalize()
        self._publish(pending)

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one, and publish it."""
        while self._pending is not None:
            self.poll(self._control.worst_writer(self._writer.state()))
            if self._pending is not None:
                time.sleep(_POLL_SECONDS)

    def abandon(self) -> None:
        """Leave the pending checkpoint unfinished; its files never count."""
        self._writer.abandon()

    def _prepare_directory(self, step: int) -> Path:
        directory = self._job.run.checkpoints / partial_name(step, self._job.launch.epoch)
        if self._job.launch.leads:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True, mode=0o700)
        self._control.barrier()
        return directory

    def _save_strategy(self) -> Any:
        """Kept between saves: the fully parallel wrapper remembers who writes what."""
        if self._strategy is None:
            strategy = get_default_save_sharded_strategy("torch_dist", 1)
            strategy.thread_count = 1
            group = sharding_metadata()["dp_cp_group"]
            if group.size() > 1:
                strategy = FullyParallelSaveStrategyWrapper(strategy, group, True)
            self._strategy = strategy
        return self._strategy

    def _failure(self) -> str:
        assert self._pending is not None
        name = checkpoint_name(self._pending.position.step)
        if self._writer.state() is WriterState.FAILED:
            return f"the writer of {name} failed on this rank: {self._writer.what_happened()}"
        return f"the writer of {name} failed on another rank"

    def _publish(self, pending: _Pending) -> None:
        """Rank 0 publishes; its problem, if any, is everybody's."""
        problem = None
        if self._job.launch.leads:
            problem = self._publish_here(pending)
        problem = self._control.from_leader(problem)
        if problem is not None:
            kind, _, message = problem.partition(": ")
            raise StaleEpochError(message) if kind == "stale" else CheckpointError(message)
        self.newest_step = pending.position.step
        if self._job.launch.leads:
            self._retire_old()

    def _publish_here(self, pending: _Pending) -> str | None:
        run, launch = self._job.run, self._job.launch
        try:
            manifest = self._manifest(pending)
            publish(run.checkpoints, manifest, fence_of(self._job))
        except StaleEpochError as error:
            return f"stale: {error}"
        except (CheckpointError, OSError, ValueError) as error:
            owner = current_epoch(run.epochs)
            if owner != launch.epoch:  # its files were taken away while it was publishing
                return f"stale: launch epoch {launch.epoch} is stale: epoch {owner} owns the run"
            return f"failed: {error}"
        self._published(pending.position.step, time.monotonic() - pending.started_at)
        return None

    def _manifest(self, pending: _Pending) -> Manifest:
        config, directory = self._job.config, pending.directory
        shards = read_rank_digests(directory)
        on_disk = {path.name for path in directory.glob("*.distcp")}
        missing = on_disk - {file.name for file in shards}
        if missing:
            raise CheckpointError(f"no digest was left for {', '.join(sorted(missing))}")
        own = tuple(digest_file(directory, name) for name in _LEADER_FILES)
        tp, pp, dp = layout_of(config)
        return Manifest(
            step=pending.position.step,
            epoch=self._job.launch.epoch,
            engine="megatron",
            layout=f"tp {tp} · pp {pp} · dp {dp}",
            world_size=self._job.launch.world_size,
            consumed_samples=pending.position.consumed_samples,
            time=time.time(),
            files=own + shards,
        )

    def _retire_old(self) -> None:
        config = self._job.config
        retire(self._job.run.checkpoints, config.keep_checkpoints, config.keep_every_steps)


def fence_of(job: Job) -> Fence:
    """The right to publish: this launch's epoch is still the highest of the run."""
    return Fence(job.launch.epoch, lambda: current_epoch(job.run.epochs))


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """Without the process group, which cannot be stored."""
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}
