"""From a checked job to a loop that is ready to run: groups, model, optimizer, data, checkpoint.

The first module that imports torch, so it also puts the CPU layer and the corrections of
megatron-core in force before anything else of megatron-core is imported.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Protocol

import torch

from hpctrain.engines.megatron import TrainConfig
from hpctrain.train import cpu

# They say at import that TransformerEngine or Apex are missing, from every rank.
warnings.filterwarnings("ignore", module=r"(torch|megatron)\b.*")
cpu.install()

from megatron.core.rerun_state_machine import (  # noqa: E402
    _set_rerun_state_machine,
    destroy_rerun_state_machine,
)

from hpctrain.store.signs import SaveRecord, read_saves  # noqa: E402
from hpctrain.train import mcore_fixes  # noqa: E402
from hpctrain.train.control import Control  # noqa: E402
from hpctrain.train.data import open_data  # noqa: E402
from hpctrain.train.forward import Pass  # noqa: E402
from hpctrain.train.interval import SaveInterval  # noqa: E402
from hpctrain.train.job import Job  # noqa: E402
from hpctrain.train.loop import Loop  # noqa: E402
from hpctrain.train.mesh import open_mesh  # noqa: E402
from hpctrain.train.model import Model, build_model  # noqa: E402
from hpctrain.train.numerics import GradientWitness, LossWindow, earlier_losses  # noqa: E402
from hpctrain.train.optimizer import build_optimizer  # noqa: E402
from hpctrain.train.report import Reporter  # noqa: E402
from hpctrain.train.request import SaveRequest  # noqa: E402
from hpctrain.train.saver import Saver  # noqa: E402
from hpctrain.train.skips import Skips, parse_skips, read_skips  # noqa: E402
from hpctrain.train.snapshot import Position, Snapshot  # noqa: E402
from hpctrain.train.times import ComputeTimers, RankClock  # noqa: E402


class StepKeeper(Protocol):
    """Who wants to know the last finished step, for the record of how the rank ended."""

    step: Callable[[], int]


def assemble(job: Job, keeper: StepKeeper) -> Loop:
    """Build everything on this rank; all ranks must call this."""
    mcore_fixes.install()
    witness = _settle(job.config, leads=job.launch.leads)
    reporter = Reporter(job)
    keeper.step = lambda: reporter.step
    reporter.phase("starting")
    mesh = open_mesh(job.config, job.launch)
    control = Control(mesh.control)
    skips = _skips(job, control)
    model = build_model(job.config, mesh, initialize=job.resume_directory is None)
    optimizer = build_optimizer(job.config, model)
    data = open_data(job.config, mesh, job.data_cache)
    snapshot = Snapshot(job.config, model, optimizer)
    position = _position(job, snapshot, reporter)
    interval = SaveInterval(job.config, job.launch.mttf_seconds, read_saves(job.run))

    def published(save: SaveRecord) -> None:
        interval.published(save)
        reporter.published(save)

    return Loop(
        job=job,
        runner=Pass(job.config, mesh, model),
        optimizer=optimizer,
        data=data,
        control=control,
        saver=Saver(job, snapshot, control, published, skips),
        reporter=reporter,
        position=position,
        interval=interval,
        skips=skips,
        witness=witness,
        losses=_losses(job, control, position),
        clock=_clock(job, control, model, reporter),
        request=SaveRequest(job.run.save_request, looks=job.launch.leads),
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


def _clock(job: Job, control: Control, model: Model, reporter: Reporter) -> RankClock:
    timers = ComputeTimers()
    model.settings.timers = timers
    return RankClock(
        timers=timers,
        control=control,
        rank=job.launch.rank,
        nodes=tuple(control.everywhere(job.launch.node)),
        epoch=job.launch.epoch,
        interval_steps=job.config.rank_times_interval_steps,
        tell=reporter.rank_times,
    )


def _position(job: Job, snapshot: Snapshot, reporter: Reporter) -> Position:
    """Step 0, or what the checkpoint says."""
    directory = job.resume_directory
    if directory is None:
        reporter.log("start", step=0, world_size=job.launch.world_size)
        return Position(0, 0)
    reporter.phase("loading")
    position, remark = snapshot.restore(directory)
    reporter.resumed_from(position.step)
    reporter.log("resume", step=position.step, checkpoint=directory.name)
    if remark is not None:
        reporter.log("remark", text=remark)
    return position


def _settle(config: TrainConfig, *, leads: bool) -> GradientWitness:
    """Threads, determinism and the chatter of libraries; who watches the gradients."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.deterministic_mode:
        # cuBLAS, NCCL and TransformerEngine read these when they are first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    if not leads:
        logging.getLogger("megatron").setLevel(logging.ERROR)
    witness = GradientWitness()
    destroy_rerun_state_machine()
    _set_rerun_state_machine(witness)
    return witness
