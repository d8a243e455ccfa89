"""Convert between a Hugging Face directory and starting weights for megatron-core.

Belongs here: converting each tensor by its rule. Does not belong here: the rules (see
`pretrained_weights`), reading and writing (see `hugging_face_directory`, `megatron_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged
from hpctrain.convert import megatron_checkpoint
from hpctrain.convert.hugging_face_directory import (
    copy_companions,
    dtype_of,
    open_tensors,
    write_model,
)
from hpctrain.engines.conversion import shape_described, unconvertible
from hpctrain.records.conversions import ConversionReport, Form
from hpctrain.spec.families.settings import family_by
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.models.build import empty_model


def convert_staged(staged: Staged, target: Path) -> ConversionReport:
    """Convert to the other of the two formats. Raises InvalidInputError."""
    if reasons := unconvertible(staged.config):
        raise InvalidInputError([Problem(reason, str(staged.path)) for reason in reasons])
    model = shape_described(staged.config)
    form: Form
    with megatron_checkpoint.one_rank():
        if staged.kind == "hugging_face":
            form = "megatron-core"
            converted = megatron_checkpoint.build(model, dtype_of(staged))
            fill(converted, model, staged)
            megatron_checkpoint.save(converted, target)
        else:
            form = "Hugging Face"
            chunk = megatron_checkpoint.build(model, megatron_checkpoint.stored_dtype(staged.path))
            megatron_checkpoint.load(chunk, staged.path)
            converted = module_of(chunk, model, staged.config)
            write_model(converted, target)
        copy_companions(staged.path, target)
        return report_of(converted, model, staged.path, form)


@torch.no_grad()
def fill(chunk: Any, model: ModelSpec, staged: Staged) -> None:
    """Copy the directory's weights into a GPTModel, one tensor after the other."""
    parameters = dict(chunk.named_parameters())
    with open_tensors(staged) as read:
        for rule in rules_of(model):
            tensor = rule.join([read(name) for name in rule.hugging_face])
            target = parameters.pop(rule.megatron)
            if tensor.shape != target.shape:
                message = (
                    f"{rule.hugging_face[0]} has shape {list(tensor.shape)}, "
                    f"not {list(target.shape)}"
                )
                raise InvalidInputError([Problem(message, str(staged.path))])
            target.copy_(tensor)
    assert not parameters, f"rules for {sorted(parameters)} are missing"


@torch.no_grad()
def module_of(chunk: Any, model: ModelSpec, config: Mapping[str, Any] | None) -> Any:
    """Build a model of Hugging Face's class with the weights of a GPTModel."""
    state = chunk.state_dict()
    tensors: dict[str, Any] = {}
    for rule in rules_of(model):
        parts = rule.split(state[rule.megatron])
        named = zip(rule.hugging_face, parts, strict=True)
        tensors |= {name: part.contiguous() for name, part in named}
    module = empty_model(model, config)
    missing, unexpected = module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return module


def report_of(
    module: Any, model: ModelSpec, source: Path, form: Form, *, merged_lora: bool = False
) -> ConversionReport:
    """Describe the converted model; the caller fills in `target`."""
    parameters = list(module.parameters())
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    return ConversionReport(
        source=str(source),
        target="",
        form=form,
        model_type=family_by(model).model_types[0],
        parameters=sum(parameter.numel() for parameter in parameters),
        dtype=" and ".join(sorted(dtypes)),
        merged_lora=merged_lora,
    )


# -- Map weights of megatron-core's GPTModel to those of GPT2LMHeadModel and LlamaForCausalLM ---
# A rule relates one megatron-core tensor to one or more Hugging Face tensors. megatron-core stores
# queries, keys and values in one matrix, group by group (transformer/attention.py, SelfAttention.
# get_query_key_value_tensors): the queries of the heads that share a key, then that key, then its
# value. A gated MLP stores the gate projection first, then the up projection (mlp.py, `glu`).
# GPT-2's Conv1D stores matrices transposed.


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
