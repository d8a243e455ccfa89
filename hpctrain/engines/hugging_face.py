"""Translate the `model` section of a spec into the settings of Hugging Face's configuration class.

`settings_of` gives the keyword arguments of GPT2Config, LlamaConfig and so on, with the names of
`config.json` (transformers 5). Belongs here: these names. Does not belong here: transformers (see
`hpctrain.train.engines.models`), reading them back (see `described`), models that the classes
cannot represent (`hpctrain.plan.abilities.representable_hugging_face`).
"""

from __future__ import annotations

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

Settings = dict[str, object]


def settings_of(model: ModelSpec) -> Settings:
    """List keyword arguments of the family's configuration class."""
    return {**_SETTINGS[model.family](model), **fresh_settings(model)}


def fresh_settings(model: ModelSpec) -> Settings:
    """List the settings that a run sets itself when it starts from existing weights."""
    names, classes = _DROPOUTS[model.family], classes_of(model)
    labels: Settings = {} if classes is None else {"num_labels": classes}
    return {**dict.fromkeys(names, model.dropout), **labels}


def classes_of(model: ModelSpec) -> int | None:
    """Count the outputs of a classifier; None for a language model."""
    return model.vocab if model.reads_images else model.classes


# The data already contains begin, end and padding tokens.
_NO_SPECIAL_TOKENS: Settings = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def _gpt2(model: ModelSpec) -> Settings:
    return dict(
        vocab_size=model.vocab,
        n_positions=model.seq,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn_size,
        activation_function=ACTIVATIONS[str(model.activation)],
        layer_norm_epsilon=model.norm_epsilon,
        tie_word_embeddings=bool(model.tied),
        **_NO_SPECIAL_TOKENS,
    )


def _llama(model: ModelSpec) -> Settings:
    return dict(
        vocab_size=model.vocab,
        max_position_embeddings=model.seq,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_size,
        intermediate_size=model.ffn_size,
        hidden_act=ACTIVATIONS[str(model.activation)],
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rope_base)},
        tie_word_embeddings=bool(model.tied),
        attention_bias=bool(model.bias),
        mlp_bias=bool(model.bias),
        **_NO_SPECIAL_TOKENS,
    )


def _bert(model: ModelSpec) -> Settings:
    return dict(
        vocab_size=model.vocab,
        max_position_embeddings=model.seq,
        tie_word_embeddings=bool(model.tied),
        **_encoder(model),
        **_NO_SPECIAL_TOKENS,
    )


def _distilbert(model: ModelSpec) -> Settings:
    return dict(
        vocab_size=model.vocab,
        max_position_embeddings=model.seq,
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        hidden_dim=model.ffn_size,
        activation=ACTIVATIONS[str(model.activation)],
        tie_word_embeddings=bool(model.tied),
        **_NO_SPECIAL_TOKENS,
    )


def _vit(model: ModelSpec) -> Settings:
    return dict(image_size=model.image, patch_size=model.patch, qkv_bias=True, **_encoder(model))


def _encoder(model: ModelSpec) -> Settings:
    return dict(
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.ffn_size,
        hidden_act=ACTIVATIONS[str(model.activation)],
        layer_norm_eps=model.norm_epsilon,
    )


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


_SETTINGS = {
    "gpt": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "distilbert": _distilbert,
    "vit": _vit,
    "resnet": _resnet,
}
_HIDDEN_AND_ATTENTION = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DROPOUTS: dict[str, tuple[str, ...]] = {
    "gpt": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": _HIDDEN_AND_ATTENTION,
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    "vit": _HIDDEN_AND_ATTENTION,
    "resnet": (),
}
