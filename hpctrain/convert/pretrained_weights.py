"""Convert between a Hugging Face directory and starting weights for megatron-core.

Belongs here: which tensors of one make which weight of the other, by the tables of families, and
converting one after the other. Does not belong here: reading and writing (see
`hugging_face_directory`, `megatron_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged
from hpctrain.convert import megatron_checkpoint
from hpctrain.convert.hugging_face_directory import (
    StoredTensors,
    TensorToWrite,
    copy_companions,
    write_tensors,
)
from hpctrain.convert.megatron_checkpoint import CoreWeights, StoredWeights
from hpctrain.convert.unfinished import UnfinishedConversion
from hpctrain.engines.conversion import shape_described, unconvertible
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.records.conversions import ConversionReport, Form
from hpctrain.spec.families import WeightRow
from hpctrain.spec.families.settings import family_by, type_of
from hpctrain.spec.model import ModelSpec


def convert_staged(staged: Staged, work: UnfinishedConversion) -> ConversionReport:
    """Convert to the other of the two formats. Raises InvalidInputError."""
    if reasons := unconvertible(staged.config):
        raise InvalidInputError([Problem(reason, str(staged.path)) for reason in reasons])
    model = shape_described(staged.config)
    copy_companions(staged.path, work.directory)
    form: Form
    if staged.kind == "hugging_face":
        form, dtype = "megatron-core", to_megatron(model, StoredTensors(staged), work)
    else:
        stored = StoredWeights(staged.path)
        form, dtype = "Hugging Face", stored.dtype
        to_hugging_face(model, stored, work)
    return report_of(model, dtype, staged.path, form)


def to_megatron(model: ModelSpec, stored: StoredTensors, work: UnfinishedConversion) -> torch.dtype:
    """Write a megatron-core checkpoint, one weight after the other; returns their type."""
    family = family_by(model)
    if not any(name.startswith(family.layer_prefix.format(layer=model.layers)) for name in stored):
        model = model.model_copy(update={"mtp_layers": 0})  # transformers saves none
    bias = family.weights.get("router_bias")
    of_any_type = () if bias is None else [name for name in stored if name.endswith(bias.name)]
    dtype = stored.dtype(of_any_type)
    with megatron_checkpoint.one_rank():
        core = CoreWeights(model, dtype)
        rules = rules_of(model, core.weights)
        found = {}
        for name, (shape, _) in tensors_of(model, core, rules).items():
            known = stored.find(name)
            if known is None:
                raise InvalidInputError([Problem(f"has no weight {name}", str(stored.path))])
            found[name] = known
            if known[1].shape != shape:
                message = f"{known[0]} has shape {list(known[1].shape)}, not {list(shape)}"
                raise InvalidInputError([Problem(message, str(stored.path))])
        _refuse_unknown(model, stored, {known for known, _ in found.values()})

        def make(name: str) -> Any:
            rule = rules[name]
            parts = [found[one.name][1].read(one.expert) for one in rule.hugging_face]
            return rule.join(parts)

        core.write(make, work)
    return dtype


def _refuse_unknown(model: ModelSpec, stored: StoredTensors, read: set[str]) -> None:
    """Raise InvalidInputError for tensors that are in no part of the model."""
    family = family_by(model)
    unused = list(family.unused_weights)
    if model.tied:
        unused.append(family.weights["head"].name + ".*")
    left = [
        name
        for name in stored
        if name not in read and not any(fnmatchcase(name, pattern) for pattern in unused)
    ]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        message = f"has weights that no part of {family.title} has: {', '.join(left[:3])}{more}"
        raise InvalidInputError([Problem(message, str(stored.path))])


def to_hugging_face(model: ModelSpec, stored: StoredWeights, work: UnfinishedConversion) -> None:
    """Write safetensors of a megatron-core checkpoint, one tensor after the other."""
    if not stored.has_predictions:
        model = model.model_copy(update={"mtp_layers": 0})
    with megatron_checkpoint.one_rank():
        core = CoreWeights(model, stored.dtype)
    stored.check(core)
    rules = rules_of(model, core.weights)

    @lru_cache(maxsize=2)  # tensors of one weight are beside each other, but for one between
    def parts_of(name: str) -> list[Any]:
        return rules[name].split(stored.read(core.weights[name]))

    def parts(pieces: list[tuple[str, int]]) -> Iterator[Any]:
        for name, number in pieces:
            yield parts_of(name)[number]

    write_tensors(
        work,
        [
            TensorToWrite(name, core.weights[pieces[0][0]].dtype, shape, partial(parts, pieces))
            for name, (shape, pieces) in tensors_of(model, core, rules).items()
        ],
    )


def report_of(
    model: ModelSpec, dtype: torch.dtype, source: Path, form: Form, *, merged_lora: bool = False
) -> ConversionReport:
    """Describe the converted model; the caller fills in `target`."""
    return ConversionReport(
        source=str(source),
        target="",
        form=form,
        model_type=type_of(model),
        parameters=total_parameters(model.model_copy(update={"mtp_layers": 0})),
        dtype=str(dtype).removeprefix("torch."),
        merged_lora=merged_lora,
    )


# -- Which tensors of transformers' class make which weight of megatron-core's GPTModel ----------
# A family's table names the tensors of each part (`weights` in hpctrain/spec/families/*.yaml). Here
# is which part a weight of GPTModel is. megatron-core stores queries, keys and values in one
# matrix, group by group (transformer/attention.py, SelfAttention.get_query_key_value_tensors): the
# queries of the heads that share a key, then that key, then its value. A gated MLP stores the gate
# projection first, then the up projection (mlp.py, `glu`).


_OF_MODEL = {
    "embedding.word_embeddings": "embedding",
    "embedding.position_embeddings": "positions",
    "embedding.norm": "embedding_norm",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "head",
}
_OF_LAYER = {
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "output",
    "self_attention.q_layernorm": "query_norm",
    "self_attention.k_layernorm": "key_norm",
    "self_attention.core_attention.softmax_offset": "sinks",
    "self_attention.linear_q_proj": "query",
    "self_attention.linear_q_down_proj": "query_down",
    "self_attention.linear_q_up_proj": "query_up",
    "self_attention.linear_kv_down_proj": "latent_down",
    "self_attention.linear_kv_up_proj": "latent_up",
    "self_attention.kv_layernorm": "latent_norm",
    "self_attn_bda.norm": "attention_output_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "gate_up",
    "mlp.linear_fc2": "down",
    "mlp_bda.norm": "mlp_output_norm",
    "mlp.router": "router",
    "mlp.router.expert_bias": "router_bias",
    "mlp.experts.local_experts.linear_fc1": "expert_gate_up",
    "mlp.experts.local_experts.linear_fc2": "expert_down",
    "mlp.shared_experts.linear_fc1": "shared_gate_up",
    "mlp.shared_experts.linear_fc2": "shared_down",
    "mlp.shared_experts.gate_weight": "shared_weight",
    "enorm": "prediction_embedding_norm",
    "hnorm": "prediction_hidden_norm",
    "eh_proj": "prediction_projection",
    "final_layernorm": "prediction_norm",
}
# Layers behind the model (multi-token prediction) have the next numbers in a class.
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")
# Copies of the embedding and the output layer, which published files have for each of them.
_COPIES = {"prediction_embedding": "embedding", "prediction_head": "head"}
_OF_HEAD = "{head}"  # in the name of a tensor that each head has
_EXPERT = re.compile(r"(?<=local_experts)\.(\d+)")


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a Hugging Face directory, or what is of one expert in it."""

    name: str
    expert: int | None = None


