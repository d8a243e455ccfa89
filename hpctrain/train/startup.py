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

from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine  # noqa: E402

from hpctrain.train import mcore_fixes  # noqa: E402
from hpctrain.train.control import Control  # noqa: E402
from hpctrain.train.data import open_data  # noqa: E402
from hpctrain.train.forward import Pass  # noqa: E402
from hpctrain.train.job import Job  # noqa: E402
from hpctrain.train.loop import Loop  # noqa: E402
from hpctrain.train.mesh import open_mesh  # noqa: E402
from hpctrain.train.model import build_model  # noqa: E402
from hpctrain.train.optimizer import build_optimizer  # noqa: E402
from hpctrain.train.report import Reporter  # noqa: E402
from hpctrain.train.saver import Saver  # noqa: E402
from hpctrain.train.snapshot import Position, Snapshot  # noqa: E402


class StepKeeper(Protocol):
    """Who wants to know the last finished step, for the record of how the rank ended."""

    step: Callable[[], int]


def assemble(job: Job, keeper: StepKeeper) -> Loop:
    """Build everything on this rank; all ranks must call this."""
    mcore_fixes.install()
    _settle(job.config, leads=job.launch.leads)
    reporter = Reporter(job)
    keeper.step = lambda: reporter.step
    reporter.phase("starting")
    mesh = open_mesh(job.config, job.launch)
    model = build_model(job.config, mesh, initialize=job.resume_directory is None)
    optimizer = build_optimizer(job.config, model)
    data = open_data(job.config, mesh, job.data_cache)
    snapshot = Snapshot(job.config, model, optimizer)
    position = _position(job, snapshot, reporter)
    control = Control(mesh.control)
    return Loop(
        job=job,
        runner=Pass(job.config, mesh, model),
        optimizer=optimizer,
        data=data,
        control=control,
        saver=Saver(job, snapshot, control, reporter.published),
        reporter=reporter,
        position=position,
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


def _settle(config: TrainConfig, *, leads: bool) -> None:
    """Threads, determinism and the chatter of libraries."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.deterministic_mode:
        # cuBLAS, NCCL and TransformerEngine read these when they are first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
    # DISABLED still refuses gradients that are not finite; without this call it warns
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    if not leads:
        logging.getLogger("megatron").setLevel(logging.ERROR)
