"""The process groups of one rank: every rank reads samples of its own.

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

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.train.data import Share
from hpctrain.train.deepspeed import library
from hpctrain.train.device import backend, choose_device
from hpctrain.train.launch import Launch


@dataclass(frozen=True)
class Mesh:
    """Where this rank computes; `control` is a gloo group of all ranks for agreements."""

    device: torch.device
    rank: int
    size: int
    control: Any

    @property
    def share(self) -> Share:
        return Share(self.rank, self.size, self.device)


def open_mesh(config: DeepSpeedConfig, launch: Launch) -> Mesh:
    """Join the launch's process groups; all ranks must call this."""
    device = choose_device(launch)
    timeout = timedelta(seconds=config.distributed_timeout_seconds)
    dist.init_process_group(
        backend(), rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
    _tell_deepspeed(launch, device)
    library.join(timeout)
    seed_dropout(config.seed, launch.rank)
    return Mesh(
        device=device,
        rank=launch.rank,
        size=launch.world_size,
        control=dist.new_group(backend="gloo", timeout=timeout),
    )


def _tell_deepspeed(launch: Launch, device: torch.device) -> None:
    """It looks for its launcher's variables (runtime/engine.py, _configure_with_arguments), and
    takes LOCAL_RANK for the number of the GPU."""
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    os.environ["LOCAL_RANK"] = str(launch.local_rank if device.index is None else device.index)


def seed_dropout(seed: int, rank: int) -> None:
    """Ranks read different samples, so each draws masks of its own."""
    torch.manual_seed(seed + rank)
