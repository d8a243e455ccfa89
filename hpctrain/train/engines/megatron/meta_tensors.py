"""Tensors with shapes and no memory, wherever a model is built or run below `OnMeta`.

Belongs here: sending everything that makes a tensor to the meta device, and letting operations
keep for their backward pass what their GPU versions keep. Does not belong here: what is built
there (see `verify`), counting what is kept (see `kept`).
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


class OnMeta(TorchFunctionMode):
    """Every new tensor is on the meta device, whatever device its maker asks for.

    `torch.device("meta")` as a context would not do: it leaves alone who names a device
    (megatron-core names the GPU), and the factories that `cpu.install` has wrapped. `torch.tensor`
    keeps its values on the CPU: recomputation passes the kind of mask in one and reads it again.
    """

    def __init__(self) -> None:
        super().__init__()
        makers = {getattr(maker, "__wrapped__", maker) for maker in _device_constructors()}
        self._makers = makers - {getattr(torch.tensor, "__wrapped__", torch.tensor)}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self._makers:
            return function(*args, **{**kwargs, "device": META})
        return _AS_ON_GPUS.get(function, function)(*args, **kwargs)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The kernel that CUDA takes: keeps one byte per element. Elsewhere it is made of others."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


class _Kept(torch.autograd.Function):
    """Something of `shape` that keeps these tensors for a backward pass which nobody runs."""

    @staticmethod
    def forward(context: Any, shape: tuple[int, ...], *kept: Any) -> Any:
        output = kept[0].new_empty(shape)
        context.save_for_backward(*kept)
        return output


def _rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """As CUDA's kernel keeps it: the input and one fp32 number per row."""
    scales = x.new_empty((*x.shape[: -len(normalized_shape)], 1), dtype=torch.float32)
    return _Kept.apply(tuple(x.shape), x, weight, scales)


_AS_ON_GPUS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.dropout: _dropout,
    torch.nn.functional.rms_norm: _rms_norm,
}


class _FlashKept(_Kept):
    """Flash attention (Dao et al. 2022, arXiv 2205.14135, algorithm 2) also keeps its output."""

    @staticmethod
    def forward(context: Any, shape: tuple[int, ...], *kept: Any) -> Any:
        output = kept[0].new_empty(shape)
        context.save_for_backward(*kept, output)
        return output


def _flash_forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """[s, b, a, d] each, key and value with fewer heads; [s, b, a d]. Keeps a sum per row."""
    length, batch, heads, size = query.shape
    sums = query.new_empty((batch, heads, length), dtype=torch.float32)
    return _FlashKept.apply((length, batch, heads * size), query, key, value, sums)


@contextmanager
def flash_attention(enabled: bool) -> Iterator[None]:
    """Core attention keeps what flash attention does, instead of s x s tensors."""
    original = DotProductAttention.forward
    if enabled:
        DotProductAttention.forward = _flash_forward
    try:
        yield
    finally:
        DotProductAttention.forward = original
