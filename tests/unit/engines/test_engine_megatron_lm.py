"""The plan as arguments of an external Megatron-LM; what a real one says to them is in
tests/engines/test_megatron_lm_arguments.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from planned_job import planned_job

from hpctrain.engines.megatron_lm import (
    MegatronLmConfig,
    Places,
    arguments,
    megatron_lm_config,
    stage_layout,
)
from hpctrain.engines.train_json import parse_train_config, train_config
from hpctrain.spec.engines.megatron_lm import refusal
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.run import RunSpec

ROOT = Path(__file__).resolve().parents[3]
FRESH = Places(save="/run/.saving", data_cache="/run/cache")
RESUMED = Places(save="/run/.saving", data_cache="/run/cache", load="/run", load_step=40)
EXPERTS = dict(experts=8, top_k=2, ffn=1024, shared_ffn=2048, dense_layers=1)
LATENT = dict(kv_rank=512, nope_dim=64, rope_dim=32, value_dim=96)


def told(
    example: str = "llama7b", profile: str = "a100x1", **changes: dict[str, Any]
) -> MegatronLmConfig:
    """An example with sections changed, planned for an external Megatron-LM."""
    document = (
        load_run_spec(ROOT / "examples" / f"{example}.yaml", ())
        .document.model_dump(mode="json", by_alias=True)
    )  # fmt: skip
    document["engine"] = {"name": "megatron-lm", "checkout": "/opt/Megatron-LM"}
    for section, values in changes.items():
        before = document[section]
        document[section] = {**before, **values} if isinstance(before, dict) else values
    spec = RunSpec.model_validate(document)
    return megatron_lm_config(planned_job(spec, site(profile)))


def site(profile: str) -> Any:
    return load_profile(find_profile(profile)).document


def given(config: MegatronLmConfig, places: Places = FRESH, **how: bool) -> dict[str, str]:
    """Arguments by name; a switch is empty."""
    found: dict[str, str] = {}
    name = ""
    for word in arguments(config, places, **how):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            assert name not in found, f"{name} twice"
            found[name] = value
        else:
            found[name] = f"{found[name]} {word}".strip()
    return found


def test_a_large_gpt() -> None:
    words = given(told("gpt175b", "a100x64"))
    shape = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length")
    assert [words[name] for name in shape] == ["96", "12288", "49152", "96", "2048"]
    assert (words["tensor-model-parallel-size"], words["pipeline-model-parallel-size"]) == (
        "8",
        "8",
    )
    assert words["num-virtual-stages-per-pipeline-rank"] == "3"
    assert words["data-path"] == "0.8 data/web 0.2 data/books"
    assert words["position-embedding-type"] == "learned_absolute" and "rotary-base" not in words
    switches = {"sequence-parallel", "bf16", "use-distributed-optimizer", "exit-signal-handler"}
    assert {words[name] for name in switches} == {""}
    assert not words.keys() & {"swiglu", "num-experts", "load", "mock-data", "disable-bias-linear"}


def test_a_llama() -> None:
    words = given(told())
    assert {"swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"} <= words.keys()
    assert (words["normalization"], words["rotary-base"]) == ("RMSNorm", "10000")
    assert words["data-path"] == "data/domain", "one source has no weight"
    assert (words["eval-interval"], words["eval-iters"]) == ("200", "8")


def test_resuming_loads_exactly_one_checkpoint() -> None:
    words = given(told(), RESUMED)
    assert (words["load"], words["ckpt-step"]) == ("/run", "40")
    assert "exit-on-missing-checkpoint" in words
    assert not given(told()).keys() & {"load", "ckpt-step", "exit-on-missing-checkpoint"}


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


def test_layouts() -> None:
    config = told(
        parallel=dict(pp=2, order="tp-cp-ep-pp-dp", stages=(17, 15)),
        resources=dict(gpus=8),
    )
    words = given(config)
    assert words["pipeline-model-parallel-layout"].count("t") == 32
    assert "num-virtual-stages-per-pipeline-rank" not in words
    assert "use-tp-pp-dp-mapping" in words and words["context-parallel-size"] == "1"


def test_experts_latent_attention_and_prediction() -> None:
    words = given(told(parallel=dict(tp=2, ep=4), model=dict(moe=EXPERTS, layers=4)))
    assert (words["num-experts"], words["moe-layer-freq"]) == ("8", "([0]*1+[1]*3)")
    assert (words["expert-model-parallel-size"], words["expert-tensor-parallel-size"]) == ("4", "1")
    words = given(told(model=dict(mla=LATENT, layers=4, mtp_layers=1)))
    assert (words["kv-lora-rank"], words["mtp-num-layers"]) == ("512", "1")
    assert not words.keys() & {"kv-channels", "q-lora-rank", "group-query-attention"}


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ("none", {}),
        (
            "full",
            {
                "recompute-granularity": "full",
                "recompute-method": "uniform",
                "recompute-num-layers": "1",
            },
        ),
        ("selective", {"recompute-granularity": "selective", "recompute-modules": "core_attn"}),
    ],
)
def test_recompute(recompute: Any, words: dict[str, str]) -> None:
    found = given(told(profile="a100x64", recompute=recompute, resources=dict(gpus=64)))
    assert {name: value for name, value in found.items() if name.startswith("recompute")} == words


def test_recomputing_some_layers_is_the_block_method() -> None:
    wanted = dict(recompute="full", recompute_layers=2)
    found = given(told(profile="a100x64", **wanted, resources=dict(gpus=64)))
    assert found["recompute-method"] == "block" and found["recompute-num-layers"] == "2"
    assert refusal("recompute-num-layers") == (
        "`recompute_layers` decides --recompute-num-layers",
        "remove it, and set `recompute_layers`",
    )


def test_state_of_the_optimizer_on_the_cpu() -> None:
    words = given(told(optimizer=dict(offload="cpu"), parallel=dict(tp=2)))
    assert {"optimizer-cpu-offload", "use-precision-aware-optimizer"} <= words.keys()


SETTINGS: dict[str, Any] = dict(
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="fp8",
    main_params_dtype="fp16",
    grad_reduce_in_fp32=False,
    num_distributed_optimizer_instances=2,
    hierarchical_context_parallel_sizes=[2, 2],
    attention_backend="fused",
    calculate_per_token_loss=True,
    cross_entropy_loss_fusion=True,
)


def test_settings_of_megatron_core_are_arguments() -> None:
    plain = given(told(parallel=dict(tp=2, cp=4)))
    words = given(told(parallel=dict(tp=2, cp=4), engine=dict(megatron=SETTINGS)))
    assert {name: value for name, value in words.items() if name not in plain} == {
        "use-precision-aware-optimizer": "",
        "exp-avg-dtype": "bf16",
        "exp-avg-sq-dtype": "fp8",
        "main-params-dtype": "fp16",
        "main-grads-dtype": "bf16",
        "grad-reduce-in-bf16": "",
        "num-distributed-optimizer-instances": "2",
        "hierarchical-context-parallel-sizes": "2 2",
        "cp-comm-type": "a2a+p2p",
        "attention-backend": "fused",
        "calculate-per-token-loss": "",
        "cross-entropy-loss-fusion": "",
    }
    assert plain.keys() <= words.keys()


def test_muon_has_its_momentum_and_no_distributed_optimizer() -> None:
    words = given(told(optimizer=dict(kind="muon", momentum=0.9), parallel=dict(tp=8)))
    assert (words["optimizer"], words["muon-momentum"]) == ("muon", "0.9")
    assert not words.keys() & {"use-distributed-optimizer", "overlap-param-gather"}
    assert "muon-momentum" not in given(told())


def test_without_data_and_evaluation() -> None:
    words = given(
        told("gpt-tiny", "sandbox", data=dict(sources=()), evaluation=dict(every_steps=None))
    )
    assert "mock-data" in words and not words.keys() & {"data-path", "split"}
    assert words["eval-iters"] == "0"


def test_batches_that_grow_are_counted_in_samples() -> None:
    batch = {"global": 64, "ramp_up": dict(start=16, increment=16, samples=150)}
    schedule = dict(warmup_steps=5, style="wsd", wsd_decay_steps=2)
    grows = told(batch=batch, budget={"steps": 12, "tokens": None}, schedule=schedule)
    words, newest = given(grows), given(grows, ramps_up=False)
    assert words["rampup-batch-size"] == "16 16 150" and words["global-batch-size"] == "64"
    assert [words[f"{name}-samples"] for name in ("train", "lr-decay", "lr-warmup")] == [
        *[str(176 + 5 * 64)] * 2,
        str(4 * 16 + 32),
    ]
    assert words["lr-wsd-decay-samples"] == "128"
    assert not {"train-iters", "lr-decay-iters", "lr-warmup-iters"} & words.keys()
    seq = grows.seq_length
    stages = f"0:16 {64 * seq}:32 {128 * seq}:48 {176 * seq}:64"
    assert newest["step-batch-size-schedule"] == stages
    assert newest["eval-global-batch-size"] == "64"
    assert not {"rampup-batch-size", "global-batch-size"} & newest.keys()
    plain = given(told())
    assert plain == given(told(), ramps_up=False) and "train-iters" in plain
    assert refusal("rampup-batch-size") == (
        "`batch.ramp_up` decides --rampup-batch-size",
        "remove it, and set `batch.ramp_up`",
    )


def test_the_users_own_arguments() -> None:
    """They come last, and in the place of what is only a default."""
    own = {
        "attention-backend": "flash",
        "moe-grouped-gemm": True,
        "cuda-graph-modules": ["attn", "mlp"],
        "tokenizer-type": "HuggingFaceTokenizer",
        "initial-loss-scale": -1.5,
    }
    document = told().model_dump()
    config = MegatronLmConfig(**{**document, "extra_arguments": own})
    words = given(config)
    assert words["tokenizer-type"] == "HuggingFaceTokenizer"
    assert (words["attention-backend"], words["moe-grouped-gemm"]) == ("flash", "")
    assert words["cuda-graph-modules"] == "attn mlp"
    assert "--initial-loss-scale=-1.5" in arguments(config, FRESH), "no name of another argument"


def test_what_is_rendered_cannot_be_given() -> None:
    """All but plain defaults belong to a field or to hpctrain."""
    defaults = {"tokenizer-type", "ckpt-fully-parallel-load", "attention-softmax-in-fp32"}
    defaults |= {"qk-layernorm", "no-rope-fusion"}
    # given, they say the same as their field, or there is none
    defaults |= {"init-method-std", "optimizer", "cp-comm-type", "cross-entropy-loss-fusion"}
    configs = [
        told("gpt175b", "a100x64"),
        told(parallel=dict(tp=2, ep=4), model=dict(moe=EXPERTS, layers=4)),
        told(model=dict(mla=LATENT, layers=4, mtp_layers=1)),
        told(optimizer=dict(offload="cpu"), parallel=dict(tp=2)),
        told(parallel=dict(tp=2, cp=4), engine=dict(megatron=SETTINGS)),
    ]
    names = {name for config in configs for name in given(config, RESUMED)}
    free = {name for name in names if refusal(name) is None}
    routing = {name for name in free if re.match(r"moe-(router|aux|token)", name)}
    assert free - routing == defaults


def test_every_step_is_printed() -> None:
    """Megatron-LM's words are its only sign of life; the log gets as many as the spec says."""
    assert given(told(logging=dict(every_steps=100)))["log-interval"] == "1"


def test_a_trial_without_gpus() -> None:
    words = given(told("gpt-tiny", "sandbox"), on_cpu=True)
    assert (words["distributed-backend"], words["transformer-impl"]) == ("gloo", "local")


def test_the_document_survives_its_file() -> None:
    document = told("gpt175b", "a100x64")
    assert parse_train_config(document.model_dump_json()) == document
    assert document.world_size == 512 and document.layout_words == "tp 8 · pp 8 · dp 8"


def test_the_plan_chooses_the_document() -> None:
    spec = load_run_spec(
        ROOT / "examples" / "llama7b.yaml",
        ("engine.name=megatron-lm", "engine.checkout=/opt/Megatron-LM"),
    ).document
    assert isinstance(train_config(planned_job(spec, site("a100x1"))), MegatronLmConfig)
