"""Optimizers over lists of tensors, and the functions over lists that megatron-core calls.

FusedAdam counts steps in its parameter groups, and its states are made by the first step: both
unlike torch's AdamW, and what megatron-core's checkpoints depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CHUNK = 2048 * 32


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], *args: Any
) -> Any:
    return op(_CHUNK, noop_flag, lists, *args)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: list[list[torch.Tensor]],
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, of shape [1], and the norm of each."""
    norms = torch.stack(torch._foreach_norm([tensor.float() for tensor in lists[0]]))
    return norms.norm().view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Write the scaled first list into the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


class FusedAdam(torch.optim.Optimizer):
    """AdamW on fp32 parameters, or Adam with `adam_w_mode` False."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        dtypes = {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype}
        if amsgrad or capturable or master_weights or use_decoupled_grad:
            raise NotImplementedError("amsgrad, capturable, master weights, decoupled gradients")
        if dtypes != {torch.float32} or store_param_remainders:
            raise NotImplementedError("states of fewer than 32 bits")
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            corrected = group["bias_correction"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                gradient, value = parameter.grad.float(), parameter.float()
                if not self.adam_w_mode:
                    gradient = gradient + group["weight_decay"] * value
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                scale = 1 - first ** group["step"] if corrected else 1.0
                root = (1 - second ** group["step"]) ** 0.5 if corrected else 1.0
                update = state["exp_avg"] / scale
                update = update / (state["exp_avg_sq"].sqrt() / root + group["eps"])
                if self.adam_w_mode:
                    update = update + group["weight_decay"] * value
                parameter.copy_(value - group["lr"] * update)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum."""
