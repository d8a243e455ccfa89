"""Communication within tensor parallelism, states of random generators, and recomputation.

Belongs here: that. Does not belong here: layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Set the attributes by which Megatron recognises a part of a weight."""
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride


def gather_along_first_dim(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the parts of all ranks; the gradient is summed and cut again."""
    return _Gather.apply(tensor, group)


def scatter_sum_along_first_dim(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over ranks and return this rank's part; the gradient is gathered."""
    return _ScatterSum.apply(tensor, group)


def sum_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over ranks; the gradient passes unchanged."""
    return _Sum.apply(tensor, group)


def sum_gradient_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensor; its gradient is summed over ranks."""
    return _SumGradient.apply(tensor, group)


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    shape = (tensor.shape[0] * group.size(), *tensor.shape[1:])
    whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole


def _scattered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    shape = (tensor.shape[0] // group.size(), *tensor.shape[1:])
    part = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    dist.reduce_scatter_tensor(part, tensor.contiguous(), group=group)
    return part


def _summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scattered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.group), None


class CudaRNGStatesTracker:
    """Named states of the GPU's random generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state; raises RuntimeError for a known name or seed, as there."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        outer = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(outer)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named state within this context."""
        outer = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(outer)


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """Return the states that graphs register; the stub captures no graphs."""
    return {}


class activation_recompute_forward(AbstractContextManager[None]):
    """Marks a forward pass that is recomputed or will be."""

    _active = False

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self._recompute = activation_recompute

    def __enter__(self) -> None:
        activation_recompute_forward._active = self._recompute

    def __exit__(self, *error: object) -> None:
        activation_recompute_forward._active = False


def is_fp8_activation_recompute_enabled() -> bool:
    return activation_recompute_forward._active


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **keywords: Any,
) -> Any:
    """Recompute `function` in the backward pass, with the random states of its first run."""
    tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
    states = tracker.get_states() if tracker is not None else {}
    ran = False

    def run(*inputs: Any) -> Any:
        nonlocal ran
        if tracker is None or not ran:
            ran = True
            return function(*inputs, **keywords)
        outer = tracker.get_states()
        tracker.set_states(states)
        try:
            return function(*inputs, **keywords)
        finally:
            tracker.set_states(outer)

    return torch_checkpoint(run, *args, use_reentrant=True)
