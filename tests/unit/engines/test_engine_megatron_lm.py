"""The plan as arguments of an external Megatron-LM; what a real one says to them is in
tests/engines/test_megatron_lm_arguments.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
from megatron_lm_cases import CASES, FRESH, RESUMED, Case, given
from planned_job import planned_job

from hpctrain.engines.megatron_lm import MegatronLmConfig, arguments, stage_layout
from hpctrain.engines.train_json import parse_train_config, train_config
from hpctrain.spec.engines.megatron_lm import refusal
from hpctrain.spec.loader import find_profile, load_profile


@pytest.mark.parametrize("name", CASES)
def test_words(name: str) -> None:
    case = CASES[name]
    words = given(case.config(), case.places)
    assert {name: words.get(name) for name in case.words} == case.words
    assert not words.keys() & set(case.without)


def test_settings_of_megatron_core_are_these_arguments_and_no_others() -> None:
    plain, words = (given(CASES[name].config()) for name in ("without settings", "settings"))
    assert words.keys() - plain.keys() == CASES["settings"].words.keys()
    assert plain.keys() <= words.keys()


@pytest.mark.parametrize(
    ("split", "prediction_layers", "layout"),
    [
        (((4, 4), (4, 4)), 0, None),
        (((9,), (8,), (7,)), 0, "E" + "t" * 9 + "|" + "t" * 8 + "|" + "t" * 7 + "L"),
        (((1, 3), (2, 4)), 2, "Et|tt|ttt|ttttmmL"),
    ],
)
def test_stages(split: Any, prediction_layers: int, layout: str | None) -> None:
    """Chunks of all stages first, as pipeline_parallel_layer_layout.py has them."""
    assert stage_layout(split, prediction_layers) == layout


def test_newer_releases_are_told_the_growth_of_a_batch_in_tokens() -> None:
    grows = CASES["grows"].config()
    newest, seq = given(grows, ramps_up=False), grows.seq_length
    stages = f"0:16 {64 * seq}:32 {128 * seq}:48 {176 * seq}:64"
    assert newest["step-batch-size-schedule"] == stages
    assert newest["eval-global-batch-size"] == "64"
    assert not {"rampup-batch-size", "global-batch-size"} & newest.keys()
    plain = given(Case().config())
    assert plain == given(Case().config(), ramps_up=False) and "train-iters" in plain


def test_the_users_own_arguments() -> None:
    """They replace what is only a default; a negative number is no name of another argument."""
    own = {
        "moe-grouped-gemm": True,
        "cuda-graph-modules": ["attn", "mlp"],
        "tokenizer-type": "HF",
        "attention-backend": "flash",
    }
    config = MegatronLmConfig(**{**Case().config().model_dump(), "extra_arguments": own})
    words = given(config)
    assert {name: words[name] for name in own} == {
        "moe-grouped-gemm": "",
        "cuda-graph-modules": "attn mlp",
        "tokenizer-type": "HF",
        "attention-backend": "flash",
    }
    assert "--initial-loss-scale=-1.5" in arguments(CASES["own"].config(), FRESH)


@pytest.mark.parametrize(
    ("name", "field"),
    [("recompute-num-layers", "recompute_layers"), ("rampup-batch-size", "batch.ramp_up")],
)
def test_a_refusal_names_the_field(name: str, field: str) -> None:
    assert refusal(name) == (f"`{field}` decides --{name}", f"remove it, and set `{field}`")


def test_what_is_rendered_cannot_be_given() -> None:
    """All but plain defaults belong to a field or to hpctrain."""
    defaults = {"tokenizer-type", "ckpt-fully-parallel-load", "attention-softmax-in-fp32"}
    defaults |= {"qk-layernorm", "no-rope-fusion"}
    defaults |= {"tp-comm-overlap", "tp-comm-bootstrap-backend"}
    # given, they say the same as their field, or there is none
    defaults |= {"init-method-std", "optimizer", "cp-comm-type", "cross-entropy-loss-fusion"}
    cases = [CASES[name] for name in ("gpt175b", "experts", "latent", "axes", "settings")]
    names = {name for case in cases for name in given(case.config(), RESUMED)}
    free = {name for name in names if refusal(name) is None}
    routing = {name for name in free if re.match(r"moe-(router|aux|token)", name)}
    assert free - routing == defaults


def test_a_trial_without_gpus() -> None:
    words = given(CASES["tiny"].config(), on_cpu=True)
    assert (words["distributed-backend"], words["transformer-impl"]) == ("gloo", "local")


def test_the_document_survives_its_file() -> None:
    document = CASES["gpt175b"].config()
    assert parse_train_config(document.model_dump_json()) == document
    assert document.world_size == 512 and document.layout_words == "tp 8 · pp 8 · dp 8"


def test_the_plan_chooses_the_document() -> None:
    site = load_profile(find_profile("a100x1")).document
    assert isinstance(train_config(planned_job(Case().spec(), site)), MegatronLmConfig)
