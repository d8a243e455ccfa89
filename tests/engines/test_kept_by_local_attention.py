"""What megatron-core's own attention keeps for its backward pass, against what a plan says.

Measured on an H200: a GPT of 1.3 billion weights held 73 GiB where 48 were planned, because the
fp32 result of the softmax was not counted.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func

from hpctrain.plan.cost.from_spec import SOFTMAX_BYTES

SAMPLES, HEADS, TOKENS, SIZE = 2, 4, 64, 16


def kept_bytes_per_pair(dtype: torch.dtype, dropout: float) -> float:
    """Count the storages of s x s that a forward pass keeps, each once, per pair and head."""
    softmax = FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=dtype == torch.bfloat16,
        attn_mask_type=AttnMaskType.causal,
        scaled_masked_softmax_fusion=False,
        mask_func=attention_mask_func,
        softmax_in_fp32=True,
        scale=None,
    )
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == SAMPLES * HEADS * TOKENS**2:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    shape = (SAMPLES * HEADS, TOKENS, SIZE)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = torch.bmm(query, key.transpose(1, 2)).view(SAMPLES, HEADS, TOKENS, TOKENS)
        chances = softmax(scores, None).view(-1, TOKENS, TOKENS)
        if dropout:
            chances, _ = torch.native_dropout(chances, dropout, True)  # the kernel of GPUs
        out = torch.bmm(chances, value)
    assert out.requires_grad
    return sum(kept.values()) / (SAMPLES * HEADS * TOKENS**2)


@pytest.mark.parametrize(
    ("dtype", "dropout", "planned"),
    [
        (torch.bfloat16, 0.0, SOFTMAX_BYTES + 2),
        (torch.bfloat16, 0.1, SOFTMAX_BYTES + 1 + 2),
        (torch.float32, 0.0, 4),
        (torch.float32, 0.1, 4 + 1 + 4),
    ],
)
def test_a_plan_counts_what_the_unfused_softmax_keeps(
    dtype: torch.dtype, dropout: float, planned: float
) -> None:
    """That plans count so many: tests/unit/plan/test_plan_memory.py."""
    assert kept_bytes_per_pair(dtype, dropout) == planned
