"""Build the module of this rank: whole, sharded from the start (ZeRO stage 3), or one stage.

Belongs here: weights and where they are placed. Does not belong here: the model itself (see
`hpctrain.train.engines.models`).
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.train.engines.deepspeed.library import silence
from hpctrain.train.engines.deepspeed.mesh import DeepSpeedMesh
from hpctrain.train.engines.deepspeed.pipeline import mean_loss_of
from hpctrain.train.engines.deepspeed.pipeline_stages import StagedModel
from hpctrain.train.engines.deepspeed.tensor_parallel import split_weights, token_losses_of
from hpctrain.train.engines.models.buffers import broadcast_buffers
from hpctrain.train.engines.models.build import build_module, enable_recomputation


def placed_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the module that `deepspeed.initialize` takes; all ranks must call this.

    `initialize` False: weights stay unset, because a checkpoint will be loaded.
    """
    if mesh.tensors is not None:
        module = _split_module(config, mesh, initialize=initialize).to(mesh.device)
    elif config.zero_stage < 3:
        module = build_module(config, device=mesh.device, initialize=initialize)
    else:
        module = _sharded_module(config, mesh, initialize=initialize)
    enable_recomputation(config, module)
    return module


def staged_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the layers of this rank's stage; the others are dropped while still on the host."""
    module = _split_module(config, mesh, initialize=initialize)
    enable_recomputation(config, module)
    losses = token_losses_of(mesh.tensors, config.vocab_size)
    with silence():
        return StagedModel(config, module, mean_loss_of(losses))


def _split_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the whole model on the host; of split weights only this rank's part is kept."""
    module = build_module(config, device=torch.device("cpu"), initialize=initialize)
    if mesh.tensors is not None:
        split_weights(module, mesh.tensors)
    return module


def _sharded_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Shard the weights one by one while rank 0 sends them.

    Rank 0 alone initialises them. No rank ever has the whole model on its GPU, and only one
    process has it on the host.
    """
    initializes = initialize and mesh.rank == 0
    home = torch.device("cpu" if mesh.rank == 0 else "meta")
    module = build_module(config, device=home, initialize=initializes)
    buffers = dict(module.named_buffers())
    broadcast_buffers(module, buffers, rank=mesh.rank, group=mesh.control, device=mesh.device)
    if not initializes:
        # The host allocates the memory of a weight when it is written: not before rank 0's weight
        # arrives, and then it is sharded. Weights that two layers share stay shared.
        fresh: dict[Any, Any] = {}
        for owner in module.modules():
            for name, old in owner._parameters.items():
                if old is not None and old not in fresh:
                    memory = torch.empty_like(old, device="cpu")
                    fresh[old] = torch.nn.Parameter(memory, requires_grad=old.requires_grad)
                owner._parameters[name] = fresh.get(old)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return deepspeed.zero.Init(
        module=module, config_dict_or_path=ds_config(config), dtype=dtype
    ).module
