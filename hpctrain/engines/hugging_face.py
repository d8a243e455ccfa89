"""From a model's shape to the settings of Hugging Face's configuration class, and its file.

`settings_of` gives the keyword arguments of GPT2Config, LlamaConfig and so on, with the names that
`config.json` has (transformers 5). Belongs here: these names. Does not belong here: transformers
(see `hpctrain.train.models`), which shapes its classes cannot have (`hpctrain.plan.representable`).
"""

from __future__ import annotations

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
# Names in transformers/activations.py. `gelu` is exact there and in megatron-core.
ACTIVATIONS = {"gelu": "gelu", "squared_relu": "relu2", "swiglu": "silu"}

Settings = dict[str, object]


def settings_of(model: ModelSpec) -> Settings:
    """Keyword arguments of the family's configuration class."""
    return _SETTINGS[model.family](model)


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
        **_text_dropout(model, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
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
        attention_dropout=0.0,
        **_NO_SPECIAL_TOKENS,
    )


# The data decides what a sample begins and ends with, and what is padding.
_NO_SPECIAL_TOKENS: Settings = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def _text_dropout(model: ModelSpec, *names: str) -> Settings:
    return dict.fromkeys(names, model.dropout)


_SETTINGS = {"gpt": _gpt2, "llama": _llama}
