"""The module on this rank: whole, in parts from the start (ZeRO stage 3), or one stage of it.

Belongs here: weights and where they are put. Does not belong here: the model itself (see
`hpctrain.train.engines.models`).
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.train.engines.deepspeed.library import silence
from hpctrain.train.engines.deepspeed.mesh import Mesh
from hpctrain.train.engines.deepspeed.pipeline import mean_of
from hpctrain.train.engines.deepspeed.pipeline_stages import Stages
from hpctrain.train.engines.deepspeed.tensor_parallel import split, words_of
from hpctrain.train.engines.models.build import build_module


def placed_module(config: DeepSpeedConfig, mesh: Mesh, *, initialize: bool) -> Any:
    """The module that `deepspeed.initialize` takes; all ranks must call this.

    `initialize` False: weights stay unset, for a checkpoint will be loaded.
    """
    if mesh.tensors is not None:
        module = _split(config, mesh, initialize=initialize).to(mesh.device)
    elif config.zero_stage < 3:
        module = build_module(config, device=mesh.device, initialize=initialize)
    else:
        module = _partitioned(config, mesh, initialize=initialize)
    _recompute(config, module)
    return module


def staged_module(config: DeepSpeedConfig, mesh: Mesh, *, initialize: bool) -> Any:
    """The layers of this rank's stage; the others are dropped before anything is on a GPU."""
    module = _split(config, mesh, initialize=initialize)
    _recompute(config, module)
    with silence():
        return Stages(config, module, mean_of(words_of(mesh.tensors, config.vocab_size)))


def _split(config: DeepSpeedConfig, mesh: Mesh, *, initialize: bool) -> Any:
    """Built on the host, whole; of weights that are split only this rank's part stays."""
    module = build_module(config, device=torch.device("cpu"), initialize=initialize)
    if mesh.tensors is not None:
        split(module, mesh.tensors)
    return module


def _recompute(config: DeepSpeedConfig, module: Any) -> None:
    """transformers/modeling_utils.py: blocks keep their inputs only; names of weights stay."""
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})


def _partitioned(config: DeepSpeedConfig, mesh: Mesh, *, initialize: bool) -> Any:
    """Rank 0 alone makes the weights, and each is divided before the next one is sent: no rank
    ever has the whole model on its GPU, and only one process on the host."""
    makes = initialize and mesh.rank == 0
    home = torch.device("cpu" if mesh.rank == 0 else "meta")
    module = build_module(config, device=home, initialize=makes)
    _share_buffers(module, mesh)
    if not makes:
        _unset(module)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return deepspeed.zero.Init(
        module=module, config_dict_or_path=ds_config(config), dtype=dtype
    ).module


def _unset(module: Any) -> None:
    """Memory for each weight, which the host gives when it is written to: not before rank 0's
    weight arrives, and then it is divided. Weights that two layers share stay shared."""
    fresh: dict[Any, Any] = {}
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is not None and old not in fresh:
                memory = torch.empty_like(old, device="cpu")
                fresh[old] = torch.nn.Parameter(memory, requires_grad=old.requires_grad)
            owner._parameters[name] = fresh.get(old)


def _share_buffers(module: Any, mesh: Mesh) -> None:
    """Buffers, such as the angles of rotary positions, are not divided."""
    for name, buffer in module.named_buffers():
        value = buffer if mesh.rank == 0 else torch.empty_like(buffer, device="cpu")
        dist.broadcast(value, src=0, group=mesh.control)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, value.to(mesh.device))
