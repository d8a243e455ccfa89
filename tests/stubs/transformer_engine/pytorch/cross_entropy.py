"""Cross entropy over a vocabulary that is cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.distributed import _gathered


class _GatherVocabulary(torch.autograd.Function):
    """All ranks compute the same loss: each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.width = group, logits.shape[-1]
        parts = _gathered(logits.movedim(-1, 0), group)
        return parts.movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        first = ctx.group.rank() * ctx.width
        return gradient[..., first : first + ctx.width].contiguous(), None


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Return the losses of [sequence, batch] tokens, in fp32."""
    if dist_process_group is not None and dist_process_group.size() > 1:
        inp = _GatherVocabulary.apply(inp, dist_process_group)
    losses = torch.nn.functional.cross_entropy(
        inp.float().flatten(0, 1),
        target.flatten(),
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
    )
    return losses if reduce_loss else losses.view(target.shape)
