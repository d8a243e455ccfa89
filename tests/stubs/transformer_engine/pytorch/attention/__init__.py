"""Attention over queries, keys and values of [sequence, batch, heads, channels].

With context parallelism each rank has chunks r and 2n-1-r of the sequence; keys and values are
gathered, which gives the numbers of TransformerEngine's ring. Belongs here: the layer. Does not
belong here: rotary positions.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.distributed import gather_along_first_dim
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

__all__ = ["DotProductAttention", "rope"]


def _without_state_of_attention(module: Any, incompatible: Any) -> None:
    """Accept checkpoints without the state of attention, which megatron-core does not save.

    As TransformerEngine's own layer (attention/dot_product_attention, remove_extra_states_check).
    """
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if "core_attention._extra_state" not in key]


def _allow_missing_state(module: Any, incompatible_keys: Any) -> None:
    """Accept checkpoints without this layer's state, as 2.9 (dot_product_attention.py)."""
    for key in list(incompatible_keys.missing_keys):
        if "core_attention._extra_state" in key:
            incompatible_keys.missing_keys.remove(key)


class DotProductAttention(TransformerEngineBaseModule):
    """Softmax of scaled products, with the masks that megatron-core names."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_without_state_of_attention)
        if softmax_type not in ("vanilla", "learnable"):
            raise NotImplementedError(f"softmax_type {softmax_type}")
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))
        self.window = window_size[0] if window_size is not None else -1
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or channels**-0.5
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = attention_dropout
        self.get_rng_state_tracker = get_rng_state_tracker
        self.sequence_parallel = sequence_parallel
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.register_load_state_dict_post_hook(_allow_missing_state)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Return [sequence, batch, heads x channels of values]."""
        if unsupported or core_attention_bias is not None:
            raise NotImplementedError(f"packed sequences and biases: {sorted(unsupported)}")
        kind = attn_mask_type or self.attn_mask_type
        positions = torch.arange(query_layer.shape[0], device=query_layer.device)
        key_positions = positions
        if self.cp_group is not None and self.cp_group.size() > 1:
            positions = self._positions(query_layer.shape[0], query_layer.device)
            key_positions = gather_along_first_dim(positions, self.cp_group)
            key_layer = gather_along_first_dim(key_layer, self.cp_group)
            value_layer = gather_along_first_dim(value_layer, self.cp_group)
        groups = query_layer.shape[2] // key_layer.shape[2]
        key = key_layer.repeat_interleave(groups, 2).permute(1, 2, 3, 0)
        value = value_layer.repeat_interleave(groups, 2).permute(1, 2, 0, 3)
        scores = query_layer.permute(1, 2, 0, 3).matmul(key).float() * self.softmax_scale
        if "causal" in kind:
            scores = scores.masked_fill(key_positions > positions[:, None], float("-inf"))
        if self.window >= 0:
            past = key_positions < positions[:, None] - self.window
            scores = scores.masked_fill(past, float("-inf"))
        if "padding" in kind or kind == "arbitrary":
            assert attention_mask is not None, f"Please provide attention_mask for {kind}!"
            scores = scores.masked_fill(attention_mask, -10000.0)
        offset = getattr(self, "softmax_offset", None)
        if offset is not None:  # a logit more, whose weight goes nowhere
            sink = offset.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        forked: Any = nullcontext()
        if self.get_rng_state_tracker is not None and not self.sequence_parallel:
            forked = self.get_rng_state_tracker().fork()
        with forked:
            weights = torch.nn.functional.dropout(weights, self.attention_dropout, self.training)
        out = weights.to(value.dtype).matmul(value).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)

    def _positions(self, length: int, device: Any) -> torch.Tensor:
        """Return the positions of this rank's two chunks in the whole sequence."""
        size, rank, half = self.cp_group.size(), self.cp_group.rank(), length // 2
        chunk = torch.arange(half, device=device)
        return torch.cat([rank * half + chunk, (2 * size - 1 - rank) * half + chunk])
