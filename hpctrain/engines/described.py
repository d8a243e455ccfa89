"""Translate Hugging Face's `config.json` into the fields of `model`, and compare it with a spec.

Belongs here: the names in that file, and the comparison. Does not belong here: opening the file
(see `hpctrain.checkpoints.staged`), writing one (see `hugging_face`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.engines.hugging_face import ACTIVATIONS, MODEL_TYPES, NAMES, effective
from hpctrain.plan.model.vision import BOTTLENECK_EXPANSION, RESNET_BLOCKS, STEM_FEATURES
from hpctrain.spec.model import ModelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Inexpressible:
    """A property of a model that no value of a spec's field can express; `text` describes it."""

    text: str

    def __str__(self) -> str:
        return self.text


Value = str | int | float | bool | Inexpressible
Fields = dict[str, Value]

_FAMILIES = {kind: family for family, kind in MODEL_TYPES.items()}
_SPEC_ACTIVATIONS = {name: ours for ours, name in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "swiglu",
}


def family_described(config: Config) -> str | None:
    """Find the family of a `config.json`; None for a model that hpctrain does not train."""
    return _FAMILIES.get(str(config.get("model_type")))


def described(config: Config) -> Fields:
    """Translate to the fields of `model` in a spec; `config` is of a known family.

    Absent settings have transformers' defaults.
    """
    family = family_described(config)
    assert family is not None
    if family == "resnet":
        return {"family": family, **_resnet(config)}
    fields = {field: config.get(name, default) for field, name, default in NAMES[family]}
    fields["activation"] = _SPEC_ACTIVATIONS.get(fields["activation"], fields["activation"])
    if family == "gpt":
        fields["ffn"] = fields["ffn"] or 4 * fields["hidden"]
    if family == "llama":
        fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
        fields["head_dim"] = fields["head_dim"] or fields["hidden"] // fields["heads"]
        fields["rope_base"] = round(rope_of(config).get("rope_theta", 10000))
        if fields["bias"] != config.get("mlp_bias", False):
            fields["bias"] = Inexpressible("in one of attention and MLP only")
    return {"family": family, **fields}


def disagreements(model: ModelSpec, config: Config) -> list[str]:
    """Write one message per field in which spec and `config.json` differ; empty if none does.

    Classes of a classifier may differ, because its last layer is initialized again. So may dropout,
    which a run chooses. A sequence may be shorter than the learned positions.
    """
    family = family_described(config)
    if family is None:
        known = ", ".join(_FAMILIES)
        return [f"model_type is {config.get('model_type')}, hpctrain knows {known}"]
    if family != model.family:
        return [f"family is {model.family} in the spec, the directory has a {family}"]
    fields = described(config)
    limit = fields.pop("seq", None)
    found = []
    for name, theirs in fields.items():
        ours = effective(model, name)
        same = ours == theirs
        if isinstance(ours, float) and isinstance(theirs, int | float):
            same = abs(ours - theirs) <= 1e-6 * abs(theirs)  # JSON of fp32 numbers is rounded
        if not same:
            found.append(f"{name} is {ours} in the spec and {theirs} in config.json")
    if isinstance(limit, int) and model.seq > limit:
        found.append(f"seq is {model.seq} in the spec, config.json has {limit} positions")
    return found


def rope_of(config: Config) -> Config:
    """Read base and type of rotary positions; transformers 4 had them in two places."""
    older = {"rope_theta": config.get("rope_theta", 10000), **(config.get("rope_scaling") or {})}
    return config.get("rope_parameters") or older


def _resnet(config: Config) -> Fields:
    """Find the number of layers; a spec cannot express a network of other widths."""
    bottleneck = config.get("layer_type", "bottleneck") == "bottleneck"
    widths = [STEM_FEATURES * 2**stage for stage in range(4)]
    if bottleneck:
        widths = [width * BOTTLENECK_EXPANSION for width in widths]
    depths = tuple(config.get("depths", (3, 4, 6, 3)))
    usual = list(config.get("hidden_sizes", [256, 512, 1024, 2048])) == widths
    for layers, blocks in RESNET_BLOCKS.items():
        if usual and blocks == depths and bottleneck == (layers >= 50):
            return dict(layers=layers)
    return dict(layers=Inexpressible(f"of blocks {list(depths)} and other widths"))
