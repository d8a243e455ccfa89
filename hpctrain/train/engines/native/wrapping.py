"""From a module of all ranks to this rank's part of it: `fully_shard` or DistributedDataParallel.

Belongs here: distributing weights, mixed precision, recomputation, offload. Does not belong here:
what the module is (see `hpctrain.train.engines.models`), how gradients are summed (see `hooks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.engines.native.batch_norm import synchronized
from hpctrain.train.engines.native.communication_hooks import register_hook
from hpctrain.train.engines.native.mesh import Mesh

_MIB = 2**20


def wrapped_module(config: NativeConfig, mesh: Mesh, *, initialize: bool) -> Any:
    """The module that trains on this rank; all ranks must call this.

    `initialize` False: weights stay unset, for a checkpoint will be loaded.
    """
    if config.engine == "ddp":
        return _replicated(config, mesh, initialize=initialize)
    return _sharded(config, mesh, initialize=initialize)


def _replicated(config: NativeConfig, mesh: Mesh, *, initialize: bool) -> Any:
    module = build_module(config, device=mesh.device, initialize=initialize)
    _recompute(config, module)
    if config.ddp.sync_batchnorm and mesh.size > 1:
        module = synchronized(module, mesh.device)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        bucket_cap_mb=max(1, round(float(config.ddp.bucket) / _MIB)),
        gradient_as_bucket_view=True,
    )
    register_hook(config, wrapped)
    return wrapped


def _sharded(config: NativeConfig, mesh: Mesh, *, initialize: bool) -> Any:
    """Rank 0 alone makes the weights and hands each rank its part: no rank needs the memory of a
    whole model on its GPU, and only one process that of a model on the host."""
    whole, buffers = _made_by_rank_0(config, mesh, initialize=initialize)
    module = build_module(config, device=torch.device("meta"), initialize=False)
    _recompute(config, module)
    policy: dict[str, Any] = dict(
        mesh=mesh.shards,
        reshard_after_forward=config.reshard_after_forward,
        mp_policy=_precision(config),
        offload_policy=_offload(config, mesh),
    )
    for block in blocks_of(module):
        fully_shard(block, **policy)
    fully_shard(module, **policy)
    _give_memory(module, torch.device("cpu") if config.cpu_offload else mesh.device)
    if initialize:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, whole, options=options)
    _share_buffers(module, buffers, mesh)
    return module


def _made_by_rank_0(
    config: NativeConfig, mesh: Mesh, *, initialize: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, if they are wanted, and buffers of the whole module; nothing on other ranks."""
    if mesh.rank != 0:
        return {}, {}
    module = build_module(config, device=torch.device("cpu"), initialize=initialize)
    return module.state_dict() if initialize else {}, dict(module.named_buffers())


def _give_memory(module: Any, device: torch.device) -> None:
    """From shapes to tensors. `to_empty` makes two of a weight that two layers share."""
    names: dict[Any, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))


def _share_buffers(module: Any, buffers: dict[str, Any], mesh: Mesh) -> None:
    """Buffers, such as the angles of rotary positions, are in no state dict and not sharded."""
    for name, buffer in module.named_buffers():
        value = buffers[name].cpu() if mesh.rank == 0 else torch.empty_like(buffer, device="cpu")
        dist.broadcast(value, src=0, group=mesh.control)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, value.to(mesh.device))


def _precision(config: NativeConfig) -> MixedPrecisionPolicy:
    """bf16 while computing; weights, gradients and their sums in fp32."""
    if config.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offload(config: NativeConfig, mesh: Mesh) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")


def _recompute(config: NativeConfig, module: Any) -> None:
    """transformers/modeling_utils.py: blocks keep their inputs only; names of weights stay."""
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
