"""What a model learns from a batch: the sum of its losses, and how many there were.

Belongs here: the forward pass of each task. Does not belong here: means over ranks and
microbatches, which engines take; which words are masked (see `masking`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hpctrain.engines.module import ModuleConfig
from hpctrain.train.engines.models.masking import Masking, masking_of

Loss = Callable[[Any, Any], tuple[Any, ...]]
# logits, labels, mask -> (sum of losses, number of them), as `masked_sum`
WordLosses = Callable[[Any, Any, Any], tuple[Any, Any]]


def loss_of(config: ModuleConfig, words: WordLosses | None = None) -> Loss:
    """A function of module and batch: (sum of losses, number of them), two fp32 scalars; for
    classes, while the module evaluates, also how many were right.

    `words` takes the place of `masked_sum` where a rank has a part of each word's logits only.

    The batch has `tokens`, `labels`, `loss_mask` and `positions` [batch, sequence] for words,
    `labels` [batch] and either `pixels` [batch, colors, side, side] or `tokens` and
    `attention_mask` [batch, sequence] for classes.
    """
    if config.task == "classification":
        return _classes_of_images if config.model.reads_images else _classes_of_texts
    if config.task == "masked_language_modeling":
        return _masked_words(masking_of(config))
    return _next_words(words or masked_sum, packed=config.data_format == "packed")


def _next_words(words: WordLosses, *, packed: bool) -> Loss:
    """Labels are the tokens that follow; GPTDataset has shifted them already.

    `packed`: several texts in one sequence. Positions begin again with each, and none sees another:
    transformers finds the borders by the positions when there is no mask
    (masking_utils.py, find_packed_sequence_indices).
    """

    def loss(module: Any, batch: Any) -> tuple[Any, Any]:
        places = dict(position_ids=batch.positions) if packed else {}
        logits = module(input_ids=batch.tokens, use_cache=False, **places).logits
        return words(logits, batch.labels, batch.loss_mask)

    return loss


def _masked_words(masking: Masking) -> Loss:
    def loss(module: Any, batch: Any) -> tuple[Any, Any]:
        shown, hidden = masking.apply(batch.tokens, batch.samples)
        return masked_sum(module(input_ids=shown).logits, batch.tokens, hidden)

    return loss


def _classes_of_texts(module: Any, batch: Any) -> tuple[Any, ...]:
    logits = module(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits
    return _judged_classes(module, logits, batch.labels)


def _classes_of_images(module: Any, batch: Any) -> tuple[Any, ...]:
    return _judged_classes(module, module(pixel_values=batch.pixels).logits, batch.labels)


def _judged_classes(module: Any, logits: Any, labels: Any) -> tuple[Any, ...]:
    """logits [batch, classes], labels [batch]; nobody asks how many were right while training."""
    both = masked_sum(logits, labels, torch.ones_like(labels))
    return both if module.training else (*both, (logits.argmax(-1) == labels).sum())


def masked_sum(logits: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
    """Cross entropy where `mask` is 1; logits [..., classes], the others without the last axis.

    In fp32: sums of log-probabilities over a large vocabulary lose too much in bf16.
    """
    losses = functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), reduction="none"
    )
    weights = mask.flatten().to(torch.float32)
    return (losses * weights).sum(), weights.sum()
