"""How DistributedDataParallel sums gradients over a slow link: fewer bytes than fp32 has.

`bf16`, `fp16` and `powersgd` are PyTorch's own hooks (torch/distributed/algorithms/ddp_comm_hooks;
PowerSGD: Vogels et al. 2019, arXiv 1905.13727). `hierarchical` is ours: exact within a node, in
bf16 between nodes, where each rank of a node carries its part of the bucket. Belongs here: hooks
and their groups. Does not belong here: when gradients are summed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from hpctrain.engines.native import NativeConfig
from hpctrain.train.device import on_cpu

# Sums of low rank begin when the gradients have settled (powerSGD_hook.py recommends a warm-up).
_EXACT_STEPS = 10


@dataclass(frozen=True)
class Levels:
    """The ranks of this rank's node, and those with the same place on the other nodes."""

    inside: Any
    across: Any
    world_size: int
    stream: Any


def register_hook(config: NativeConfig, wrapped: Any) -> None:
    """Put the hook of the spec in force; all ranks must call this."""
    name = config.ddp.hook
    if name == "bf16":
        # DDP takes it for NCCL only, by its name; gloo sums bf16 as well
        plain = default_hooks.bf16_compress_hook
        hook = (lambda state, bucket: plain(state, bucket)) if on_cpu() else plain
        wrapped.register_comm_hook(None, hook)
    elif name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, config.ddp.powersgd_rank, start_powerSGD_iter=_EXACT_STEPS
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "hierarchical":
        # DDP wants real types as annotations, or none
        levels = open_levels(config)
        wrapped.register_comm_hook(levels, lambda state, bucket: sum_by_levels(state, bucket))


def open_levels(config: NativeConfig) -> Levels:
    """The groups of both levels; ranks of one node are neighbours (srun --distribution=block)."""
    size, node = config.world_size, min(config.node_size, config.world_size)
    rank = dist.get_rank()
    rows = [list(range(first, first + node)) for first in range(0, size, node)]
    columns = [list(range(place, size, node)) for place in range(node)]
    inside = [dist.new_group(ranks) for ranks in rows][rank // node]
    across = [dist.new_group(ranks) for ranks in columns][rank % node]
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    return Levels(inside, across, size, stream)


def sum_by_levels(levels: Levels, bucket: Any) -> Any:
    """A communication hook: the mean of the bucket over all ranks.

    Scattered sums within the node in full, sums of the parts between nodes in bf16, gathered
    within the node again: between nodes each byte of a bucket goes once per node, and half of it.
    """
    flat = bucket.buffer()
    done: Any = torch.futures.Future(devices=[flat.device] if levels.stream else None)
    with _beside(levels.stream):
        flat.div_(levels.world_size)
        node = dist.get_world_size(levels.inside)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % node))
        part = padded.new_empty(len(padded) // node)
        dist.reduce_scatter_tensor(part, padded, group=levels.inside)
        if dist.get_world_size(levels.across) > 1:
            half = part.to(torch.bfloat16)
            dist.all_reduce(half, group=levels.across)
            part.copy_(half)
        dist.all_gather_into_tensor(padded, part, group=levels.inside)
        flat.copy_(padded[: len(flat)])
        done.set_result(flat)
    return done


@contextlib.contextmanager
def _beside(stream: Any) -> Any:
    """On a stream of its own, so that the backward pass goes on; on a CPU: at once."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
