"""BERT on megatron-core: the model of one rank, and what it learns from a microbatch.

It guesses masked words, as the other engines' BERT does and with the same words hidden; the next
sentence is left out (Liu et al. 2019, arXiv 1907.11692, section 4.2: no loss without it). Norms
come before attention and MLP, as megatron-core has them. Belongs here: what differs from a GPT.
Does not belong here: layers' settings and wrappers (see `model`), choosing words (see
`hpctrain.train.engines.models.masking`).
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
    """One chunk; `stage` is its virtual stage, `first` embeds, `last` has the heads.

    `fused`: layers of TransformerEngine.
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
    """The losses [batch, sequence] where the chunk is the last, else what it hands on.

    `tokens` and `labels` are None where they are not needed. Every word sees every word, by a mask
    of ones of `shape` (batch, sequence) that stages in the middle need too; all words are of the
    first segment.
    """
    whole = torch.ones(shape, device=device)
    nothing = torch.zeros(shape, dtype=torch.long, device=device)
    if tokens is None:
        tokens = nothing  # any chunk of the first stage asks them for their length
    output = chunk(tokens, whole, nothing, lm_labels=labels)
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class MaskedWords:
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
        shown, hidden = self.masking.apply(batch.tokens, batch.samples)
        losses = run_bert(model, shown, batch.tokens, shape, self.device)
        return losses, self.loss_of(hidden.to(torch.float32))
