"""Build torch's AdamW, with the weight decay and the clipping of the other engines.

Belongs here: parameter groups, the learning rate, the norm of all gradients. Does not belong here:
the schedule (see `hpctrain.train.schedule`), when a step is made (see `engine`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpctrain.engines.native import NativeConfig
from hpctrain.train.engines.models.weight_decay import split_by_weight_decay


def build_optimizer(config: NativeConfig, module: Any) -> torch.optim.AdamW:
    """Build AdamW for the trainable parameters; no weight decay on biases and norms."""
    decayed, plain = split_by_weight_decay(module)
    groups: list[dict[str, Any]] = [dict(params=decayed), dict(params=plain, weight_decay=0.0)]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        # one pass over memory without copies: other variants need four more bytes per weight
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def scale_and_clip(optimizer: torch.optim.Optimizer, factor: Any, limit: float) -> Any:
    """Multiply all gradients by `factor`, and clip their norm to `limit` (0: no clipping).

    In one pass over memory and without waiting for the device. Returns the norm of all gradients
    over all ranks, multiplied and not yet clipped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    factor = factor.to(norm.device)
    norm = norm * factor
    if limit > 0:
        # as torch/nn/utils/clip_grad.py, _clip_grads_with_norm_
        factor = factor * torch.clamp(limit / (norm + 1e-6), max=1.0)
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    if parts:
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm
