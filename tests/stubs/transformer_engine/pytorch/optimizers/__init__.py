"""Optimizers over lists of tensors, and the functions over lists that megatron-core calls.

FusedAdam counts steps in its parameter groups, and its states are made by the first step: both
unlike torch's AdamW, and what megatron-core's checkpoints depend on. Main weights of its own may be
the 16 bits that a bf16 weight has not; moments in 16 bits are without scales here.
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
    """AdamW, or Adam with `adam_w_mode` False."""

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
        if amsgrad or capturable:
            raise NotImplementedError("amsgrad, capturable")
        self.types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self.types["master_param"] = (
                torch.int16 if store_param_remainders else (master_weight_dtype)
            )
        self.gradient_name = "decoupled_grad" if use_decoupled_grad else "grad"
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
                gradient = getattr(parameter, self.gradient_name, None)
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                kept = self.state[parameter]
                state = {name: kept[name].float() for name in ("exp_avg", "exp_avg_sq")}
                gradient, value = gradient.float(), self._main(parameter)
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
                value = value - group["lr"] * update
                if "master_param" in kept and kept["master_param"].dtype == torch.int16:
                    bits = value.view(torch.int32)
                    upper = (bits + 2**15) >> 16
                    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
                    kept["master_param"].copy_(bits - (upper << 16))
                else:
                    parameter.copy_(value)
                    if "master_param" in kept:
                        kept["master_param"].copy_(value)
                for name, moment in state.items():
                    kept[name].copy_(moment)

    def _main(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the weight in fp32, of its main copy where it has one."""
        main = self.state[parameter].get("master_param")
        if main is None or main.dtype != torch.int16:
            return (parameter if main is None else main).float()
        upper = parameter.detach().contiguous().view(torch.int16).to(torch.int32)
        return ((upper << 16) + main.to(torch.int32)).view(torch.float32)

    def initialize_state(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        for name, kind in self.types.items():
            if kind == torch.uint8:
                raise NotImplementedError("states of 8 bits, which have scales")
            state[name] = torch.zeros_like(parameter, dtype=kind)
        if "master_param" in state and state["master_param"].dtype != torch.int16:
            state["master_param"].copy_(parameter)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state in fp32, a remainder as it is."""
        state: torch.Tensor = self.state[parameter][name]
        return state if state.dtype == torch.int16 else state.float()

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[parameter][name] = value.to(self.types[name]).clone()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in their own types, not in those of parameters."""
        super().load_state_dict(state_dict)
        parameters = [one for group in self.param_groups for one in group["params"]]
        numbers = [one for group in state_dict["param_groups"] for one in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.set_scaled_state(parameter, name, value)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum."""
