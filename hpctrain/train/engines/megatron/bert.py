"""Build BERT on megatron-core and run one microbatch of masked language modeling.

The same tokens are masked as for the other engines' BERT. There is no next-sentence head (Liu et
al. 2019, arXiv 1907.11692, section 4.2: no loss without it). Norms come before attention and MLP,
as megatron-core has them. Belongs here: what differs from a GPT. Does not belong here: layers'
settings and wrappers (see `model`), choosing tokens (see `hpctrain.train.engines.models.masking`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.transformer_config import TransformerConfig

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.plan.model.parameters import BERT_SEGMENTS
from hpctrain.train.data import Microbatch
from hpctrain.train.engines.models.masking import Masking, masking_of

LossOf = Callable[[Any], Callable[[Any], tuple[Any, Any, Any]]]


def build_bert(
    config: MegatronConfig,
    settings: TransformerConfig,
    stage: int | None,
    *,
    fused: bool,
    first: bool,
    last: bool,
) -> BertModel:
    """Build one chunk; `stage` is its virtual stage, `first` embeds, `last` has the heads.

    `fused`: with TransformerEngine's layers.
    """
    layers = get_bert_layer_with_transformer_engine_spec() if fused else bert_layer_local_spec
    return BertModel(
        settings,
        num_tokentypes=BERT_SEGMENTS,
        transformer_layer_spec=layers,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type=config.position_embedding_type,
        add_binary_head=False,
        vp_stage=stage,
    )


def run_bert(chunk: Any, tokens: Any, labels: Any, shape: tuple[int, int], device: Any) -> Any:
    """Run one chunk; returns the losses [batch, sequence] of the last one, else its output.

    `tokens` and `labels` are None where they are not needed. Every token attends to every token,
    by a mask of ones of `shape` (batch, sequence) that the middle stages need too. All tokens are
    of the first segment.
    """
    attended = torch.ones(shape, device=device)
    zeros = torch.zeros(shape, dtype=torch.long, device=device)
    if tokens is None:
        tokens = zeros  # every chunk of the first stage reads their length
    output = chunk(tokens, attended, zeros, lm_labels=labels)
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class MaskedTokensStep:
    """The forward step of megatron-core's schedules; `loss_of` makes a loss of 0/1 weights."""

    config: MegatronConfig
    device: Any
    loss_of: LossOf

    @cached_property
    def masking(self) -> Masking:
        return masking_of(self.config)

    def __call__(self, iterator: Iterator[Microbatch | None], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        shape = (self.config.micro_batch_size, self.config.seq_length)
        if batch is None:
            return run_bert(model, None, None, shape, self.device), self.loss_of(None)
        visible, masked = self.masking.apply(batch.tokens, batch.samples)
        losses = run_bert(model, visible, batch.tokens, shape, self.device)
        return losses, self.loss_of(masked.to(torch.float32))
