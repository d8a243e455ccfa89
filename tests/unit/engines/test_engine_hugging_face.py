"""Shapes as Hugging Face's settings, and somebody's config.json beside a spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.engines.conversion import (
    conversion_config,
    shape_described,
    unconvertible,
    unexportable,
)
from hpctrain.spec.families import family_named, family_of, read_config
from hpctrain.spec.families.settings import disagreements, settings_of
from hpctrain.spec.model import ModelSpec

TEXT: dict[str, Any] = dict(layers=2, hidden=64, heads=4, vocab=100, seq=32)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": dict(TEXT, family="gpt", activation="gelu_tanh", dropout=0.1),
    "llama": dict(TEXT, family="llama", ffn=128, kv_heads=2, head_dim=32, rope_base=500000),
    "bert": dict(TEXT, family="bert", norm_epsilon=1e-6),
    "distilbert": dict(TEXT, family="distilbert", ffn=128),
    "vit": dict(family="vit", layers=2, hidden=64, heads=4, vocab=10, image=32, patch=8),
    "resnet": dict(family="resnet", layers=50, vocab=10),
}


def config_json(family: str, **changes: Any) -> tuple[ModelSpec, dict[str, Any]]:
    model = ModelSpec.model_validate(SHAPES[family])
    return model, {"model_type": type_of(family), **settings_of(model), **changes}


def type_of(name: str) -> str:
    family = family_named(name)
    assert family is not None
    return family.model_types[0]


def described(config: dict[str, Any]) -> dict[str, Any]:
    family = family_of(config)
    assert family is not None
    return read_config(config, family).fields


@pytest.mark.parametrize("family", SHAPES)
def test_a_config_of_our_own_agrees(family: str) -> None:
    model, config = config_json(family)
    assert disagreements(model, config) == []
    assert described(config)["layers"] == model.layers


# What transformers 4 wrote, and what openai-community/gpt2 and meta-llama's directories leave out.
OLD_LLAMA = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
    intermediate_size=128, vocab_size=100, max_position_embeddings=64, rms_norm_eps=1e-5,
    hidden_act="silu", rope_theta=500000.0,
)  # fmt: skip
OLD_GPT2 = dict(
    model_type="gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32, n_ctx=32
)


def test_configs_of_older_releases_agree() -> None:
    llama = ModelSpec.model_validate(dict(TEXT, family="llama", ffn=128, rope_base=500000))
    assert disagreements(llama, OLD_LLAMA) == []
    gpt = ModelSpec.model_validate(dict(TEXT, family="gpt", activation="gelu_tanh"))
    assert disagreements(gpt, OLD_GPT2) == []


_LARGE = dict(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
_ACTIVE = dict(intermediate_size=4096, hidden_act="gelu_new", layer_norm_eps=1e-6)
_ENCODER = dict(
    layers=24, hidden=1024, heads=16, ffn=4096, activation="gelu_tanh", norm_epsilon=1e-6
)
# Names as transformers writes them (configuration_*.py), no value as by default.
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": (
        dict(_LARGE, **_ACTIVE, vocab_size=28996, max_position_embeddings=256),
        dict(_ENCODER, vocab=28996, max_seq=256),
    ),
    "distilbert": (
        dict(dim=384, n_layers=3, n_heads=6, hidden_dim=1536, activation="gelu_new"),
        dict(layers=3, hidden=384, heads=6, ffn=1536, activation="gelu_tanh"),
    ),
    "vit": (
        dict(_LARGE, **_ACTIVE, image_size=384, patch_size=32),
        dict(_ENCODER, image=384, patch=32),
    ),
    "gpt": (dict(n_inner=5000, layer_norm_epsilon=1e-6), dict(ffn=5000, norm_epsilon=1e-6)),
    "llama": (
        dict(head_dim=64, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        dict(head_dim=64, bias=True, tied=True),
    ),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_settings_are_read_by_the_names_of_transformers(family: str) -> None:
    written, expected = WRITTEN[family]
    read = described({"model_type": type_of(family), **written})
    assert {field: read[field] for field in expected} == expected


DIFFERENT: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", dict(n_layer=3), "layers is 2 in the spec and 3 in config.json"),
    ("gpt", dict(n_inner=None, n_embd=128), "hidden is 64 in the spec and 128 in config.json"),
    ("gpt", dict(activation_function="relu"), "activation is gelu_tanh in the spec and relu in"),
    ("gpt", dict(tie_word_embeddings=False), "tied is True in the spec and False in config.json"),
    ("gpt", dict(n_positions=16), "seq is 32 in the spec, config.json has 16 positions"),
    ("llama", dict(num_key_value_heads=4), "kv_heads is 2 in the spec and 4 in config.json"),
    ("llama", dict(rope_parameters=dict(rope_theta=1e4)), "rope_base is 500000.0 in the spec and"),
    ("llama", dict(mlp_bias=True), "bias is False in the spec and mlp in config.json"),
    ("llama", dict(rms_norm_eps=1e-6), "norm_epsilon is 1e-05 in the spec and 1e-06 in config"),
    ("bert", dict(vocab_size=99), "vocab is 100 in the spec and 99 in config.json"),
    ("distilbert", dict(hidden_dim=256), "ffn is 128 in the spec and 256 in config.json"),
    ("vit", dict(patch_size=16), "patch is 8 in the spec and 16 in config.json"),
    ("resnet", dict(depths=[3, 4, 23, 3]), "layers is 50 in the spec and 101 in config.json"),
    ("resnet", dict(hidden_sizes=[1, 2, 3, 4]), "hidden_sizes is [1, 2, 3, 4], and"),
    ("gpt", dict(model_type="bort"), "`model_type`: hpctrain does not know models of type"),
    (
        "gpt",
        dict(model_type="whisper"),
        '`model_type`: hpctrain does not know models of type "whisper"',
    ),
    ("gpt", dict(model_type="bert"), "family is gpt in the spec, the directory has a bert"),
    ("gpt", dict(model_type="mistral"), "family is gpt in the spec, the directory has a mistral"),
]


@pytest.mark.parametrize(("family", "changes", "words"), DIFFERENT)
def test_a_field_that_differs_is_named(family: str, changes: dict[str, Any], words: str) -> None:
    found = disagreements(*config_json(family, **changes))
    assert any(line.startswith(words) for line in found), found


def test_layers_that_are_all_alike_are_no_pattern_of_the_family() -> None:
    """Gemma 3 has windows, unless its file says that no layer has one."""
    kinds = ["full_attention"] * 6
    model = shape_described({"model_type": "gemma3_text", "num_hidden_layers": 6})
    assert model.mixer(0) == "window"
    alike = dict(model_type="gemma3_text", num_hidden_layers=6, layer_types=kinds)
    assert {shape_described(alike).mixer(layer) for layer in range(6)} == {"full"}


def test_what_a_run_may_choose_differs_in_silence() -> None:
    model, config = config_json("bert", max_position_embeddings=512)
    assert disagreements(model.model_copy(update={"dropout": 0.1, "classes": 5}), config) == []


def test_weights_may_be_trained_on_with_another_loss_of_the_router() -> None:
    family = family_named("mixtral")
    assert family is not None
    config = json.loads(Path(__file__).parents[2].joinpath("families", "mixtral.json").read_text())
    fields = {**read_config(config, family).fields, "seq": 16}
    model = ModelSpec.model_validate(fields)
    assert model.moe is not None
    other = model.moe.model_copy(update={"balance_loss": 0.5, "z_loss": 0.001})
    assert disagreements(model.model_copy(update={"moe": other}), config) == []
    narrow = model.moe.model_copy(update={"top_k": 1})
    assert len(disagreements(model.model_copy(update={"moe": narrow}), config)) == 1


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {}, "model_type is bert, of which no weights are known"),
    ("apertus", {}, "activation: it has no xielu"),
    ("falcon", dict(alibi=True), "positions: slopes are added to scaled scores"),
    ("llama", dict(attention_gates=8), "attention_gates is 8, which nobody here knows"),
    ("gpt", dict(scale_attn_weights=False), "scale_attn_weights is false, trained here is true"),
    ("gpt", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is true"),
]
CONFIGS = Path(__file__).parents[2] / "families"


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_what_megatron_core_would_compute_otherwise_is_refused(
    family: str, changes: dict[str, Any], words: str
) -> None:
    (found,) = unconvertible(json.loads((CONFIGS / f"{family}.json").read_text()) | changes)
    assert words in found


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_shape_survives_every_translation(family: str) -> None:
    model, config = config_json(family)
    assert unconvertible(config) == []
    wanted = model.model_copy(update={"dropout": 0.0})
    assert settings_of(shape_described(config)) == settings_of(wanted)
    built = conversion_config(wanted, half=False).model
    assert settings_of(built) == settings_of(wanted) and built.family == family


def test_what_no_class_has_cannot_be_exported() -> None:
    """Layers that predict are in published files, though in no class."""
    bert, _ = config_json("bert")
    assert unexportable(bert) == ["no weights of BERT are known"]
    predicting = shape_described(json.loads((CONFIGS / "deepseek_v3.json").read_text()))
    assert predicting.mtp_layers == 1 and unexportable(predicting) == []
    llama, _ = config_json("llama")
    (found,) = unexportable(llama.model_copy(update={"logit_scale": 2.0}))
    assert "logit_scale" in found
