"""Map weights of megatron-core's GPTModel to those of GPT2LMHeadModel and LlamaForCausalLM.

A rule relates one megatron-core tensor to one or more Hugging Face tensors. megatron-core stores
queries, keys and values in one matrix, group by group (transformer/attention.py, SelfAttention.
get_query_key_value_tensors): the queries of the heads that share a key, then that key, then its
value. A gated MLP stores the gate projection first, then the up projection (mlp.py, `glu`).
GPT-2's Conv1D stores matrices transposed. Belongs here: names, order and shape. Does not belong
here: files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.spec.model import ModelSpec

Tensors = list[Any]


@dataclass(frozen=True)
class WeightRule:
    """`join` builds the tensor `megatron` from those named `hugging_face`; `split` reverses it."""

    megatron: str
    hugging_face: tuple[str, ...]
    join: Callable[[Tensors], Any] = lambda tensors: tensors[0]
    split: Callable[[Any], Tensors] = lambda tensor: [tensor]


def rules_of(model: ModelSpec) -> list[WeightRule]:
    """List one rule for every megatron-core weight of a GPT or Llama model."""
    rules = [] if model.tied else [WeightRule("output_layer.weight", ("lm_head.weight",))]
    if model.family == "gpt":
        rules += [
            WeightRule("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
            WeightRule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
            *_weight_and_bias("decoder.final_layernorm.", "transformer.ln_f."),
        ]
    else:
        rules += [
            WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
            WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        ]
    for layer in range(model.layers):
        core = f"decoder.layers.{layer}."
        if model.family == "gpt":
            rules += _gpt2_layer(model, core, f"transformer.h.{layer}.")
        else:
            rules += _llama_layer(model, core, f"model.layers.{layer}.")
    return rules


def _llama_layer(model: ModelSpec, core: str, hf: str) -> list[WeightRule]:
    attention, mlp = f"{hf}self_attn.", f"{hf}mlp."
    groups, sizes = _QueryGroups(model), [model.ffn_size] * 2
    rules = [
        WeightRule(f"{core}input_layernorm.weight", (f"{hf}input_layernorm.weight",)),
        WeightRule(f"{core}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",)),
    ]
    for kind in ("weight", "bias") if model.bias else ("weight",):
        parts = tuple(f"{attention}{name}_proj.{kind}" for name in "qkv")
        halves = (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}")
        rules += [
            WeightRule(f"{core}self_attention.linear_qkv.{kind}", parts, groups.join, groups.split),
            WeightRule(f"{core}self_attention.linear_proj.{kind}", (f"{attention}o_proj.{kind}",)),
            WeightRule(f"{core}mlp.linear_fc1.{kind}", halves, torch.cat, _SplitRows(sizes)),
            WeightRule(f"{core}mlp.linear_fc2.{kind}", (f"{mlp}down_proj.{kind}",)),
        ]
    return rules


def _gpt2_layer(model: ModelSpec, core: str, hf: str) -> list[WeightRule]:
    groups, stacked = _QueryGroups(model), f"{hf}attn.c_attn."
    return [
        *_weight_and_bias(f"{core}input_layernorm.", f"{hf}ln_1."),
        *_weight_and_bias(f"{core}pre_mlp_layernorm.", f"{hf}ln_2."),
        WeightRule(
            f"{core}self_attention.linear_qkv.weight",
            (f"{stacked}weight",),
            lambda tensors: groups.join(groups.parts(tensors[0].t())),
            lambda tensor: [torch.cat(groups.split(tensor)).t()],
        ),
        WeightRule(
            f"{core}self_attention.linear_qkv.bias",
            (f"{stacked}bias",),
            lambda tensors: groups.join(groups.parts(tensors[0])),
            lambda tensor: [torch.cat(groups.split(tensor))],
        ),
        *_transposed(f"{core}self_attention.linear_proj.", f"{hf}attn.c_proj."),
        *_transposed(f"{core}mlp.linear_fc1.", f"{hf}mlp.c_fc."),
        *_transposed(f"{core}mlp.linear_fc2.", f"{hf}mlp.c_proj."),
    ]


def _weight_and_bias(core: str, hf: str) -> list[WeightRule]:
    return [WeightRule(f"{core}{kind}", (f"{hf}{kind}",)) for kind in ("weight", "bias")]


def _transposed(core: str, hf: str) -> list[WeightRule]:
    return [
        WeightRule(f"{core}weight", (f"{hf}weight",), lambda t: t[0].t(), lambda t: [t.t()]),
        WeightRule(f"{core}bias", (f"{hf}bias",)),
    ]


@dataclass(frozen=True)
class _SplitRows:
    """Splits rows into parts of these sizes."""

    sizes: list[int]

    def __call__(self, tensor: Any) -> Tensors:
        return list(tensor.split(self.sizes))


class _QueryGroups:
    """Converts separate query, key and value rows to megatron-core's fused QKV rows, and back.

    Works on a matrix [rows, hidden] or a bias [rows].
    """

    def __init__(self, model: ModelSpec) -> None:
        size, keys = model.head_size, model.key_value_heads
        self._keys = keys
        self._rows_of_group = [model.heads // keys * size, size, size]
        self.parts = _SplitRows([rows * keys for rows in self._rows_of_group])

    def join(self, parts: Tensors) -> Any:
        """[q, k, v] -> the rows group by group."""
        grouped = [part.unflatten(0, (self._keys, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Any) -> Tensors:
        """The rows group by group -> [q, k, v]."""
        grouped = tensor.unflatten(0, (self._keys, -1))
        return [part.flatten(0, 1) for part in grouped.split(self._rows_of_group, dim=1)]
