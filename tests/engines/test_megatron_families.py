"""Families of models on megatron-core: parameters of the record, and losses of any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trial_runs import EP2, GPT, TP2, MakeTrial, apart, assert_near, assert_resumes_exactly, trained
from variants import varied

from hpctrain.convert import megatron_checkpoint
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.plan.abilities.trainable_megatron import missing_parts
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.spec.families import family_named, read_config
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.megatron.model import draw_weights

FILES = sorted((Path(__file__).parents[1] / "families").glob("*.json"))
LENGTH = 32
# What is not megatron-core's, and why: fields of `model`.
LACKING = {
    "apertus": {"activation"},
    "bamba": {"pattern"},
    "bart": {"encoder_layers"},
    "blenderbot": {"encoder_layers"},
    "camembert": {"family"},
    "data2vec_text": {"family"},
    "deepseek_v2": {"moe.groups"},
    "distilbert": {"family"},
    "ernie": {"family"},
    "ernie4_5_moe": {"moe.expert_bias"},
    "granitemoehybrid": {"pattern"},
    "hunyuan_v1_dense": {"attention.qk_norm"},
    "hunyuan_v1_moe": {"attention.qk_norm"},
    "llama4": {"attention.chunk", "attention.qk_norm", "moe.normalize"},
    "mamba2": {"pattern", "single_blocks"},
    "mbart": {"encoder_layers"},
    "megatron_bert": {"family"},
    "minicpm3": {"rope.interleaved"},
    "minimax": {"pattern"},
    "mt5": {"encoder_layers"},
    "nemotron_h": {"pattern", "single_blocks"},
    "openai_gpt": {"norm_place"},
    "phimoe": {"moe.jitter", "moe.score"},
    "plbart": {"encoder_layers"},
    "qwen3_5": {"pattern"},
    "qwen3_5_moe": {"pattern"},
    "qwen3_next": {"pattern"},
    "roberta": {"family"},
    "roberta_prelayernorm": {"family"},
    "t5": {"encoder_layers"},
    "umt5": {"encoder_layers"},
    "xlm_roberta_xl": {"family"},
}


def record_of(name: str, **changes: Any) -> ModelSpec:
    family = family_named(name)
    assert family is not None
    fields = read_config(json.loads((FILES[0].parent / f"{name}.json").read_text()), family).fields
    return ModelSpec.model_validate({**fields, "seq": LENGTH, **changes})


TEXTS = [file.stem for file in FILES if file.stem not in ("vit", "resnet")]
BUILT = [
    name for name in TEXTS if LACKING.get(name, set()) <= {"moe.groups"} and name != "bert"
]  # groups are chosen in another way, of the same weights


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_lacking_is_named(name: str) -> None:
    assert {field for field, _ in missing_parts(record_of(name))} == LACKING.get(name, set())


def test_what_a_value_lacks_is_named() -> None:
    moe = record_of("mixtral").moe
    assert moe is not None
    noisy = record_of("mixtral", moe={**moe.model_dump(exclude_none=True), "jitter": 0.01})
    assert {field for field, _ in missing_parts(noisy)} == {"moe.jitter"}
    long = record_of("llama4", seq=8192)
    assert {field for field, _ in missing_parts(long)} == LACKING["llama4"] | {"seq"}


@pytest.mark.parametrize("name", varied(BUILT, "cohere", "gemma3"))
def test_the_model_has_the_parameters_of_the_record(name: str) -> None:
    apart(build_and_train_one, name)


def build_and_train_one(name: str) -> None:
    """In a process of its own: megatron-core's losses of experts are as long as one model."""
    model = record_of(name)
    with megatron_checkpoint.one_rank():
        chunk = megatron_checkpoint.build(model, torch.float32, on_meta=False)
        draw_weights(7, [chunk])
        assert sum(one.numel() for one in chunk.parameters()) == total_parameters(model)
        tokens = torch.randint(model.vocab, (2, LENGTH))
        places = torch.arange(LENGTH).expand(2, LENGTH)
        losses = chunk(tokens, places, None, labels=tokens)
        losses.mean().backward()
    assert losses.isfinite().all()
    wrong = [
        one
        for one, weight in chunk.named_parameters()
        if weight.grad is None or not weight.grad.isfinite().all()
    ]
    assert wrong == []


# -- Layouts -------------------------------------------------------------------------------------

SP = {**TP2, "sequence_parallel": True}
PP2 = dict(pipeline_model_parallel_size=2, pipeline_layer_split=((3,), (3,)))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": TP2,
    "tp2 sp": SP,
    "pp2": PP2,
    "ep2": {**EP2, "data_parallel_size": 2},
}


def base_of(name: str) -> dict[str, Any]:
    """A tiny run of a family, with a few samples for each step."""
    plain = MegatronConfig(**GPT).model_dump(mode="json", exclude={"model"})
    model = record_of(name, dropout=0.0)
    sizes = dict(vocab_size=model.vocab, padded_vocab_size=model.vocab, seq_length=LENGTH)
    return {
        **plain, **sizes, "model": model.model_dump(mode="json", exclude={"config"}),
        "pipeline_layer_split": [[model.layers]], "train_steps": 3, "lr_decay_steps": 3,
        "global_batch_size": 4, "micro_batch_size": 2,
    }  # fmt: skip


def layouts_of(name: str) -> list[str]:
    if record_of(name).moe is None:
        return ["tp2", "tp2 sp", "pp2"]
    return ["ep2", "pp2"] if record_of(name).mlp_bias else ["ep2", "tp2 sp", "pp2"]


CASES = {f"{name}, {layout}": (name, layout) for name in BUILT for layout in layouts_of(name)}


@pytest.mark.parametrize("case", varied(CASES, "deepseek_v3, tp2 sp"))
def test_a_layout_equals_one_process(case: str, trial: MakeTrial) -> None:
    name, layout = CASES[case]
    base = base_of(name)
    split = trial(base, **LAYOUTS[layout])
    assert set(split.train()) == {0}
    # without norms before a layer gradients have norms of about ten
    assert_near(split, trained(base, micro_batch_size=2), 1, norm=1e-4)


@pytest.mark.parametrize("name", varied(BUILT, "deepseek_v3"))
def test_a_run_resumes_exactly(name: str, trial: MakeTrial) -> None:
    base = base_of(name)
    assert_resumes_exactly(trial(base), trained(base, micro_batch_size=2), 2)
