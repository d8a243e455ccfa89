"""Build the training loop of a rank: process groups, engine, data, checkpoint.

The first module that imports torch. Belongs here: the order, the same for all engines. Does not
belong here: what an engine builds (see its `assembly`).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.records.data_identity import read_identity
from hpctrain.records.datasets import bin_path, idx_path, npz_path, sidecar_path
from hpctrain.records.manifest import step_of
from hpctrain.records.requests import SaveRequest
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.spec.engines.registry import abilities_of, resolve
from hpctrain.train.datasets.skipped_samples import parse_skips, read_skips
from hpctrain.train.device import on_cpu
from hpctrain.train.engine import Position, Room, Snapshot
from hpctrain.train.faults import blames_checkpoint
from hpctrain.train.job import Job, Keeper
from hpctrain.train.loop import Loop, is_evaluated
from hpctrain.train.messages import MessageClock, recording_of
from hpctrain.train.node_copies import CopyWords, SourceFile, copied_once, only_process
from hpctrain.train.numerics import LossWindow, earlier_losses, evaluation_is_missing
from hpctrain.train.profiling import step_profiler
from hpctrain.train.report import Reporter
from hpctrain.train.saving.digest_check import DigestCheck
from hpctrain.train.saving.save_interval import SaveInterval
from hpctrain.train.saving.saver import Saver
from hpctrain.train.software_agreement import agree_on_software
from hpctrain.train.spared_imports import (
    UNUSED_LOGGERS,
    hidden,
    spare_dynamo,
    use_deterministic_algorithms,
)
from hpctrain.train.speed_check import check_speed, watch_network
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import RankClock

# Every rank would warn at import that TransformerEngine or Apex are missing.
warnings.filterwarnings("ignore", module=r"(torch|megatron)\b.*")


def room_of(config: TrainConfig) -> Room:
    """Import the room of the engine, and the engine with it."""
    assembly = abilities_of(config.engine).assembly
    assert assembly is not None, f"engine {config.engine} trains with a program of its own"
    with hidden(*UNUSED_LOGGERS):
        room = cast(Room, resolve(assembly))
    if on_cpu():
        spare_dynamo()
    return room


def assemble(job: Job, keeper: Keeper, digests: DigestCheck | None = None) -> Loop:
    """Build everything on this rank; a collective call.

    `digests` verifies the checkpoint meanwhile; no rank returns before all of it is verified.
    """
    agree_on_software(job)  # before the engine is imported, which imports TransformerEngine
    room = room_of(job.config)
    _configure_libraries(job.config, leads=job.launch.leads)
    reporter = Reporter(job)
    keeper.step = lambda: reporter.step
    reporter.phase("starting")
    network = watch_network(job)
    mesh = room.join(job.config, job.launch)
    control = Control(mesh.control)
    check_speed(job, mesh, control, network, reporter.still_working)
    # Rank 0 reads the list: a shared file system may show other ranks another version.
    text = read_skips(job.run.skips) if job.launch.leads else None
    skips = parse_skips(control.from_leader(text), job.run.skips)
    job = replace(job, copies=staged_copies(job, mesh.reads, reporter.still_working))
    parts = room.build(job, mesh, control)
    position = _position(job, parts.snapshot, reporter, keeper, digests, control)
    limit_collectives(job.config.distributed_timeout_seconds)
    launch: dict[str, Any] = dict(
        control=control,
        rank=job.launch.rank,
        nodes=tuple(control.everywhere(job.launch.node)),
        epoch=job.launch.epoch,
    )
    # rank 0 reads the losses that led to the checkpoint, and whether the launch that saved it has
    # skipped its last evaluation
    limit, losses = job.config.loss_spike, ""
    if limit is not None:
        if job.launch.leads:
            losses = " ".join(loss.hex() for loss in earlier_losses(job.run, position.step))
        losses = control.from_leader(losses) or ""
    pending = is_evaluated(job.config, position.step)
    if pending:
        missing = job.launch.leads and evaluation_is_missing(job.run, position.step)
        pending = bool(control.from_leader(missing))
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
        losses=LossWindow(limit, [float.fromhex(loss) for loss in losses.split()]),
        clock=RankClock(
            parts.engine.clock,
            interval_steps=job.config.rank_times_interval_steps,
            tell=reporter.rank_times,
            **launch,
        ),
        messages=MessageClock(
            recording_of({str(mesh.control.group_name)}),
            # a rank alone has no messages, and an engine for one rank may have no axes
            mesh.axes if job.launch.world_size > 1 else (),
            interval_steps=job.config.measured_messages_steps,
            tell=reporter.communication,
            **launch,
        ),
        profiler=step_profiler(job, parts.engine.clock, reporter, control),
        request=SaveRequest(job.run, looks=job.launch.leads),
        evaluation_pending=pending,
        on_begin=keeper.begin,
    )


def _position(
    job: Job,
    snapshot: Snapshot,
    reporter: Reporter,
    keeper: Keeper,
    digests: DigestCheck | None,
    control: Control,
) -> Position:
    """Restore the checkpoint, if any, and return the position.

    Raises BadCheckpointError on all ranks if the digest of any of its files differs.
    """
    directory = job.resume_directory
    if directory is None:
        reporter.log("start", step=0, world_size=job.launch.world_size)
        return Position(0, 0)
    reporter.phase("loading")
    keeper.loading_step = step_of(directory.name)
    try:
        position, remark = snapshot.restore(directory)
    except BaseException as error:  # torch's CheckpointException is not an Exception
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


def _configure_libraries(config: TrainConfig, *, leads: bool) -> None:
    """Set the number of threads, determinism and log levels."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.deterministic_mode:
        # cuBLAS, NCCL and TransformerEngine read these when they are first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        use_deterministic_algorithms(compiled=not on_cpu())
    if not leads:
        logging.getLogger("megatron").setLevel(logging.ERROR)


