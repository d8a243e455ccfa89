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
from hpctrain.train.engines.models.allocation import (
    allocate,
    replace_meta_parameters,
    set_buffers,
)
from hpctrain.train.engines.models.buffers import broadcast_buffers
from hpctrain.train.engines.models.build import (
    build_module,
    build_on_meta,
    enable_recomputation,
    starts_whole,
)
from hpctrain.train.engines.models.initialisers import initial_weight, unwritten_memory


def placed_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the module that `deepspeed.initialize` takes; all ranks must call this.

    `initialize` False: weights stay unset, because a checkpoint will be loaded.
    """
    if mesh.tensors is not None:
        module, draws = _split_module(config, mesh, initialize=initialize)
        allocate(module, mesh.device, draw=draws)
        module = module.to(mesh.device)
    elif config.zero_stage < 3:
        module = build_module(config, device=mesh.device, initialize=initialize)
    elif initialize and starts_whole(config):
        module = _received_module(config, mesh)
    else:
        module = _sharded_module(config, mesh, draw=initialize)
    enable_recomputation(config, module)
    return module


def staged_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the layers of this rank's stage; the others never have memory, or are dropped while
    still on the host."""
    module, draws = _split_module(config, mesh, initialize=initialize)
    enable_recomputation(config, module)
    losses = token_losses_of(mesh.tensors, config.vocab_size)
    with silence():
        return StagedModel(config, module, mean_loss_of(losses), device=mesh.device, draw=draws)


def _split_module(
    config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool
) -> tuple[Any, bool]:
    """Return the model with this rank's part of split weights, and whether to draw them.

    It is on the meta device, but with initial weights that exist for whole models only on the host.
    """
    draws = initialize and not starts_whole(config)
    if initialize and not draws:
        module = build_module(config, device=torch.device("cpu"))
    else:
        module = build_on_meta(config, record=draws)
    if mesh.tensors is not None:
        split_weights(module, mesh.tensors)
    return module, draws


class _DrawnParts(deepspeed.zero.Init):
    """Divides weights among the ranks, each of which draws its own part."""

    def __init__(
        self, module: Any, config: DeepSpeedConfig, dtype: torch.dtype, *, draw: bool
    ) -> None:
        self._draw = draw
        super().__init__(module=module, config_dict_or_path=ds_config(config), dtype=dtype)

    def _zero_init_param(self, param: Any) -> None:
        """Replace the method that sends rank 0's weight (runtime/zero/partition_parameters.py)."""
        self._convert_to_deepspeed_param(param)
        # memory for a whole weight, of which this rank writes its own part only
        with unwritten_memory():
            param.data = torch.empty(param.ds_shape, dtype=param.dtype, device=param.device)
        size = self._aligned_size(param) // self._partition_world_size(param)
        first = size * self._partition_rank(param)
        part = param.data.view(-1)[first : first + size]
        if self._draw:
            initial_weight(param).draw_range(part, first)
        param.partition()


def _sharded_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, draw: bool) -> Any:
    """Shard the weights one by one; each rank draws its part, and has the memory of these only."""
    module = build_on_meta(config, record=draw)
    dtype = _dtype(config)

    def memory_of(old: Any) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device=mesh.device).expand(old.shape)

    replace_meta_parameters(module, memory_of)
    set_buffers(module, dict(module.named_buffers()), mesh.device)
    return _DrawnParts(module, config, dtype, draw=draw).module


def _received_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh) -> Any:
    """Shard the weights one by one while rank 0 sends them.

    Rank 0 alone reads them. No rank ever has the whole model on its GPU, and only one process has
    it on the host.
    """
    if mesh.rank == 0:
        module = build_module(config, device=torch.device("cpu"))
    else:
        module = build_on_meta(config, record=False)
        # The host allocates the memory of a weight when it is written: not before rank 0's weight
        # arrives, and then it is sharded.
        replace_meta_parameters(module, lambda old: torch.empty_like(old, device="cpu"))
    buffers = dict(module.named_buffers())
    broadcast_buffers(module, buffers, rank=mesh.rank, group=mesh.control, device=mesh.device)
    dtype = _dtype(config)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return deepspeed.zero.Init(
        module=module, config_dict_or_path=ds_config(config), dtype=dtype
    ).module


def _dtype(config: DeepSpeedConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision == "bf16" else torch.float32
