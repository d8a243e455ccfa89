"""The process groups of one rank, and its place among stages and replicas.

Belongs here: torch.distributed, seeding, and what DeepSpeed reads from the environment. Does not
belong here: what is computed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.train.data import Share
from hpctrain.train.device import backend, choose_device
from hpctrain.train.engines.deepspeed import library
from hpctrain.train.rank_environment import Launch


@dataclass(frozen=True)
class Mesh:
    """Where this rank computes; `control` is a gloo group of all ranks for agreements.

    `stage` of a pipeline, and `replica`: which of the `replicas` of this stage. Without a pipeline
    all ranks are of one stage. `tensors`: the group that splits each weight, `data` the one that
    adds up gradients without a pipeline; None where that is nobody, or everybody.
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

    @property
    def share(self) -> Share:
        """Replicas read samples of their own; stages of one pipeline, and ranks that split a
        weight, the same."""
        return Share(self.replica, self.replicas, self.device)

    @property
    def reads(self) -> bool:
        """True on the stages that embed tokens or compute the loss."""
        return self.stage in (0, self.stages - 1)


def open_mesh(config: DeepSpeedConfig, launch: Launch) -> Mesh:
    """Join the launch's process groups; all ranks must call this."""
    device = choose_device(launch)
    timeout = timedelta(seconds=config.distributed_timeout_seconds)
    dist.init_process_group(
        backend(), rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
    _tell_deepspeed(launch, device)
    library.join(timeout)
    seed_dropout(config, config.seed, launch.rank)
    tensors, data = _tensor_groups(config)
    stages = max(1, len(config.pipeline_stages))
    stage, replica = place_of(launch.rank, config)
    return Mesh(
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
    )


def place_of(rank: int, config: DeepSpeedConfig) -> tuple[int, int]:
    """(stage, replica), as `stages.topology_of` tells DeepSpeed."""
    stages, replicas = max(1, len(config.pipeline_stages)), config.data_parallel_size
    place = rank // config.tensor_parallel  # neighbours split a weight
    if config.pipelines_near:
        return place % stages, place // stages
    return place // replicas, place % replicas


def _tensor_groups(config: DeepSpeedConfig) -> tuple[Any, Any]:
    """Made by DeepSpeed, which asks its module `groups` for them later, where it is the `mpu`."""
    if config.tensor_parallel == 1:
        return None, None
    groups._init_tp_mesh_device(tensor_model_parallel_size=config.tensor_parallel)
    return groups.get_tensor_model_parallel_group(), groups.get_data_parallel_group()


def _tell_deepspeed(launch: Launch, device: torch.device) -> None:
    """It looks for its launcher's variables (runtime/engine.py, _configure_with_arguments), and
    takes LOCAL_RANK for the number of the GPU."""
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    os.environ["LOCAL_RANK"] = str(launch.local_rank if device.index is None else device.index)


def seed_dropout(config: DeepSpeedConfig, seed: int, rank: int) -> None:
    """Ranks that read different samples draw masks of their own."""
    torch.manual_seed(seed + rank // config.tensor_parallel)
