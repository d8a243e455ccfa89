"""What a model learns from a batch: the sum of its losses, and how many there were.

Belongs here: the forward pass of each task. Does not belong here: means over ranks and
microbatches, which engines take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hpctrain.engines.module import ModuleConfig

Loss = Callable[[Any, Any], tuple[Any, Any]]


def loss_of(config: ModuleConfig) -> Loss:
    """A function of module and batch: (sum of losses, number of them), two fp32 scalars."""
    return _next_tokens


def _next_tokens(module: Any, batch: Any) -> tuple[Any, Any]:
    """Labels are the tokens that follow; GPTDataset has shifted them already."""
    logits = module(input_ids=batch.tokens, use_cache=False).logits
    return masked_sum(logits, batch.labels, batch.loss_mask)


def masked_sum(logits: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
    """Cross entropy where `mask` is 1; logits [..., classes], the others without the last axis.

    In fp32: sums of log-probabilities over a large vocabulary lose too much in bf16.
    """
    losses = functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), reduction="none"
    )
    weights = mask.flatten().to(torch.float32)
    return (losses * weights).sum(), weights.sum()