# -- Change how long collective operations may take, once the start is over ---------------------
# Before the first step one rank may build an index, or load weights, for all others; afterwards a
# rank that is silent for minutes hangs.


def limit_collectives(seconds: float) -> None:
    """Set the timeout of all process groups of this rank, which gloo and NCCL read at each call."""
    if not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


# -- Copy the data of a run to a disk of this node, and say where the copies are ----------------
# Every rank that reads data calls this. Copies are compared with the digests that `submit` has
# recorded.


_WORDS = CopyWords("the data", "`data: {stage: false}` reads them where they are")


def staged_copies(job: Job, reads: bool, working: Callable[[], None]) -> dict[str, str]:
    """Copy all sources of a run with `stage_data`, and map each to its copy.

    Empty for other runs and on ranks that read nothing. `working` is called several times a second
    meanwhile. Raises InvalidInputError if a file cannot be copied or does not arrive as it was.
    """
    config = job.config
    if not config.stage_data or not reads:
        return {}
    # the script has made TMPDIR one on this node's disk
    if not os.environ.get("TMPDIR"):
        message = "TMPDIR is not set, below which data is copied"
        raise InvalidInputError([Problem(message, hint="start the run with its script")])
    place = Path(os.environ["TMPDIR"], "hpctrain-data")
    identity = read_identity(job.run.data_identity)
    digests = {file.path: file.sha256 for file in identity.files} if identity else {}
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_process(place / "lock", working):
            return {
                source: str(copied_once(files, place, digests, working, _WORDS) / Path(source).name)
                for source, files in _files_of(config)
            }
    except OSError as error:
        message = f"cannot be copied to {place}: {error.strerror or error}"
        where = error.filename or place
        raise InvalidInputError([Problem(message, str(where), node_dependent=True)]) from error


def _files_of(config: TrainConfig) -> Iterator[tuple[str, list[SourceFile]]]:
    """List the sources of a configuration, each with its files and, if it has one, its sidecar."""
    rows = isinstance(config, ModuleConfig) and config.data_format != "tokens"
    sources = [path for _, path in config.data_blend]
    if isinstance(config, ModuleConfig) and config.data_validation is not None:
        sources.append(config.data_validation)
    for source in dict.fromkeys(sources):
        path = Path(source)
        needed = [npz_path(path)] if rows else [bin_path(path), idx_path(path)]
        optional = sidecar_path(path)
        files = [*needed, optional] if optional.exists() else needed
        found = [(file, file.stat()) for file in files]
        yield source, [SourceFile(f, f.name, of.st_size, of.st_mtime_ns) for f, of in found]
