"""Translate Hugging Face's `config.json` into the fields of `model`, and compare it with a spec.

Belongs here: the names in that file, and the comparison. Does not belong here: opening the file
(see `hpctrain.checkpoints.staged`), writing one (see `hugging_face`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.engines.hugging_face import ACTIVATIONS, MODEL_TYPES
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

    Absent settings have transformers' defaults (configuration_*.py).
    """
    family = family_described(config)
    assert family is not None
    return {"family": family, **_READERS[family](config)}


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
        ours = getattr(model, _EFFECTIVE.get(name, name))
        same = ours == theirs
        if isinstance(ours, float) and isinstance(theirs, int | float):
            same = abs(ours - theirs) <= 1e-6 * abs(theirs)  # JSON of fp32 numbers is rounded
        if not same:
            found.append(f"{name} is {ours} in the spec and {theirs} in config.json")
    if isinstance(limit, int) and model.seq > limit:
        found.append(f"seq is {model.seq} in the spec, config.json has {limit} positions")
    return found


# Field of the spec -> property with its value, also where that follows from other fields.
_EFFECTIVE = {"ffn": "ffn_size", "kv_heads": "key_value_heads", "head_dim": "head_size"}


def _gpt2(config: Config) -> Fields:
    hidden = config.get("n_embd", 768)
    return dict(
        layers=config.get("n_layer", 12),
        hidden=hidden,
        heads=config.get("n_head", 12),
        ffn=config.get("n_inner") or 4 * hidden,
        vocab=config.get("vocab_size", 50257),
        seq=config.get("n_positions", 1024),
        activation=_activation(config.get("activation_function", "gelu_new")),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        tied=config.get("tie_word_embeddings", True),
    )


def _llama(config: Config) -> Fields:
    hidden, heads = config.get("hidden_size", 4096), config.get("num_attention_heads", 32)
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    return dict(
        layers=config.get("num_hidden_layers", 32),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=config.get("intermediate_size", 11008),
        vocab=config.get("vocab_size", 32000),
        seq=config.get("max_position_embeddings", 2048),
        activation=_activation(config.get("hidden_act", "silu")),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_base=round(rope_of(config).get("rope_theta", 10000)),
        tied=config.get("tie_word_embeddings", False),
        bias=bias if bias == mlp_bias else Inexpressible("in one of attention and MLP only"),
    )


def rope_of(config: Config) -> Config:
    """Read base and type of rotary positions; transformers 4 had them in two places."""
    older = {"rope_theta": config.get("rope_theta", 10000), **(config.get("rope_scaling") or {})}
    return config.get("rope_parameters") or older


def _bert(config: Config) -> Fields:
    return dict(
        vocab=config.get("vocab_size", 30522),
        seq=config.get("max_position_embeddings", 512),
        tied=config.get("tie_word_embeddings", True),
        **_encoder(config),
    )


def _distilbert(config: Config) -> Fields:
    return dict(
        layers=config.get("n_layers", 6),
        hidden=config.get("dim", 768),
        heads=config.get("n_heads", 12),
        ffn=config.get("hidden_dim", 3072),
        vocab=config.get("vocab_size", 30522),
        seq=config.get("max_position_embeddings", 512),
        activation=_activation(config.get("activation", "gelu")),
        tied=config.get("tie_word_embeddings", True),
    )


def _vit(config: Config) -> Fields:
    return dict(
        image=config.get("image_size", 224),
        patch=config.get("patch_size", 16),
        bias=config.get("qkv_bias", True),
        **_encoder(config),
    )


def _encoder(config: Config) -> Fields:
    return dict(
        layers=config.get("num_hidden_layers", 12),
        hidden=config.get("hidden_size", 768),
        heads=config.get("num_attention_heads", 12),
        ffn=config.get("intermediate_size", 3072),
        activation=_activation(config.get("hidden_act", "gelu")),
        norm_epsilon=config.get("layer_norm_eps", 1e-12),
    )


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


def _activation(name: str) -> str:
    return _SPEC_ACTIVATIONS.get(name, name)


_READERS: dict[str, Callable[[Config], Fields]] = {
    "gpt": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "distilbert": _distilbert,
    "vit": _vit,
    "resnet": _resnet,
}
