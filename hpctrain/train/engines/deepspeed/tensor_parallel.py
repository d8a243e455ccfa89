"""Weights split over the ranks of a tensor parallel group, by DeepSpeed's own layers.

DeepSpeed finds the layers of some models itself (AutoTP), but gathers the logits of all words, and
takes no pipeline. Here its layers are put in by the names that a Llama has, with or without a
pipeline: blocks as Shoeybi et al. 2019 (arXiv 1909.08053, section 3) split them, words by rows, and
a loss that knows its own part of the words. Belongs here: splitting, that loss, and joining what a
checkpoint has of each rank. Does not belong here: groups (see `mesh`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject.layers import (
    ColumnParallel,
    LinearAllreduce,
    LinearLayer,
    VocabParallelEmbedding,
    VocabParallelLinear,
    collect_autotp_universal_checkpoint_info,
    set_autotp_mode,
)
from deepspeed.module_inject.tp_shard import AutoTPMeta
from deepspeed.sequence.cross_entropy import _VocabParallelCrossEntropy
from torch import nn

from hpctrain.train.engines.models.tasks import masked_sum

# transformers/models/llama/modeling_llama.py: outputs are split, or inputs
_PARTS = ("self_attn", "mlp")
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
_INPUT = "hidden_states"
_IGNORED = -100  # as torch.nn.functional.cross_entropy
_HEAD, _WORDS = "lm_head", "model.embed_tokens"


def split(module: Any, group: Any) -> None:
    """Leave this rank's part of a Llama's weights; norms stay whole.

    Needs heads, key/value heads and the width of the MLP to be multiples of the group's size, which
    `hpctrain.plan` has seen to.
    """
    set_autotp_mode(training=True)  # else the layers take their weights for frozen
    meta = AutoTPMeta.from_model_config(module.config)
    for name, layer in list(module.named_modules()):
        last = name.rpartition(".")[2]
        if last in _BY_OUTPUTS:
            module.set_submodule(name, _ByOutputs(layer, group, name=name, tp_meta=meta))
        elif last in _BY_INPUTS:
            module.set_submodule(name, _ByInputs(layer, group, name=name, tp_meta=meta))
        elif last in _PARTS:
            layer.register_forward_pre_hook(_entering(group), with_kwargs=True)
    _split_words(module, group, meta)
    module.ds_autotp_parsed = True  # runtime/engine.py, _apply_autotp_partitioning: nothing to do
    setattr(module, UNIVERSAL_CHECKPOINT_INFO, collect_autotp_universal_checkpoint_info(module))


class _InPlace:
    """A part of a weight stays where the whole was. DeepSpeed's layers put it on the GPU, which
    need not have room for those of other stages."""

    def move(self, tensor: Any) -> Any:
        return tensor.clone(memory_format=torch.contiguous_format)


class _ByInputs(_InPlace, LinearAllreduce): ...


class _OutputWords(_InPlace, VocabParallelLinear): ...


class _InputWords(_InPlace, VocabParallelEmbedding): ...


class _ByOutputs(_InPlace, LinearLayer):
    """Without an input of its own: queries, keys and values read one, and so do both halves of the
    MLP. DeepSpeed's layer would sum the input's gradient over the group for each of them."""

    def forward(self, input: Any) -> Any:
        return nn.functional.linear(input, self.weight, self.bias)


def _entering(group: Any) -> Callable[..., Any]:
    """A hook in front of a part of a block, whose first argument is what it reads."""

    def hook(part: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (entering(group, given[0]), *given[1:]), named
        return given, {**named, _INPUT: entering(group, named[_INPUT])}

    return hook


def _split_words(module: Any, group: Any, meta: AutoTPMeta) -> None:
    """A weight that embedding and output layer share stays one."""
    words, head = module.get_submodule(_WORDS), module.get_submodule(_HEAD)
    tied = words.weight is head.weight
    output = _OutputWords(head, group, name=_HEAD, tp_meta=meta)
    embedding = _InputWords(
        words,
        group,
        tied_vocab_parallel_linear=output if tied else None,
        name=_WORDS,
        tp_meta=meta,
    )
    module.set_submodule(_HEAD, output)
    module.set_submodule(_WORDS, embedding)


def entering(group: Any, hidden: Any) -> Any:
    """In front of a weight that is split by outputs: gradients are summed over the group."""
    return ColumnParallel.apply(group, hidden)


class PartOfWords:
    """`masked_sum` of logits [..., this rank's words]; every rank of the group gets all of it."""

    def __init__(self, group: Any, vocab: int) -> None:
        self._group = group
        self._vocab = vocab

    def __call__(self, logits: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
        rank, size = torch.distributed.get_rank(self._group), self._group.size()
        # module_inject/tp_shard.py, get_shard_size: the first ones have one more
        each, more = divmod(self._vocab, size)
        first = rank * each + min(rank, more)
        # the function around it asks the GPU each time whether all labels are words
        losses = _VocabParallelCrossEntropy.apply(
            logits.flatten(0, -2),
            labels.flatten(),
            self._group,
            first,
            first + logits.shape[-1],
            _IGNORED,
        )
        weights = mask.flatten().to(torch.float32)
        return (losses * weights).sum(), weights.sum()


def words_of(group: Any, vocab: int) -> Any:
    """The sum of losses over words: of all of them, or of those on this rank and the others."""
    return masked_sum if group is None else PartOfWords(group, vocab)


def joined(whole: Any, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What each rank of a group had of a module's state, as one of the shapes in `whole`."""
    return {
        name: _join(tensor.shape, [part[name] for part in parts])
        for name, tensor in whole.items()
        if name in parts[0]
    }


def _join(shape: Any, parts: list[Any]) -> Any:
    """Along the dimension in which a part is smaller than the whole."""
    for dim, size in enumerate(shape):
        if parts[0].shape[dim] != size:
            return torch.cat(parts, dim)
    return parts[0]
