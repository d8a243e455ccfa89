"""Replace all new tensors by meta tensors, which have shapes and no memory.

Belongs here: redirecting everything that makes a tensor to the meta device, and operations that
keep for their backward pass what their GPU versions keep. Does not belong here: what is built that
way (see `verify`), counting what is kept (see `kept_activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

META = torch.device("meta")


class MetaDeviceMode(TorchFunctionMode):
    """Puts every new tensor on the meta device, whatever device the caller names.

    `torch.device("meta")` as a context is not enough: it leaves calls that name a device
    (megatron-core names the GPU), and the factories that `megatron_on_cpu.install` has wrapped.
    `torch.tensor` keeps its values on the CPU: recomputation stores the kind of mask in one and
    reads it again.
    """

    def __init__(self) -> None:
        super().__init__()
        factories = {getattr(one, "__wrapped__", one) for one in _device_constructors()}
        self._factories = factories - {getattr(torch.tensor, "__wrapped__", torch.tensor)}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self._factories:
            return function(*args, **{**kwargs, "device": META})
        return _AS_ON_GPUS.get(function, function)(*args, **kwargs)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply the kernel that CUDA uses, which keeps one byte per element."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


class _KeepsInputs(torch.autograd.Function):
    """An output of `shape` that keeps these tensors for a backward pass, which never runs."""

    @staticmethod
    def forward(context: Any, shape: tuple[int, ...], *kept: Any) -> Any:
        output = kept[0].new_empty(shape)
        context.save_for_backward(*kept)
        return output


def _rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Keep what CUDA's kernel keeps: the input and one fp32 number per row."""
    scales = x.new_empty((*x.shape[: -len(normalized_shape)], 1), dtype=torch.float32)
    return _KeepsInputs.apply(tuple(x.shape), x, weight, scales)


_AS_ON_GPUS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.dropout: _dropout,
    torch.nn.functional.rms_norm: _rms_norm,
}


class _KeepsInputsAndOutput(_KeepsInputs):
    """Flash attention (Dao et al. 2022, arXiv 2205.14135, algorithm 2) also keeps its output."""

    @staticmethod
    def forward(context: Any, shape: tuple[int, ...], *kept: Any) -> Any:
        output = kept[0].new_empty(shape)
        context.save_for_backward(*kept, output)
        return output


def _flash_forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """Return [s, b, a d] from [s, b, a, d] each, key and value with fewer heads.

    Keeps one sum per row besides inputs and output.
    """
    length, batch, heads, size = query.shape
    sums = query.new_empty((batch, heads, length), dtype=torch.float32)
    return _KeepsInputsAndOutput.apply((length, batch, heads * size), query, key, value, sums)


@contextmanager
def flash_attention(enabled: bool) -> Iterator[None]:
    """Let core attention keep what flash attention keeps, instead of s x s tensors."""
    original = DotProductAttention.forward
    if enabled:
        DotProductAttention.forward = _flash_forward
    try:
        yield
    finally:
        DotProductAttention.forward = original
