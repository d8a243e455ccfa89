"""Split weights over the ranks of a tensor parallel group with DeepSpeed's own layers.

DeepSpeed finds the layers of some models itself (AutoTP), but gathers the logits of the whole
vocabulary, and does not support a pipeline. Here its layers are inserted by the names in a Llama,
with or without a pipeline: blocks as Shoeybi et al. 2019 (arXiv 1909.08053, section 3) split them,
the vocabulary by rows, and a loss over a part of the vocabulary. Belongs here: splitting, that
loss, and joining the parts in a checkpoint. Does not belong here: groups (see `mesh`).
"""

from __future__ import annotations

from collections.abc import Sequence
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
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"


def split_weights(module: Any, group: Any) -> None:
    """Keep this rank's part of a Llama's weights; norms stay whole.

    Heads, key/value heads and the width of the MLP must be multiples of the group's size, which
    `hpctrain.plan` checks. A weight that embedding and output layer share stays shared.
    """
    set_autotp_mode(training=True)  # otherwise the layers freeze their weights
    meta = AutoTPMeta.from_model_config(module.config)

    def sum_gradients_of_input(part: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A hook before a part of a block, whose first argument is its input."""
        if inputs:
            return (sum_input_gradients(group, inputs[0]), *inputs[1:]), named
        return inputs, {**named, _INPUT: sum_input_gradients(group, named[_INPUT])}

    for name, layer in list(module.named_modules()):
        last = name.rpartition(".")[2]
        if last in _BY_OUTPUTS:
            module.set_submodule(name, _SplitByOutputs(layer, group, name=name, tp_meta=meta))
        elif last in _BY_INPUTS:
            module.set_submodule(name, _SplitByInputs(layer, group, name=name, tp_meta=meta))
        elif last in _PARTS:
            layer.register_forward_pre_hook(sum_gradients_of_input, with_kwargs=True)
    embedding, head = module.get_submodule(_EMBEDDING), module.get_submodule(_HEAD)
    tied = embedding.weight is head.weight
    split_head = _SplitHead(head, group, name=_HEAD, tp_meta=meta)
    split_embedding = _SplitEmbedding(
        embedding,
        group,
        tied_vocab_parallel_linear=split_head if tied else None,
        name=_EMBEDDING,
        tp_meta=meta,
    )
    module.set_submodule(_HEAD, split_head)
    module.set_submodule(_EMBEDDING, split_embedding)
    module.ds_autotp_parsed = True  # runtime/engine.py, _apply_autotp_partitioning: nothing to do
    setattr(module, UNIVERSAL_CHECKPOINT_INFO, collect_autotp_universal_checkpoint_info(module))


class _SameDevice:
    """Keeps a part of a weight on the device of the whole. DeepSpeed's layers move it to the GPU,
    which may lack the memory for those of other stages. On meta, the part stays a slice of the
    whole, which shows its place."""

    def move(self, tensor: Any) -> Any:
        return tensor if tensor.is_meta else tensor.clone(memory_format=torch.contiguous_format)


class _SplitByInputs(_SameDevice, LinearAllreduce): ...


class _SplitHead(_SameDevice, VocabParallelLinear): ...


class _SplitEmbedding(_SameDevice, VocabParallelEmbedding): ...


class _SplitByOutputs(_SameDevice, LinearLayer):
    """A layer that does not sum its input's gradient over the group.

    Queries, keys and values have the same input, and so do both halves of the MLP. DeepSpeed's
    layer would sum its gradient once for each of them; `split_weights` does it once for all.
    """

    def forward(self, input: Any) -> Any:
        return nn.functional.linear(input, self.weight, self.bias)


def sum_input_gradients(group: Any, hidden: Any) -> Any:
    """Return the input of weights that are split by outputs; its gradients are summed over the
    group."""
    return ColumnParallel.apply(group, hidden)


class VocabParallelLoss:
    """`masked_sum` of logits [..., this rank's tokens]; every rank of the group gets all of it."""

    def __init__(self, group: Any, vocab: int) -> None:
        self._group = group
        self._vocab = vocab

    def __call__(self, logits: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
        rank, size = torch.distributed.get_rank(self._group), self._group.size()
        # module_inject/tp_shard.py, get_shard_size: the first ones have one more
        each, more = divmod(self._vocab, size)
        first = rank * each + min(rank, more)
        # the public function synchronizes with the GPU each time to check all labels
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


def token_losses_of(group: Any, vocab: int) -> Any:
    """Return the sum of token losses: over the whole vocabulary, or over the group's parts."""
    return masked_sum if group is None else VocabParallelLoss(group, vocab)


def join_parts(whole: Any, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the parts of a module's state that each rank of a group has, to the shapes in `whole`.

    A split tensor is joined along the dimension in which its parts are smaller.
    """
    state = {}
    for name, tensor in whole.items():
        if name not in parts[0]:
            continue
        pieces = [part[name] for part in parts]
        sizes = enumerate(zip(tensor.shape, pieces[0].shape, strict=False))
        split_dim = next((dim for dim, (size, part) in sizes if part != size), None)
        state[name] = pieces[0] if split_dim is None else torch.cat(pieces, split_dim)
    return state
