"""Entry point of the engines fsdp and ddp: the wrapped module, and everything built on it.

Belongs here: distributing weights, mixed precision, recomputation, offload, the order of building.
Does not belong here: what the module is (see `hpctrain.train.engines.models`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from hpctrain.engines.native import NativeConfig
from hpctrain.spec.engines.native import POWERSGD_RANK
from hpctrain.train.data import open_data, sample_order
from hpctrain.train.device import on_cpu
from hpctrain.train.engine import Parts
from hpctrain.train.engines.models.allocation import broadcast_buffers, set_buffers
from hpctrain.train.engines.models.build import (
    blocks_of,
    build_module,
    build_on_meta,
    enable_recomputation,
    starts_whole,
)
from hpctrain.train.engines.models.tasks import loss_of
from hpctrain.train.engines.native.engine import (
    NativeEngine,
    NativeMesh,
    build_optimizer,
    open_mesh,
)
from hpctrain.train.engines.native.snapshot import NativeSnapshot
from hpctrain.train.initial_weights import initial_weight
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock

# -- Wrap the module for this rank: `fully_shard` or DistributedDataParallel ---------------------


_MIB = 2**20


def wrapped_module(config: NativeConfig, mesh: NativeMesh, *, initialize: bool) -> Any:
    """Build the module that trains on this rank; all ranks must call this.

    `initialize` False: weights stay unset, because a checkpoint will be loaded.
    """
    if config.engine == "fsdp":
        return _sharded_module(config, mesh, initialize=initialize)
    module = build_module(config, device=mesh.device, initialize=initialize)
    enable_recomputation(config, module)
    if config.ddp.sync_batchnorm and mesh.size > 1:
        module = synchronize_batch_norms(module, mesh.device)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        bucket_cap_mb=max(1, round(float(config.ddp.bucket) / _MIB)),
        gradient_as_bucket_view=True,
    )
    register_hook(config, wrapped)
    return wrapped


def _sharded_module(config: NativeConfig, mesh: NativeMesh, *, initialize: bool) -> Any:
    """Shard the module with FSDP; weights are bf16 while computing, else fp32.

    Each rank draws its parts of the weights, and has the memory of these only. Pretrained weights
    are read by rank 0 alone, which sends each rank its part.
    """
    receives = initialize and starts_whole(config)
    module = build_on_meta(config, record=initialize and not receives)
    weights = (
        {name: initial_weight(parameter) for name, parameter in module.named_parameters()}
        if initialize and not receives
        else {}
    )
    enable_recomputation(config, module)
    precision, offload = MixedPrecisionPolicy(), OffloadPolicy()
    if config.precision != "fp32":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    policy: dict[str, Any] = dict(
        mesh=mesh.shards,
        reshard_after_forward=config.reshard_after_forward,
        mp_policy=precision,
        offload_policy=offload,
    )
    for block in blocks_of(module, config.model.counted):
        fully_shard(block, **policy)
    fully_shard(module, **policy)
    buffers = dict(module.named_buffers())
    _allocate_weights(module, torch.device("cpu") if config.cpu_offload else mesh.device)
    set_buffers(module, buffers, mesh.device)
    if receives:
        _receive_weights(config, mesh, module)
    for name, weight in weights.items():
        parameter = module.get_parameter(name)
        part = parameter.to_local()
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        weight.draw(part, offsets=offsets, device=mesh.device)
    return module


def _receive_weights(config: NativeConfig, mesh: NativeMesh, module: Any) -> None:
    """Set weights and buffers to those of a whole model, which rank 0 alone builds on the host."""
    weights: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    if mesh.rank == 0:
        whole = build_module(config, device=torch.device("cpu"))
        weights, buffers = whole.state_dict(), dict(whole.named_buffers())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, weights, options=options)
    broadcast_buffers(module, buffers, rank=mesh.rank, group=mesh.control, device=mesh.device)


def _allocate_weights(module: Any, device: torch.device) -> None:
    """Allocate the tensors of a meta module; weights that two layers share stay shared, which
    `to_empty` alone does not do."""
    names: dict[Any, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))


# -- Compute batch statistics over all ranks: PyTorch's SyncBatchNorm, and the same on a CPU ----
# Otherwise a ResNet on four GPUs would be another model than on one: each GPU would normalize by
# its own quarter of the batch.


def synchronize_batch_norms(module: Any, device: torch.device) -> Any:
    """Return `module` with every batch norm replaced; names and values of weights do not change."""
    if device.type == "cuda":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for name, child in module.named_children():
        if isinstance(child, torch.nn.BatchNorm2d):
            child.__class__ = SummedBatchNorm  # the same parameters, buffers and settings
        else:
            setattr(module, name, synchronize_batch_norms(child, device))
    return module


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Any) -> Any:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole)
        return whole


class SummedBatchNorm(torch.nn.BatchNorm2d):
    """A batch norm over all ranks on any device; SyncBatchNorm takes tensors on a GPU only
    (torch/nn/modules/batchnorm.py).

    Mean and variance in turn: a variance from sums of squares would cancel in fp32.
    """

    def forward(self, input: Any) -> Any:
        if not self.training:
            return super().forward(input)
        count = input.numel() // input.size(1) * dist.get_world_size()
        mean = _SumOverRanks.apply(input.sum((0, 2, 3))) / count
        centered = input - mean[:, None, None]
        variance = _SumOverRanks.apply(centered.square().sum((0, 2, 3))) / count
        # running statistics, which evaluation uses; PyTorch keeps the unbiased variance
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        unbiased = variance.detach() * count / max(count - 1, 1)
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centered * scale[:, None, None] + self.bias[:, None, None]


# -- Reduce the bytes that DistributedDataParallel sends to sum gradients over a slow link ------
# `bf16`, `fp16` and `powersgd` are PyTorch's own hooks
# (torch/distributed/algorithms/ddp_comm_hooks; PowerSGD: Vogels et al. 2019, arXiv 1905.13727).
# `hierarchical` is ours: exact within a node, in bf16 between nodes, where each rank of a node
# sends its part of the bucket.


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


# -- Entry point of the engines fsdp and ddp: process groups, then everything built on them ------


def join(config: NativeConfig, launch: Launch) -> NativeMesh:
    """Join the launch's process groups; all ranks must call this."""
    return open_mesh(config, launch)


def build(job: Job, mesh: NativeMesh, control: Control) -> Parts:
    """Build module, optimizer and data of this rank; all ranks must call this."""
    config = job.config
    assert isinstance(config, NativeConfig)
    # with LoRA a checkpoint holds trainable weights only: the others are loaded or drawn again
    initialize = job.resume_directory is None or config.lora is not None
    module = wrapped_module(config, mesh, initialize=initialize)
    clock = StepClock()
    data = open_data(config, mesh.share, job.data_cache, job.copies, clock=clock)
    engine = NativeEngine(
        config=config,
        mesh=mesh,
        module=module,
        optimizer=build_optimizer(config, module),
        data=data,
        loss=loss_of(config),
        clock=clock,
    )
    module.train()
    return Parts(engine, NativeSnapshot(engine, sample_order(config, data)))
