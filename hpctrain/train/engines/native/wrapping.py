"""Wrap the module for this rank: `fully_shard` or DistributedDataParallel.

Belongs here: distributing weights, mixed precision, recomputation, offload. Does not belong here:
what the module is (see `hpctrain.train.engines.models`), how gradients are summed (see
`communication_hooks`).
"""

from __future__ import annotations

from typing import Any

import torch
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
from hpctrain.train.engines.models.allocation import set_buffers
from hpctrain.train.engines.models.blocks import blocks_of
from hpctrain.train.engines.models.buffers import broadcast_buffers
from hpctrain.train.engines.models.build import (
    build_module,
    build_on_meta,
    enable_recomputation,
    starts_whole,
)
from hpctrain.train.engines.models.initialisers import initial_weight
from hpctrain.train.engines.native.batch_norm import synchronize_batch_norms
from hpctrain.train.engines.native.communication_hooks import register_hook
from hpctrain.train.engines.native.mesh import NativeMesh

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
    for block in blocks_of(module):
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
