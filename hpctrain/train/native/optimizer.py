"""AdamW as torch has it, with the weight decay and the clipping of the other engines.

Belongs here: parameter groups, the learning rate, the norm of all gradients. Does not belong here:
the schedule (see `hpctrain.train.schedule`), when a step is made (see `engine`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpctrain.engines.native import NativeConfig


def build_optimizer(config: NativeConfig, module: Any) -> torch.optim.AdamW:
    """Weight decay leaves out biases and norms, as megatron-core does by default
    (megatron/core/optimizer/__init__.py: names that end in `.bias`, and one dimension)."""
    decayed: list[Any] = []
    plain: list[Any] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            small = parameter.dim() <= 1 or name.endswith(".bias")
            (plain if small else decayed).append(parameter)
    groups: list[dict[str, Any]] = [dict(params=decayed), dict(params=plain, weight_decay=0.0)]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, factor: Any) -> None:
    """Multiply all gradients by a number on their device, without waiting for it."""
    gradients = [_local(gradient) for gradient in gradients_of(optimizer)]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, limit: float) -> Any:
    """The norm of all gradients over all ranks, before they are made no longer than `limit`.

    `limit` 0: left as they are.
    """
    gradients = gradients_of(optimizer)
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if limit > 0:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
