"""Contexts in which matrix products round their operands to 8 bits, and the state of their scales.

Delayed scaling is reproduced with its stored state, so that a resume that loses the state trains
other numbers. The other recipes round with one scale per tensor: neither blocks nor 4 bits. All
operands are rounded to E4M3, gradients are not rounded. Weights stay in high precision.

Belongs here: autocast, recipes in force, rounding. Does not belong here: layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from transformer_engine.common.recipe import DelayedScaling, Recipe

E4M3_MAX = 448.0


@dataclass(frozen=True)
class AutocastCall:
    """Arguments of one `fp8_autocast`."""

    enabled: bool
    recipe: Recipe | None
    group: Any


class FP8GlobalStateManager:
    """What applies in the innermost context; `calls` has every autocast that was opened."""

    calls: ClassVar[list[AutocastCall]] = []
    parameter_recipes: ClassVar[list[Recipe | None]] = []
    _stack: ClassVar[list[AutocastCall]] = []
    _used: ClassVar[dict[int, Any]] = {}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls._stack) and cls._stack[-1].enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        recipe = cls._stack[-1].recipe if cls._stack else None
        return recipe if recipe is not None else DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls._stack[-1].group if cls._stack else None

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return not cls._used

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Accept the flag of graphs, which the stub does not capture."""

    @classmethod
    def note_use(cls, module: Any) -> None:
        """Note a module whose scales change when the outermost context ends."""
        cls._used[id(module)] = module

    @classmethod
    def enter(cls, call: AutocastCall) -> None:
        cls.calls.append(call)
        cls._stack.append(call)

    @classmethod
    def exit(cls) -> None:
        call = cls._stack.pop()
        if call.enabled and not cls._stack and torch.is_grad_enabled():
            used, cls._used = list(cls._used.values()), {}
            _update_scales(used, call.group)


def _update_scales(modules: list[Any], group: Any) -> None:
    """Take the largest magnitudes of all ranks into the histories, and choose the next scales."""
    if not modules:
        return
    newest = torch.cat([module.fp8_meta["scaling_fwd"].amax_history[0] for module in modules])
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    for module in modules:
        state, recipe = module.fp8_meta["scaling_fwd"], module.fp8_meta["recipe"]
        count = state.scale.numel()
        state.amax_history[0], newest = newest[:count], newest[count:]
        history = state.amax_history
        most = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
        state.scale.copy_(torch.where(most > 0, E4M3_MAX / most / 2**recipe.margin, state.scale))


@dataclass
class ScalingState:
    """Scales of tensors, and their largest magnitudes: shape (length of history, tensors)."""

    scale: torch.Tensor
    amax_history: torch.Tensor


def rounded(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 at a scale; the gradient passes unchanged."""
    values = (tensor.detach().float() * scale).clamp(-E4M3_MAX, E4M3_MAX)
    values = values.to(torch.float8_e4m3fn).float() / scale
    return tensor + (values.to(tensor.dtype) - tensor.detach())


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Round the operands of products within this context."""
    if calibrating or _graph:
        raise NotImplementedError("the stub neither calibrates nor captures graphs")
    FP8GlobalStateManager.enter(AutocastCall(enabled, fp8_recipe, fp8_group))
    try:
        yield
    finally:
        FP8GlobalStateManager.exit()


def autocast(
    enabled: bool = True, recipe: Recipe | None = None, amax_reduction_group: Any = None
) -> Any:
    """The newer name of `fp8_autocast`."""
    return fp8_autocast(enabled, fp8_recipe=recipe, fp8_group=amax_reduction_group)


@contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Record the recipe of 8 bit weights; the stub's weights stay in high precision."""
    if enabled:
        FP8GlobalStateManager.parameter_recipes.append(recipe)
    yield


quantized_model_init = fp8_model_init


class Fp8Padding(torch.nn.Module):
    """Pads the tokens of each expert to a multiple of 16."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size or 16

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        padded = [-(-rows // self.align_size) * self.align_size for rows in m_splits]
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, wanted - part.shape[0]))
            for part, wanted in zip(inp.split(m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(torch.nn.Module):
    """Removes what `Fp8Padding` has added."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size or 16

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        padded = [-(-rows // self.align_size) * self.align_size for rows in m_splits]
        parts = inp.split(padded)
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])