@dataclass(frozen=True)
class WeightRule:
    """`join` builds a weight of megatron-core from the tensors `hugging_face`; `split` reverses
    it."""

    hugging_face: tuple[NamedTensor, ...]
    join: Callable[[list[Any]], Any]
    split: Callable[[Any], list[Any]]


def tensors_of(
    model: ModelSpec, core: CoreWeights, rules: dict[str, WeightRule]
) -> dict[str, tuple[tuple[int, ...], list[tuple[str, int]]]]:
    """List the tensors of a Hugging Face directory: their shapes, and of which weights of
    megatron-core they are which parts."""
    found: dict[str, tuple[tuple[int, ...], list[tuple[str, int]]]] = {}
    for name, rule in rules.items():
        parts = rule.split(torch.empty(core.weights[name].shape, device="meta"))
        for number, (piece, part) in enumerate(zip(rule.hugging_face, parts, strict=True)):
            shape = tuple(part.shape)
            if piece.expert is not None:
                assert model.moe is not None, "its weights have experts"
                shape = (model.moe.experts, *shape)
            found.setdefault(piece.name, (shape, []))[1].append((name, number))
    family = family_by(model)
    for layer in range(model.layers, model.layers + model.mtp_layers):
        prefix = family.layer_prefix.format(layer=layer)
        for copy, original in _COPIES.items():
            name = f"{family.weights[original].name}.weight"
            found[f"{prefix}{family.weights[copy].name}.weight"] = found[name]
    return found


