"""Import deepspeed, join the process groups of one rank, and locate it among stages and replicas.

Belongs here: settings of the library as a whole, torch.distributed, seeding, and what DeepSpeed
reads from the environment. Does not belong here: settings of a run (see
`hpctrain.engines.deepspeed`), what is computed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train.device import backend, join_ranks, on_cpu

if on_cpu():
    # accelerator/real_accelerator.py: otherwise it searches for one and prints the result
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
from deepspeed.utils import groups

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.records.speed_checks import AxisName
from hpctrain.train.data import Share
from hpctrain.train.engine import AxisGroup
from hpctrain.train.rank_environment import Launch

# comm/torch.py, build_shm_op: on a CPU it would build an all-reduce over shared memory with a
# compiler, for two minutes; gloo does it. Set before the first query: a query for any operator
# tries out the compiler on all of them (ops/__init__.py).
deepspeed.ops.__compatible_ops__ = {}
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"deepspeed\b.*")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what DeepSpeed prints to standard output, bypassing its logger."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@dataclass(frozen=True)
class DeepSpeedMesh:
    """The device of this rank and its place; `control` is a gloo group of all ranks.

    `stage`: the stage of the pipeline, 0 without one. `replica`: the index among the `replicas` of
    this stage. `tensors`: the group that splits each weight; None for no group. `data`: the group
    that sums gradients without a pipeline; None for all ranks. `pipeline`: the ranks of all stages
    through which the samples of this rank pass.
    """

    device: torch.device
    rank: int
    size: int
    replicas: int
    stages: int
    stage: int
    replica: int
    control: Any
    tensors: Any
    data: Any
    pipeline: tuple[int, ...]

    @property
    def axes(self) -> tuple[AxisGroup, ...]:
        """Groups of all axes, but dp behind a pipeline: DeepSpeed makes these groups afterwards."""
        found: list[AxisGroup] = []
        if self.tensors is not None:
            found.append(_grouped("tp", self.tensors))
        if self.stages > 1:
            found.append(AxisGroup("pp", dist.group.WORLD, self.pipeline))
        elif self.replicas > 1:
            found.append(_grouped("dp", self.data or dist.group.WORLD))
        return tuple(found)

    @property
    def share(self) -> Share:
        """Each replica reads its own samples; stages of one pipeline, and ranks that split a
        weight, read the same."""
        return Share(self.replica, self.replicas, self.device)

    @property
    def reads(self) -> bool:
        """True on the stages that embed tokens or compute the loss."""
        return self.stage in (0, self.stages - 1)


def open_mesh(config: DeepSpeedConfig, launch: Launch) -> DeepSpeedMesh:
    """Join the launch's process groups; all ranks must call this."""
    device, timeout = join_ranks(config, launch)
    # DeepSpeed reads its launcher's variables (runtime/engine.py, _configure_with_arguments), and
    # takes LOCAL_RANK for the number of the GPU.
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    os.environ["LOCAL_RANK"] = str(launch.local_rank if device.index is None else device.index)
    # over the existing groups of torch.distributed
    deepspeed.init_distributed(backend(), timeout=timeout, verbose=False)
    seed_dropout(config, config.seed, launch.rank)
    tensors, data = None, None
    if config.tensor_parallel > 1:
        # made by DeepSpeed, which reads them from its module `groups` later, its `mpu`
        groups._init_tp_mesh_device(tensor_model_parallel_size=config.tensor_parallel)
        tensors = groups.get_tensor_model_parallel_group()
        data = groups.get_data_parallel_group()
    stages = max(1, len(config.pipeline_stages))
    stage, replica = place_of(launch.rank, config)
    return DeepSpeedMesh(
        device=device,
        rank=launch.rank,
        size=launch.world_size,
        replicas=config.data_parallel_size,
        stages=stages,
        stage=stage,
        replica=replica,
        control=dist.new_group(backend="gloo", timeout=timeout),
        tensors=tensors,
        data=data,
        pipeline=pipeline_of(launch.rank, launch.world_size, config),
    )


def place_of(rank: int, config: DeepSpeedConfig) -> tuple[int, int]:
    """Return (stage, replica) of a rank, consistent with `pipeline_stages.topology_of`."""
    stages, replicas = max(1, len(config.pipeline_stages)), config.data_parallel_size
    place = rank // config.tensor_parallel  # adjacent ranks split a weight
    if config.pipelines_near:
        return place % stages, place // stages
    return place // replicas, place % replicas


def pipeline_of(rank: int, size: int, config: DeepSpeedConfig) -> tuple[int, ...]:
    """Return the ranks of all stages of a rank's pipeline, by stage."""
    own = (place_of(rank, config)[1], rank % config.tensor_parallel)
    same = [
        other
        for other in range(size)
        if (place_of(other, config)[1], other % config.tensor_parallel) == own
    ]
    return tuple(sorted(same, key=lambda other: place_of(other, config)[0]))


def _grouped(axis: AxisName, group: Any) -> AxisGroup:
    return AxisGroup(axis, group, tuple(dist.get_process_group_ranks(group)))


def seed_dropout(config: DeepSpeedConfig, seed: int, rank: int) -> None:
    """Seed ranks that read different samples differently."""
    torch.manual_seed(seed + rank // config.tensor_parallel)
