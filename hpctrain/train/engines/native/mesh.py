"""Join the process groups of one rank: copies of the model, and the ranks that share a copy.

Belongs here: torch.distributed and seeding. Does not belong here: what is computed on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpctrain.engines.native import NativeConfig
from hpctrain.train.data import Share
from hpctrain.train.device import backend, choose_device
from hpctrain.train.engine import AxisGroup
from hpctrain.train.rank_environment import Launch


@dataclass(frozen=True)
class NativeMesh:
    """The device and groups of this rank.

    `shards`: the DeviceMesh that `fully_shard` takes; None for DDP. `control` is a gloo group of
    all ranks for agreements, apart from the collectives on GPUs.
    """

    device: torch.device
    rank: int
    size: int
    control: Any
    shards: Any

    @property
    def axes(self) -> tuple[AxisGroup, ...]:
        """All ranks sum gradients together, whether or not they share a copy of the model."""
        return (AxisGroup("dp", dist.group.WORLD, tuple(range(self.size))),) * (self.size > 1)

    @property
    def reads(self) -> bool:
        return True

    @property
    def share(self) -> Share:
        """Every rank reads its own samples."""
        return Share(self.rank, self.size, self.device)


def open_mesh(config: NativeConfig, launch: Launch) -> NativeMesh:
    """Join the launch's process groups; all ranks must call this."""
    device = choose_device(launch)
    timeout = timedelta(seconds=config.startup_timeout_seconds)
    dist.init_process_group(
        backend(host_tensors=config.cpu_offload),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    seed_dropout(config.seed, launch.rank)
    control = dist.new_group(backend="gloo", timeout=timeout)
    shards = None
    if config.engine == "fsdp":
        # one axis, or two: copies of the model outside, the shards of a copy on adjacent ranks
        copies = config.data_parallel_size // config.shard_size
        axes = {"copy": copies} if copies > 1 else {}
        axes["shard"] = config.shard_size
        shards = init_device_mesh(device.type, (*axes.values(),), mesh_dim_names=(*axes,))
    return NativeMesh(
        device=device, rank=launch.rank, size=launch.world_size, control=control, shards=shards
    )


def seed_dropout(seed: int, rank: int) -> None:
    """Seed each rank differently, because ranks read different samples."""
    torch.manual_seed(seed + rank)
