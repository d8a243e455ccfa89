"""Which weights of megatron-core's GPTModel are which of GPT2LMHeadModel and LlamaForCausalLM.

A rule is one tensor of megatron-core and the ones it is made of. megatron-core keeps queries, keys
and values in one matrix, group by group (transformer/attention.py, SelfAttention.
get_query_key_value_tensors): the queries of the heads that share a key, then that key, then its
value. A gated MLP has the gate above the other half (mlp.py, `glu`: activation of the first chunk).
GPT-2's Conv1D keeps matrices transposed. Belongs here: names, order and shape. Does not belong
here: files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.spec.model import ModelSpec

Tensors = list[Any]


def _only(tensors: Tensors) -> Any:
    return tensors[0]


def _alone(tensor: Any) -> Tensors:
    return [tensor]


@dataclass(frozen=True)
class Rule:
    """`join` makes the tensor `megatron` of those named `theirs`, `split` is the way back."""

    megatron: str
    theirs: tuple[str, ...]
    join: Callable[[Tensors], Any] = _only
    split: Callable[[Any], Tensors] = _alone


def rules_of(model: ModelSpec) -> list[Rule]:
    """Every weight of a GPT or a Llama, once."""
    return _gpt2(model) if model.family == "gpt" else _llama(model)


def _llama(model: ModelSpec) -> list[Rule]:
    rules = [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        *_output(model),
    ]
    for layer in range(model.layers):
        rules += _llama_layer(model, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    return rules


def _llama_layer(model: ModelSpec, ours: str, theirs: str) -> list[Rule]:
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
    groups, sizes = _Groups(model), [model.ffn_size] * 2
    rules = [
        Rule(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",)),
        Rule(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",)),
    ]
    for kind in ("weight", "bias") if model.bias else ("weight",):
        parts = tuple(f"{attention}{name}_proj.{kind}" for name in "qkv")
        halves = (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}")
        rules += [
            Rule(f"{ours}self_attention.linear_qkv.{kind}", parts, groups.join, groups.split),
            Rule(f"{ours}self_attention.linear_proj.{kind}", (f"{attention}o_proj.{kind}",)),
            Rule(f"{ours}mlp.linear_fc1.{kind}", halves, torch.cat, _Parts(sizes)),
            Rule(f"{ours}mlp.linear_fc2.{kind}", (f"{mlp}down_proj.{kind}",)),
        ]
    return rules


def _gpt2(model: ModelSpec) -> list[Rule]:
    rules = [
        Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
        Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *_both("decoder.final_layernorm.", "transformer.ln_f."),
        *_output(model),
    ]
    for layer in range(model.layers):
        rules += _gpt2_layer(model, f"decoder.layers.{layer}.", f"transformer.h.{layer}.")
    return rules


def _gpt2_layer(model: ModelSpec, ours: str, theirs: str) -> list[Rule]:
    groups, stacked = _Groups(model), f"{theirs}attn.c_attn."
    return [
        *_both(f"{ours}input_layernorm.", f"{theirs}ln_1."),
        *_both(f"{ours}pre_mlp_layernorm.", f"{theirs}ln_2."),
        Rule(
            f"{ours}self_attention.linear_qkv.weight",
            (f"{stacked}weight",),
            lambda given: groups.join(groups.parts(given[0].t())),
            lambda tensor: [torch.cat(groups.split(tensor)).t()],
        ),
        Rule(
            f"{ours}self_attention.linear_qkv.bias",
            (f"{stacked}bias",),
            lambda given: groups.join(groups.parts(given[0])),
            lambda tensor: [torch.cat(groups.split(tensor))],
        ),
        *_transposed(f"{ours}self_attention.linear_proj.", f"{theirs}attn.c_proj."),
        *_transposed(f"{ours}mlp.linear_fc1.", f"{theirs}mlp.c_fc."),
        *_transposed(f"{ours}mlp.linear_fc2.", f"{theirs}mlp.c_proj."),
    ]


def _output(model: ModelSpec) -> list[Rule]:
    """A tied model has no output matrix of its own."""
    return [] if model.tied else [Rule("output_layer.weight", ("lm_head.weight",))]


def _both(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}{kind}", (f"{theirs}{kind}",)) for kind in ("weight", "bias")]


def _transposed(ours: str, theirs: str) -> list[Rule]:
    return [
        Rule(f"{ours}weight", (f"{theirs}weight",), lambda t: t[0].t(), lambda t: [t.t()]),
        Rule(f"{ours}bias", (f"{theirs}bias",)),
    ]


@dataclass(frozen=True)
class _Parts:
    """Cuts rows into parts of these sizes."""

    sizes: list[int]

    def __call__(self, tensor: Any) -> Tensors:
        return list(tensor.split(self.sizes))


class _Groups:
    """Queries, keys and values: three blocks of rows, or one with all that share a key together.

    Of a matrix [rows, hidden] or a bias [rows].
    """

    def __init__(self, model: ModelSpec) -> None:
        size, keys = model.head_size, model.key_value_heads
        self._keys = keys
        self._rows_of_group = [model.heads // keys * size, size, size]
        self.parts = _Parts([rows * keys for rows in self._rows_of_group])

    def join(self, parts: Tensors) -> Any:
        """[q, k, v] -> the rows group by group."""
        grouped = [part.unflatten(0, (self._keys, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Any) -> Tensors:
        """The rows group by group -> [q, k, v]."""
        grouped = tensor.unflatten(0, (self._keys, -1))
        return [part.flatten(0, 1) for part in grouped.split(self._rows_of_group, dim=1)]
