"""Translate between the `model` section of a spec and Hugging Face's `config.json`.

`settings_of` gives the keyword arguments of GPT2Config, LlamaConfig and so on, with the names of
`config.json` (transformers 5). `described` reads such a file back, and `disagreements` compares it
with a spec. Belongs here: these names. Does not belong here: transformers (see
`hpctrain.train.engines.models`), opening the file (see `hpctrain.checkpoints.staged`), models that
the classes cannot represent (`hpctrain.plan.abilities.trainable_hugging_face`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.plan.model.vision import (
    BOTTLENECK_EXPANSION,
    BOTTLENECK_FROM,
    COLORS,
    RESNET_BLOCKS,
    STEM_FEATURES,
)
from hpctrain.spec.model import ModelSpec

# Family -> `model_type` of a config.json.
MODEL_TYPES = {
    "gpt": "gpt2",
    "llama": "llama",
    "bert": "bert",
    "distilbert": "distilbert",
    "vit": "vit",
    "resnet": "resnet",
}
# Names in transformers/activations.py; `gelu` is the exact one there.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "squared_relu": "relu2",
    "swiglu": "silu",
}

# Field of `model`, its name in config.json, and transformers' default where that has none
# (configuration_*.py).
Name = tuple[str, str, Any]
_ENCODER: tuple[Name, ...] = (
    ("layers", "num_hidden_layers", 12),
    ("hidden", "hidden_size", 768),
    ("heads", "num_attention_heads", 12),
    ("ffn", "intermediate_size", 3072),
    ("activation", "hidden_act", "gelu"),
    ("norm_epsilon", "layer_norm_eps", 1e-12),
)
# A ResNet has none of these.
NAMES: Mapping[str, tuple[Name, ...]] = {
    "gpt": (
        ("layers", "n_layer", 12),
        ("hidden", "n_embd", 768),
        ("heads", "n_head", 12),
        ("ffn", "n_inner", None),
        ("vocab", "vocab_size", 50257),
        ("seq", "n_positions", 1024),
        ("activation", "activation_function", "gelu_new"),
        ("norm_epsilon", "layer_norm_epsilon", 1e-5),
        ("tied", "tie_word_embeddings", True),
    ),
    "llama": (
        ("layers", "num_hidden_layers", 32),
        ("hidden", "hidden_size", 4096),
        ("heads", "num_attention_heads", 32),
        ("kv_heads", "num_key_value_heads", None),
        ("head_dim", "head_dim", None),
        ("ffn", "intermediate_size", 11008),
        ("vocab", "vocab_size", 32000),
        ("seq", "max_position_embeddings", 2048),
        ("activation", "hidden_act", "silu"),
        ("norm_epsilon", "rms_norm_eps", 1e-6),
        ("rope_base", "rope_parameters", None),
        ("tied", "tie_word_embeddings", False),
        ("bias", "attention_bias", False),
    ),
    "bert": (
        ("vocab", "vocab_size", 30522),
        ("seq", "max_position_embeddings", 512),
        ("tied", "tie_word_embeddings", True),
        *_ENCODER,
    ),
    "distilbert": (
        ("layers", "n_layers", 6),
        ("hidden", "dim", 768),
        ("heads", "n_heads", 12),
        ("ffn", "hidden_dim", 3072),
        ("vocab", "vocab_size", 30522),
        ("seq", "max_position_embeddings", 512),
        ("activation", "activation", "gelu"),
        ("tied", "tie_word_embeddings", True),
    ),
    "vit": (
        ("image", "image_size", 224),
        ("patch", "patch_size", 16),
        ("bias", "qkv_bias", True),
        *_ENCODER,
    ),
}
# Field of the spec -> property with its value, also where that follows from other fields.
_EFFECTIVE = {"ffn": "ffn_size", "kv_heads": "key_value_heads", "head_dim": "head_size"}
_HIDDEN_AND_ATTENTION = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DROPOUTS: dict[str, tuple[str, ...]] = {
    "gpt": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": _HIDDEN_AND_ATTENTION,
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    "vit": _HIDDEN_AND_ATTENTION,
    "resnet": (),
}

Settings = dict[str, object]


def effective(model: ModelSpec, field: str) -> Any:
    """Read a field of `model`, also where its value follows from other fields."""
    return getattr(model, _EFFECTIVE.get(field, field))


def settings_of(model: ModelSpec) -> Settings:
    """List keyword arguments of the family's configuration class."""
    if model.family == "resnet":
        # as torchvision does ("v1.5": a bottleneck strides in its 3x3 layer)
        bottleneck = model.layers >= BOTTLENECK_FROM
        expansion = BOTTLENECK_EXPANSION if bottleneck else 1
        return dict(
            num_channels=COLORS,
            embedding_size=STEM_FEATURES,
            hidden_sizes=[STEM_FEATURES * 2**stage * expansion for stage in range(4)],
            depths=list(RESNET_BLOCKS[model.layers]),
            layer_type="bottleneck" if bottleneck else "basic",
            downsample_in_bottleneck=False,
            downsample_in_first_stage=False,
            **fresh_settings(model),
        )
    settings: Settings = {name: effective(model, field) for field, name, _ in NAMES[model.family]}
    for field, name, _ in NAMES[model.family]:
        if field == "activation":
            settings[name] = ACTIVATIONS[str(model.activation)]
        elif field == "rope_base":
            settings[name] = {"rope_type": "default", "rope_theta": float(model.rope_base)}
    if model.family == "llama":
        settings["mlp_bias"] = model.bias
    if not model.reads_images:
        # the data already contains begin, end and padding tokens
        settings |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return {**settings, **fresh_settings(model)}


def fresh_settings(model: ModelSpec) -> Settings:
    """List the settings that a run sets itself when it starts from existing weights."""
    names, classes = _DROPOUTS[model.family], classes_of(model)
    labels: Settings = {} if classes is None else {"num_labels": classes}
    return {**dict.fromkeys(names, model.dropout), **labels}


def classes_of(model: ModelSpec) -> int | None:
    """Count the outputs of a classifier; None for a language model."""
    return model.vocab if model.reads_images else model.classes


# -- Read a `config.json` as the fields of `model`, and compare it with a spec -------------------

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
        # the number of layers; a spec cannot express a network of other widths
        bottleneck = config.get("layer_type", "bottleneck") == "bottleneck"
        expansion = BOTTLENECK_EXPANSION if bottleneck else 1
        widths = [STEM_FEATURES * 2**stage * expansion for stage in range(4)]
        usual = list(config.get("hidden_sizes", [256, 512, 1024, 2048])) == widths
        depths = tuple(config.get("depths", (3, 4, 6, 3)))
        for layers, blocks in RESNET_BLOCKS.items():
            if usual and blocks == depths and bottleneck == (layers >= BOTTLENECK_FROM):
                return {"family": family, "layers": layers}
        other = Inexpressible(f"of blocks {list(depths)} and other widths")
        return {"family": family, "layers": other}
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
