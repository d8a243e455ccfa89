"""From a checked job to a loop that is ready to run: process groups, engine, data, checkpoint.

The first module that imports torch. Belongs here: the order, the same for all engines. Does not
belong here: what an engine builds (see its room's `assembly`).
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Protocol, cast

import torch

from hpctrain.checkpoints.manifest import step_of
from hpctrain.engines.training import TrainConfig
from hpctrain.store.run_records import SaveRecord, read_saves
from hpctrain.train.datasets.skipped_samples import Skips, parse_skips, read_skips
from hpctrain.train.engine import Engine, Position, Room, Snapshot
from hpctrain.train.evaluating import evaluation_is_missing, is_evaluated
from hpctrain.train.faults import blames_checkpoint
from hpctrain.train.job import Job
from hpctrain.train.loop import Loop
from hpctrain.train.numerics import LossWindow, earlier_losses
from hpctrain.train.profiling import step_profiler
from hpctrain.train.report import Reporter
from hpctrain.train.saving.digest_check import DigestCheck
from hpctrain.train.saving.save_interval import SaveInterval
from hpctrain.train.saving.save_request import SaveRequest
from hpctrain.train.saving.saver import Saver
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import RankClock

# They say at import that TransformerEngine or Apex are missing, from every rank.
warnings.filterwarnings("ignore", module=r"(torch|megatron)\b.*")

_ROOMS = {"megatron": "megatron", "fsdp": "native", "ddp": "native", "deepspeed": "deepspeed"}


class Keeper(Protocol):
    """Who keeps what the record of how the rank ended needs: the last finished step, the step of
    the checkpoint while it is being loaded, and whether the start is over."""

    step: Callable[[], int]
    loading_step: int | None

    def begin(self) -> None:
        """All ranks have started: from now on they agree on when to stop."""


def room_of(config: TrainConfig) -> Room:
    """The engine's room, whose import brings in the engine."""
    name = _ROOMS[config.engine]
    return cast(Room, importlib.import_module(f"hpctrain.train.engines.{name}.assembly"))


def assemble(job: Job, keeper: Keeper, digests: DigestCheck | None = None) -> Loop:
    """Build everything on this rank; all ranks must call this.

    `digests` reads the checkpoint meanwhile: no rank returns before all of it is as it was written.
    """
    room = room_of(job.config)
    _settle(job.config, leads=job.launch.leads)
    reporter = Reporter(job)
    keeper.step = lambda: reporter.step
    reporter.phase("starting")
    mesh = room.join(job.config, job.launch)
    control = Control(mesh.control)
    skips = _skips(job, control)
    parts = room.build(job, mesh, control)
    position = _position(job, parts.snapshot, reporter, keeper, digests, control)
    interval = SaveInterval(job.config, job.launch.mttf_seconds, read_saves(job.run))

    def published(save: SaveRecord) -> None:
        interval.published(save)
        reporter.published(save)

    return Loop(
        job=job,
        engine=parts.engine,
        control=control,
        saver=Saver(job, parts.snapshot, control, published, skips),
        reporter=reporter,
        position=position,
        interval=interval,
        skips=skips,
        losses=_losses(job, control, position),
        clock=_clock(job, control, parts.engine, reporter),
        profiler=step_profiler(job, parts.engine.clock, reporter, control),
        request=SaveRequest(job.run.save_request, looks=job.launch.leads),
        owes_evaluation=_owes_evaluation(job, control, position),
        on_begin=keeper.begin,
    )


def _skips(job: Job, control: Control) -> Skips:
    """Rank 0 reads the list, for a shared file system may show each rank another version."""
    text = read_skips(job.run.skips) if job.launch.leads else None
    return parse_skips(control.from_leader(text), job.run.skips)


def _losses(job: Job, control: Control, position: Position) -> LossWindow:
    """Begins with the losses that led to the checkpoint, by what rank 0 reads of them."""
    limit = job.config.loss_spike
    if limit is None:
        return LossWindow(None)
    words = None
    if job.launch.leads:
        words = " ".join(loss.hex() for loss in earlier_losses(job.run, position.step))
    words = control.from_leader(words) or ""
    return LossWindow(limit, [float.fromhex(word) for word in words.split()])


def _owes_evaluation(job: Job, control: Control, position: Position) -> bool:
    """Whether the launch that saved the checkpoint left the evaluation of its last step."""
    if not is_evaluated(job.config, position.step):
        return False
    leads = job.launch.leads
    missing = "missing" if leads and evaluation_is_missing(job.run, position.step) else None
    return control.from_leader(missing) is not None


def _clock(job: Job, control: Control, engine: Engine, reporter: Reporter) -> RankClock:
    return RankClock(
        clock=engine.clock,
        control=control,
        rank=job.launch.rank,
        nodes=tuple(control.everywhere(job.launch.node)),
        epoch=job.launch.epoch,
        interval_steps=job.config.rank_times_interval_steps,
        tell=reporter.rank_times,
    )


def _position(
    job: Job,
    snapshot: Snapshot,
    reporter: Reporter,
    keeper: Keeper,
    digests: DigestCheck | None,
    control: Control,
) -> Position:
    """Step 0, or what the checkpoint says; raises BadCheckpointError on all ranks if a digest of
    any of its files differs."""
    directory = job.resume_directory
    if directory is None:
        reporter.log("start", step=0, world_size=job.launch.world_size)
        return Position(0, 0)
    reporter.phase("loading")
    keeper.loading_step = step_of(directory.name)
    try:
        position, remark = snapshot.restore(directory)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if digests is not None and blames_checkpoint(error):
            digests.explain()
        raise
    if digests is not None:
        digests.agree(control, waiting=reporter.still_working)
    keeper.loading_step = None
    reporter.resumed_from(position.step)
    reporter.log("resume", step=position.step, checkpoint=directory.name)
    if remark is not None:
        reporter.log("remark", text=remark)
    return position


def _settle(config: TrainConfig, *, leads: bool) -> None:
    """Threads, determinism and the chatter of libraries."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.deterministic_mode:
        # cuBLAS, NCCL and TransformerEngine read these when they are first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
    if not leads:
        logging.getLogger("megatron").setLevel(logging.ERROR)
