"""Translate the `model` section of a spec into the settings of Hugging Face's configuration class.

`settings_of` gives the keyword arguments of GPT2Config, LlamaConfig and so on, with the names of
`config.json` (transformers 5). Belongs here: these names. Does not belong here: transformers (see
`hpctrain.train.engines.models`), reading them back (see `described`), models that the classes
cannot represent (`hpctrain.plan.abilities.trainable_hugging_face`).
"""

from __future__ import annotations

from collections.abc import Mapping
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


def _written(model: ModelSpec, field: str) -> object:
    """Return the value of a field as config.json has it."""
    if field == "activation":
        return ACTIVATIONS[str(model.activation)]
    if field == "rope_base":
        return {"rope_type": "default", "rope_theta": float(model.rope_base)}
    return effective(model, field)


def settings_of(model: ModelSpec) -> Settings:
    """List keyword arguments of the family's configuration class."""
    if model.family == "resnet":
        return {**_resnet(model), **fresh_settings(model)}
    settings: Settings = {name: _written(model, field) for field, name, _ in NAMES[model.family]}
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


def _resnet(model: ModelSpec) -> Settings:
    """Configure a ResNet as torchvision does ("v1.5": a bottleneck strides in its 3x3 layer)."""
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
    )
