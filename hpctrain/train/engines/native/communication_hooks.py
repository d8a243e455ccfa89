"""Reduce the bytes that DistributedDataParallel sends to sum gradients over a slow link.

`bf16`, `fp16` and `powersgd` are PyTorch's own hooks (torch/distributed/algorithms/ddp_comm_hooks;
PowerSGD: Vogels et al. 2019, arXiv 1905.13727). `hierarchical` is ours: exact within a node, in
bf16 between nodes, where each rank of a node sends its part of the bucket. Belongs here: hooks
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
from hpctrain.spec.engines.ddp import POWERSGD_RANK
from hpctrain.train.device import on_cpu

# Low-rank sums begin when the gradients have settled (powerSGD_hook.py recommends a warm-up).
_EXACT_STEPS = 10


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of this rank's node (`inside`), and its counterparts on other nodes (`across`).

    `stream`: the CUDA stream of the hook; None on a CPU.
    """

    inside: Any
    across: Any
    world_size: int
    stream: Any


def register_hook(config: NativeConfig, wrapped: Any) -> None:
    """Register the hook of the spec; all ranks must call this."""
    name = config.ddp.hook
    if name == "bf16":
        # DDP accepts it for NCCL only, by its name; gloo sums bf16 as well
        plain = default_hooks.bf16_compress_hook
        hook = (lambda state, bucket: plain(state, bucket)) if on_cpu() else plain
        wrapped.register_comm_hook(None, hook)
    elif name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=_EXACT_STEPS)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "hierarchical":
        # DDP checks annotations, which must be types, not strings, or missing
        groups = open_node_groups(config)
        wrapped.register_comm_hook(groups, lambda state, bucket: sum_hierarchically(state, bucket))


def open_node_groups(config: NativeConfig) -> NodeGroups:
    """Make the groups of both levels; ranks of one node are adjacent (srun --distribution=block).

    All ranks must call this.
    """
    size, node = config.world_size, min(config.node_size, config.world_size)
    rank = dist.get_rank()
    rows = [list(range(first, first + node)) for first in range(0, size, node)]
    columns = [list(range(place, size, node)) for place in range(node)]
    inside = [dist.new_group(ranks) for ranks in rows][rank // node]
    across = [dist.new_group(ranks) for ranks in columns][rank % node]
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    return NodeGroups(inside, across, size, stream)


def sum_hierarchically(groups: NodeGroups, bucket: Any) -> Any:
    """Compute the mean of the bucket over all ranks; a communication hook, returns a future.

    Sums are scattered within the node in full precision, summed between nodes in bf16, and gathered
    within the node again. Between nodes each element is sent once per node, in half its bytes.
    """
    flat = bucket.buffer()
    done: Any = torch.futures.Future(devices=[flat.device] if groups.stream else None)
    with _on_stream(groups.stream):
        flat.div_(groups.world_size)
        node = dist.get_world_size(groups.inside)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % node))
        part = padded.new_empty(len(padded) // node)
        dist.reduce_scatter_tensor(part, padded, group=groups.inside)
        if dist.get_world_size(groups.across) > 1:
            half = part.to(torch.bfloat16)
            dist.all_reduce(half, group=groups.across)
            part.copy_(half)
        dist.all_gather_into_tensor(padded, part, group=groups.inside)
        flat.copy_(padded[: len(flat)])
        done.set_result(flat)
    return done


@contextlib.contextmanager
def _on_stream(stream: Any) -> Any:
    """Run the block on this stream, beside the backward pass; on a CPU: synchronously."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
