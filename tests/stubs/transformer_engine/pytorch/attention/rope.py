"""Rotary positions applied to queries and keys."""

from __future__ import annotations

from typing import Any

import torch


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate the first channels of [sequence, batch, heads, channels] by `freqs`."""
    if tensor_format != "sbhd" or start_positions is not None or cp_size > 1:
        raise NotImplementedError("packed sequences")
    if freqs.dtype != torch.float32:
        raise AssertionError("Only torch.float32 freqs is supported for fused RoPE")
    width = freqs.shape[-1]
    turned, kept = t[..., :width], t[..., width:]
    angles = freqs[: t.shape[0]]
    if interleaved:
        pairs = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1)
        half = pairs.reshape(turned.shape)
    else:
        first, second = torch.chunk(turned, 2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    turned = turned * angles.cos().to(t.dtype) + half * angles.sin().to(t.dtype)
    return torch.cat((turned, kept), dim=-1)