def rules_of(model: ModelSpec, names: Iterable[str]) -> dict[str, WeightRule]:
    """List one rule for every weight of megatron-core. Raises InvalidInputError for one that the
    table of the family has not."""
    return {name: _rule(model, name) for name in names}


def _rule(model: ModelSpec, name: str) -> WeightRule:
    family = family_by(model)
    in_layer = _LAYER.fullmatch(name)
    rest = in_layer[3] if in_layer else name
    of_expert = _EXPERT.search(rest)
    expert = int(of_expert[1]) if of_expert else None
    rest = _EXPERT.sub("", rest)
    known = _OF_LAYER if in_layer else _OF_MODEL
    stem, _, end = rest.rpartition(".")
    is_bias = end == "bias"
    part = known.get(stem if end in ("weight", "bias") else rest)
    if part == "query_norm" and model.mla is not None:
        part = "query_down_norm"
    prefix = ""
    if in_layer:
        behind = model.layers if in_layer[1] == "mtp" else 0
        prefix = family.layer_prefix.format(layer=int(in_layer[2]) + behind)
    rows = _rows(family.weights, part)
    if rows is None:
        message = f"no tensor of {family.class_name} is known for megatron-core's {name}"
        raise InvalidInputError([Problem(message)])
    beside = model.parallel_residual == "two_norms"
    norms = model.key_value_heads if part == "key_norm" else model.heads
    pieces = tuple(
        NamedTensor(
            prefix
            + ((beside and row.beside) or row.name).format(expert=expert, head=head)
            + row.ends[is_bias],
            expert if row.of_experts else None,
        )
        for row in rows
        for head in range(norms if _OF_HEAD in row.name else 1)
    )
    join, split = _form(model, str(part), rows)
    turned = rows[0].transposed and not is_bias
    if turned:
        return WeightRule(
            pieces,
            lambda tensors: join([one.t() for one in tensors]),
            lambda tensor: [one.t() for one in split(tensor)],
        )
    return WeightRule(pieces, join, split)


def _rows(weights: dict[str, WeightRow], part: str | None) -> list[WeightRow] | None:
    """Find the rows of a part, which a class may have as several; None if there are none."""
    if part in weights:
        return [weights[part]]
    if part == "qkv":
        several = ["query", "key", "value"]
    elif part is not None and part.endswith("gate_up"):
        up, gate = part.removesuffix("gate_up") + "up", part.removesuffix("_up")
        several = [gate, up] if gate in weights else [up]
    else:
        return None
    return [weights[one] for one in several] if all(one in weights for one in several) else None


_Form = tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]]]


def _form(model: ModelSpec, part: str, rows: list[WeightRow]) -> _Form:
    """Choose how tensors [rows, columns] are joined and split."""
    row = rows[0]
    if part == "qkv" and (len(rows) == 3 or row.stacked):
        groups = _QueryGroups(model)
        if len(rows) == 3:
            return groups.join, groups.split
        return (
            lambda tensors: groups.join(groups.parts(tensors[0])),
            lambda tensor: [torch.cat(groups.split(tensor))],
        )
    if _OF_HEAD in row.name:
        return torch.cat, lambda tensor: list(tensor.split(model.head_size))
    if part in ("query_norm", "key_norm") and model.attends.qk_norm == "each_head":
        return (
            lambda tensors: tensors[0].flatten(),
            lambda tensor: [tensor.unflatten(0, (-1, model.head_size))],
        )
    if row.alternating:
        return (
            lambda tensors: tensors[0].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1),
            lambda tensor: [tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)],
        )
    if len(rows) == 2:
        return torch.cat, lambda tensor: list(tensor.chunk(2))
    return lambda tensors: tensors[0], lambda tensor: [tensor]


class _QueryGroups:
    """Converts separate query, key and value rows to megatron-core's fused QKV rows, and back.

    Works on a matrix [rows, hidden] or a bias [rows].
    """

    def __init__(self, model: ModelSpec) -> None:
        size, keys = model.head_size, model.key_value_heads
        self._keys = keys
        self._rows_of_group = [model.heads // keys * size, size, size]

    def parts(self, tensor: Any) -> list[Any]:
        """All queries, then all keys, then all values -> [q, k, v]."""
        return list(tensor.split([rows * self._keys for rows in self._rows_of_group]))

    def join(self, parts: list[Any]) -> Any:
        """[q, k, v] -> the rows group by group."""
        grouped = [part.unflatten(0, (self._keys, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Any) -> list[Any]:
        """The rows group by group -> [q, k, v]."""
        grouped = tensor.unflatten(0, (self._keys, -1))
        return [part.flatten(0, 1) for part in grouped.split(self._rows_of_group, dim=1)]
