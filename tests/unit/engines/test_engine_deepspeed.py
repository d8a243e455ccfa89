"""What the trainer and DeepSpeed are told, for one spec and what can be changed in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned_job import planned_job

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.engines.train_json import parse_train_config, train_config
from hpctrain.plan.documents import Plan
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

ROOT = Path(__file__).resolve().parents[3]
PLAIN = ("engine.name=deepspeed", "recompute=none", "optimizer.zero=1")


def plan_of(*overrides: str) -> Plan:
    spec = load_run_spec(ROOT / "examples" / "llama7b.yaml", (*PLAIN, *overrides)).document
    return make_plan(spec, load_profile(find_profile("a100x64")).document)


def told(*overrides: str, example: str = "llama7b", profile: str = "a100x64") -> DeepSpeedConfig:
    spec = load_run_spec(ROOT / "examples" / f"{example}.yaml", (*PLAIN, *overrides)).document
    site = load_profile(find_profile(profile)).document
    config = train_config(planned_job(spec, site))
    assert isinstance(config, DeepSpeedConfig)
    return config


def zero_of(*overrides: str) -> dict[str, Any]:
    return dict(ds_config(told(*overrides))["zero_optimization"])


def test_the_batch_is_the_plan_s() -> None:
    config = told()
    settings = ds_config(config)
    micro, accumulation = (
        settings["train_micro_batch_size_per_gpu"],
        settings["gradient_accumulation_steps"],
    )
    assert settings["train_batch_size"] == micro * accumulation * config.data_parallel_size
    assert config.world_size == config.data_parallel_size


def test_precision_and_sums() -> None:
    half = ds_config(told())
    assert half["bf16"] == {"enabled": True}
    assert half["data_types"] == {"grad_accum_dtype": "fp32"}, "microbatches add up in fp32"
    assert "communication_data_type" not in half
    sums = ds_config(told("engine.deepspeed.reduce_precision=fp32"))
    assert sums["communication_data_type"] == "fp32"
    full = ds_config(told("precision=fp32", "recompute=full"))
    assert "bf16" not in full and "data_types" not in full


def test_buckets_are_bytes_in_the_spec_and_elements_for_deepspeed() -> None:
    zero = zero_of("engine.deepspeed.reduce_bucket=100MB", "engine.deepspeed.gather_bucket=50MB")
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (50_000_000, 25_000_000)
    assert "stage3_prefetch_bucket_size" not in zero
    ahead = zero_of("optimizer.zero=3", "engine.deepspeed.gather_bucket=50MB")
    assert ahead["stage3_prefetch_bucket_size"] == 25_000_000
    assert ahead["stage3_param_persistence_threshold"] == 40960, "norms of a 4096 wide model"
    assert "allgather_bucket_size" not in ahead


def test_overlap_is_the_spec_s() -> None:
    assert zero_of()["overlap_comm"]
    assert not zero_of("optimizer.overlap_grad_reduce=false")["overlap_comm"]
    assert not zero_of("parallel.pp=2")["overlap_comm"], "DeepSpeed would leave it out and say so"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_on_the_host(stage: int) -> None:
    config = told(f"optimizer.zero={stage}", "optimizer.offload=cpu")
    assert ds_config(config)["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
    }
    assert not config.torch_adam, "DeepSpeed's own Adam is for this"
    assert told("optimizer.offload=cpu", "engine.deepspeed.adam=torch").torch_adam
    assert told().torch_adam, "without offload no compiler is needed"


def test_state_and_weights_on_nvme() -> None:
    nvme = (
        "optimizer.zero=3",
        "optimizer.offload=nvme",
        "engine.deepspeed.offload_parameters=nvme",
        "engine.deepspeed.nvme_path=/local/nvme",
    )
    zero = zero_of(*nvme)
    assert zero["offload_optimizer"]["nvme_path"] == "/local/nvme/hpctrain-llama7b", "not shared"
    assert zero["offload_param"]["buffer_size"] == 100_000_000
    few = told(*nvme, "resources.gpus=1")
    assert ds_config(few)["zero_optimization"]["offload_param"]["buffer_size"] == 32000 * 4096


def test_weights_elsewhere_mean_stage_three() -> None:
    """The planner chooses among the stages where the spec leaves it open."""
    spec = load_run_spec(
        ROOT / "examples" / "llama7b.yaml",
        ("engine.name=deepspeed", "engine.deepspeed.offload_parameters=cpu", "recompute=none"),
    ).document
    plan = make_plan(spec, load_profile(find_profile("a100x64")).document)
    assert plan.zero == 3


def test_weights_split_over_ranks() -> None:
    """Said in DeepSpeed's own words, but behind a pipeline, whose axes it is told all at once."""
    config = told("parallel.tp=4", "resources.gpus=16")
    assert (config.world_size, config.data_parallel_size, config.tensor_parallel) == (16, 4, 4)
    assert config.layout_words == "tp 4 · dp 4 · ZeRO 1"
    assert ds_config(config)["tensor_parallel"]["autotp_size"] == 4
    assert not plan_of("parallel.tp=4").layout.sequence_parallel, "norms are whole on every rank"
    staged = told("parallel.tp=2", "parallel.pp=2", "resources.gpus=16")
    assert staged.layout_words == "tp 2 · pp 2 · dp 4 · ZeRO 1"
    assert "tensor_parallel" not in ds_config(staged)
    assert "tensor_parallel" not in ds_config(told())


def test_memory_of_logits_that_ranks_share() -> None:
    """14 bytes each were counted for a Llama in bf16 at tp 2, and 12 where a rank has them all."""
    for tp, each in ((1, 12), (2, 14)):
        plan = plan_of(f"parallel.tp={tp}")
        logits = plan.batch.micro_batch * 4096 * 32000 // tp
        assert plan.memory[0].logits_bytes == each * logits


def test_adamw() -> None:
    optimizer = ds_config(told())["optimizer"]
    assert optimizer["type"] == "AdamW" and optimizer["params"]["adam_w_mode"]
    assert optimizer["params"]["betas"] == [0.9, 0.95]


def test_stage_zero_has_no_settings_of_zero() -> None:
    config = told("optimizer.zero=0", "precision=fp32", example="gpt-tiny", profile="sandbox")
    assert ds_config(config)["zero_optimization"] == {"stage": 0}


def test_both_documents_survive_their_files() -> None:
    config = told("optimizer.zero=3", "profile.steps=[3, 5]")
    assert parse_train_config(config.model_dump_json()) == config
    assert json.loads(json.dumps(ds_config(config))) == ds_config(config), "plain values only"


def test_a_pipeline_has_the_plan_s_stages() -> None:
    config = told("parallel.pp=2", "resources.gpus=16")
    assert config.pipeline_stages == (16, 16)
    assert (config.data_parallel_size, config.world_size) == (8, 16)
    assert config.layout_words == "pp 2 · dp 8 · ZeRO 1"
    assert not config.pipelines_near
    assert told("parallel.pp=2", "parallel.order=tp-cp-ep-pp-dp").pipelines_near
    assert told().pipeline_stages == ()


def test_a_bucket_is_not_larger_than_the_model() -> None:
    tiny = told("model.layers=1", "model.hidden=64", "model.ffn=64", "model.heads=1")
    assert tiny.reduce_bucket_elements < 10**7
    assert told().reduce_bucket_elements == 200 * 2**20 // 2


def test_layout_in_words() -> None:
    assert told("optimizer.zero=2", "resources.gpus=16").layout_words == "dp 16 · ZeRO 2"
