"""What the modules share: parameters with their initialisers, 8 bit state, the matrix product.

Belongs here: that. Does not belong here: communication of one kind of layer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.distributed import set_tensor_model_parallel_attributes
from transformer_engine.pytorch.fp8 import (
    E4M3_MAX,
    FP8GlobalStateManager,
    ScalingState,
    rounded,
)

_PER_PRODUCT = 3  # input, weight, output
_user_buffers: dict[str, Any] | None = None


class UserBufferQuantizationMode(Enum):
    """Format of the numbers in a buffer."""

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(shape: list[int], tp_size: int, **keywords: Any) -> None:
    """Record the buffers of overlapped messages; layers that overlap need this call first."""
    global _user_buffers
    _user_buffers = dict(shape=shape, tp_size=tp_size, **keywords)


def destroy_ub() -> None:
    global _user_buffers
    _user_buffers = None


def user_buffers() -> dict[str, Any] | None:
    """Return the arguments of `initialize_ub`; None before it. For tests: not a name of 2.9."""
    return _user_buffers


def check_overlap(overlaps: bool, ub_name: str | None) -> None:
    """Assert what a layer asserts that overlaps its messages (module/linear.py)."""
    if overlaps:
        assert _user_buffers is not None, "Must initialize userbuffer communicators first"
        assert ub_name is not None, "Userbuffer name [string] is not set."


def get_workspace() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device=torch.cuda.current_device()).expand(shape)


class TransformerEngineBaseModule(torch.nn.Module):
    """A module with products whose operands may be rounded to 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        self.fp8_initialized = False
        self.save_original_input = False

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def join(self, tp_group: Any, tp_size: int) -> None:
        """Set group and size as all modules do: a given group has the last word."""
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: Any,
        init: Callable[[torch.Tensor], Any],
        tracker: Callable[[], Any] | None = None,
    ) -> torch.nn.Parameter:
        """Register a parameter and initialise it within the tracker's named state."""
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        named = getattr(self, "rng_tracker_name", None)
        drawing: Any = nullcontext()
        if tracker is not None:
            drawing = tracker().fork(named) if named else tracker().fork()
        if parameter.device.type != "meta":
            with drawing, torch.no_grad():
                init(parameter)
        return parameter

    def mark_parallel(self, weights: list[str], biases: list[str]) -> None:
        """Set the attributes that 2.9 sets in `reset_parameters`."""
        dim = 1 if self.parallel_mode == "row" else 0
        for name in weights:
            set_tensor_model_parallel_attributes(getattr(self, name), True, dim, 1)
        for name in biases:
            if self.parallel_mode == "row":
                getattr(self, name).sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make the state of delayed scaling where autocast or a checkpoint asks for it."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if not self.fp8:
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta["recipe"] = recipe
        self.fp8_meta["fp8_checkpoint"] = True
        self.fp8_meta["num_gemms"] = num_gemms
        if isinstance(recipe, DelayedScaling) and "scaling_fwd" not in self.fp8_meta:
            self._init_scales(recipe, num_gemms)

    def _init_scales(self, recipe: DelayedScaling, num_gemms: int) -> None:
        device = next(self.parameters()).device
        for direction, per_product in (("fwd", _PER_PRODUCT), ("bwd", 2)):
            tensors = per_product * num_gemms
            self.fp8_meta[f"scaling_{direction}"] = ScalingState(
                torch.ones(tensors, device=device),
                torch.zeros(recipe.amax_history_len, tensors, device=device),
            )

    def product(
        self, inp: torch.Tensor, weight: torch.Tensor, index: int = 0, of: int = 1
    ) -> torch.Tensor:
        """Multiply with a transposed weight; product `index` of `of` of this module."""
        if self.fp8:
            rows = inp.numel() // inp.shape[-1]
            assert rows % 8 == 0 and inp.shape[-1] % 16 == 0 and weight.shape[0] % 8 == 0, (
                "FP8 execution requires the product of all dimensions except the last to be "
                f"divisible by 8 and the last dimension to be divisible by 16, but got {inp.shape}"
            )
            inp = self._rounded(inp, index)
            weight_for = self._rounded(weight, of + index)
        else:
            weight_for = weight
        fused = getattr(self, "fuse_wgrad_accumulation", False)
        return _Product.apply(inp, weight_for, weight if fused else None)

    def _rounded(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        largest = tensor.detach().abs().amax().float() if tensor.numel() else torch.zeros(())
        if isinstance(self.fp8_meta["recipe"], DelayedScaling):
            state = self.fp8_meta["scaling_fwd"]
            state.amax_history[0, index] = torch.maximum(state.amax_history[0, index], largest)
            FP8GlobalStateManager.note_use(self)
            return rounded(tensor, state.scale[index])
        return rounded(tensor, torch.where(largest > 0, E4M3_MAX / largest, 1.0))

    def get_extra_state(self) -> torch.Tensor:
        """Return the state of delayed scaling as bytes; empty without such a state."""
        checkpointed = self.fp8_meta["fp8_checkpoint"] or self.fp8 or self.fp8_calibration
        if not checkpointed:
            return torch.empty(0, dtype=torch.uint8)
        variables = {k: v for k, v in self.fp8_meta.items() if isinstance(v, bool | int | str)}
        state = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": variables}
        for direction in ("fwd", "bwd"):
            scaling = self.fp8_meta.get(f"scaling_{direction}")
            if scaling is not None:
                state[f"scale_{direction}"] = scaling.scale.cpu().clone()
                state[f"amax_history_{direction}"] = scaling.amax_history.cpu().clone()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Restore what `get_extra_state` returned."""
        if state is None or state.numel() == 0:
            return
        stored = pickle.loads(state.detach().cpu().numpy().tobytes())
        self.fp8_meta.update(stored["extra_fp8_variables"])
        self.fp8_meta["recipe"] = stored["recipe"]
        device = next(self.parameters()).device
        for direction in ("fwd", "bwd"):
            if f"scale_{direction}" in stored:
                self.fp8_meta[f"scaling_{direction}"] = ScalingState(
                    stored[f"scale_{direction}"].to(device).clone(),
                    stored[f"amax_history_{direction}"].to(device).clone(),
                )

    def backward_dw(self) -> None:
        raise NotImplementedError("the stub computes gradients of weights in the backward pass")


class _Product(torch.autograd.Function):
    """inp @ weight.T. With `accumulated`, the gradient of that weight goes to its main_grad."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, weight: torch.Tensor, accumulated: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.accumulated = accumulated
        return inp.matmul(weight.t())

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inp, weight = ctx.saved_tensors
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), inp.reshape(-1, inp.shape[-1])
        input_gradient = gradient.matmul(weight)
        own = rows.t().matmul(columns)
        if ctx.accumulated is None:
            return input_gradient, own, None
        parameter = ctx.accumulated
        parameter.main_grad.add_(own)
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
        # the hooks of data parallelism run for a gradient that is not None
        return input_gradient, None, torch.zeros_like(parameter)
