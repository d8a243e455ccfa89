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
from torch.nn.parallel import DistributedDataParallel

from hpctrain.engines.native import NativeConfig
from hpctrain.train.engines.models.blocks import blocks_of
from hpctrain.train.engines.models.buffers import broadcast_buffers
from hpctrain.train.engines.models.build import build_module, enable_recomputation
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

    Rank 0 alone initialises the weights and sends each rank its part. No rank needs the memory of
    a whole model on its GPU, and only one process that of a model on the host.
    """
    weights: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    if mesh.rank == 0:
        whole = build_module(config, device=torch.device("cpu"), initialize=initialize)
        weights = whole.state_dict() if initialize else {}
        buffers = dict(whole.named_buffers())
        del whole
    module = build_module(config, device=torch.device("meta"), initialize=False)
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
    _allocate_weights(module, torch.device("cpu") if config.cpu_offload else mesh.device)
    if initialize:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, weights, options=options)
    broadcast_buffers(module, buffers, rank=mesh.rank, group=mesh.control, device=mesh.device)
    return module


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
