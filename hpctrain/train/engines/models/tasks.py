"""Compute the loss of a batch for each task: the sum of its losses, and their number.

Belongs here: the forward pass of each task. Does not belong here: sums over ranks and microbatches
(see `global_batch`), which tokens are masked (see `masking`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hpctrain.engines.module import ModuleConfig
from hpctrain.train.engines.models.masking import masking_of

Loss = Callable[[Any, Any], tuple[Any, ...]]
# logits, labels, mask -> (sum of losses, number of them), as `masked_sum`
TokenLosses = Callable[[Any, Any, Any], tuple[Any, Any]]


def loss_of(config: ModuleConfig, token_losses: TokenLosses | None = None) -> Loss:
    """Return a function of module and batch that returns (sum of losses, number of them).

    These are two fp32 scalars; for a classifier in evaluation mode, the number of correct
    predictions is a third one. `token_losses` replaces `masked_sum` where a rank has a part of
    each token's logits only.

    The batch has `tokens`, `labels`, `loss_mask` and `positions` [batch, sequence] for language
    modeling. For classification it has `labels` [batch] and either `pixels` [batch, colors, side,
    side] or `tokens` and `attention_mask` [batch, sequence].
    """
    if config.task == "classification":
        reads_images = config.model.reads_images

        def classification(module: Any, batch: Any) -> tuple[Any, ...]:
            if reads_images:
                logits = module(pixel_values=batch.pixels).logits
            else:
                logits = module(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits
            loss = masked_sum(logits, batch.labels, torch.ones_like(batch.labels))
            if module.training:
                return loss
            return (*loss, (logits.argmax(-1) == batch.labels).sum())

        return classification
    if config.task == "masked_language_modeling":
        masking = masking_of(config)

        def masked_modeling(module: Any, batch: Any) -> tuple[Any, Any]:
            visible, predicted = masking.apply(batch.tokens, batch.samples)
            return masked_sum(module(input_ids=visible).logits, batch.tokens, predicted)

        return masked_modeling
    sum_losses = token_losses or masked_sum
    packed = config.data_format == "packed"

    def causal_modeling(module: Any, batch: Any) -> tuple[Any, Any]:
        # Labels are the next tokens: GPTDataset has shifted them already. With several texts in
        # one sequence, positions restart with each text. Without a mask, transformers finds the
        # borders by the positions and attends within each text only (masking_utils.py,
        # find_packed_sequence_indices).
        positions = dict(position_ids=batch.positions) if packed else {}
        logits = module(input_ids=batch.tokens, use_cache=False, **positions).logits
        return sum_losses(logits, batch.labels, batch.loss_mask)

    return causal_modeling


def masked_sum(logits: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
    """Sum the cross entropy where `mask` is 1; returns (sum, number of labels) in fp32.

    logits [..., classes], the others without the last axis. In fp32, because sums of
    log-probabilities over a large vocabulary lose too much precision in bf16.
    """
    losses = functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), reduction="none"
    )
    weights = mask.flatten().to(torch.float32)
    return (losses * weights).sum(), weights.sum()
