"""What somebody's `config.json` says of a model, in the words of a spec.

Belongs here: reading its names, and setting it beside a spec. Does not belong here: opening the
file (see `hpctrain.checkpoints.staged`), writing one (see `hugging_face`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.engines.hugging_face import ACTIVATIONS, MODEL_TYPES
from hpctrain.plan.model.vision import BOTTLENECK_EXPANSION, RESNET_BLOCKS, STEM_FEATURES
from hpctrain.spec.model import ModelSpec

Config = Mapping[str, Any]
Fields = dict[str, object]

_FAMILIES = {kind: family for family, kind in MODEL_TYPES.items()}
_SPEC_ACTIVATIONS = {name: ours for ours, name in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "swiglu",
}


def family_described(config: Config) -> str | None:
    """Find the family of a spec; None for a kind of model that hpctrain does not train."""
    return _FAMILIES.get(str(config.get("model_type")))


def described(config: Config) -> Fields:
    """Translate to the fields of `model` in a spec; `config` is of a known family.

    Where `config` is silent, transformers' default holds (configuration_*.py).
    """
    family = family_described(config)
    assert family is not None
    return {"family": family, **_READERS[family](config)}


def disagreements(model: ModelSpec, config: Config) -> list[str]:
    """Write one sentence for each field in which the spec is another model; empty for this one.

    Classes of a classifier may differ, for its last layer is made anew; so may dropout, which a
    run chooses. A text may be shorter than the positions that were learned.
    """
    family = family_described(config)
    if family is None:
        known = ", ".join(_FAMILIES)
        return [f"model_type is {config.get('model_type')}, hpctrain knows {known}"]
    if family != model.family:
        return [f"family is {model.family} in the spec, the directory has a {family}"]
    fields = described(config)
    limit = fields.pop("seq", None)
    found = [
        f"{name} is {_value(model, name)} in the spec and {value} in config.json"
        for name, value in fields.items()
        if not _same(_value(model, name), value)
    ]
    if isinstance(limit, int) and model.seq > limit:
        found.append(f"seq is {model.seq} in the spec, config.json has {limit} positions")
    return found


_EFFECTIVE = {"ffn": "ffn_size", "kv_heads": "key_value_heads", "head_dim": "head_size"}


def _value(model: ModelSpec, name: str) -> object:
    """Read a field's value, also where it follows from other fields."""
    return getattr(model, _EFFECTIVE.get(name, name))


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return abs(ours - theirs) <= 1e-6 * abs(theirs)  # JSON of fp32 numbers has their rounding
    return ours == theirs


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
        bias=_bias(config),
    )


def _bias(config: Config) -> object:
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    return attention if attention == mlp else "in one of attention and MLP only"


def rope_of(config: Config) -> Config:
    """Read base and kind of rotary positions; transformers 4 had them in two places."""
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
    """`layers` alone; a network of other widths is none that a spec can describe."""
    bottleneck = config.get("layer_type", "bottleneck") == "bottleneck"
    widths = [STEM_FEATURES * 2**stage for stage in range(4)]
    if bottleneck:
        widths = [width * BOTTLENECK_EXPANSION for width in widths]
    depths = tuple(config.get("depths", (3, 4, 6, 3)))
    usual = list(config.get("hidden_sizes", [256, 512, 1024, 2048])) == widths
    for layers, blocks in RESNET_BLOCKS.items():
        if usual and blocks == depths and bottleneck == (layers >= 50):
            return dict(layers=layers)
    return dict(layers=f"of blocks {list(depths)} and other widths")


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
