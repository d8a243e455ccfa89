"""Planning a service from its files: the model, a trace, what the site has measured, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from service_specimens import CHAT_70B, LLAMA_8B, SMALL, service_spec, weights

from hpctrain.base.errors import DoesNotFitError, InvalidInputError, LimitError
from hpctrain.serve.make_plan import (
    PlannedService,
    plan_service,
    read_model,
    service_request,
)
from hpctrain.serve.plan.candidates import replica_shapes
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.serve.plan.service_plan import plan_on_cluster
from hpctrain.serve.serve_text import planned_lines
from hpctrain.spec.loader import load_named_profile, load_serving_calibration

# One shape, for tests that are not about choosing it.
NARROW = ("engine.tp=4", "engine.batch_tokens=2048", "engine.precision=bf16")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(here: Path, text: str, *overrides: str, profile: str = "h100x16") -> PlannedService:
    return plan_service(service_spec(here, text, *overrides), [load_named_profile(profile)])


def plan_of(here: Path, text: str, *overrides: str, profile: str = "h100x16") -> ServicePlan:
    found = planned(here, text, *overrides, profile=profile).chosen
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "int8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "fp4"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "fp4"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
                }
            },
            "fp8",
        ),
    ],
)
def test_number_formats_are_those_of_the_checkpoint(
    here: Path, changes: dict[str, Any], stored: str
) -> None:
    weights(here, {**LLAMA_8B, **changes})
    assert read_model(service_spec(here)).stored == stored


def test_scales_of_blocks_are_known(here: Path) -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weights(here, {**LLAMA_8B, "quantization_config": quantised})
    spec = service_spec(here)
    facts = read_model(spec)
    assert facts.block_scales and facts.stored == "fp8"
    request = service_request(spec, load_named_profile("h100x16"), facts)
    shape = next(replica_shapes(request.offer, request.model, request.engine))
    assert shape.served.mlp_bytes == 1 + 4 / 128**2


def test_shapes_that_hpctrain_does_not_train_are_served(here: Path) -> None:
    experts = {
        **LLAMA_8B,
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "head_dim": 128,
    }
    weights(here, experts)
    shape = read_model(service_spec(here)).shape
    assert (shape.experts, shape.top_k, shape.expert_ffn) == (128, 8, 768)
    latent = {
        **LLAMA_8B,
        "model_type": "deepseek_v3",
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
    }
    weights(here, latent)
    shape = read_model(service_spec(here)).shape
    assert (shape.mla, shape.kv_rank, shape.rope_dim, shape.shared_ffn) == (1, 512, 64, 2048)
    assert shape.moe_blocks == 29
    kinds = ["sliding_attention", "full_attention"] * 16
    seeing = {"text_config": {**LLAMA_8B, "sliding_window": 1024, "layer_types": kinds}}
    weights(here, seeing)
    shape = read_model(service_spec(here)).shape
    assert (shape.window, shape.window_share) == (1024, 0.5)


def test_weights_are_as_large_as_their_files(here: Path) -> None:
    weights(here, LLAMA_8B, 20_000_000_000)
    plan = plan_of(here, SMALL)
    assert plan.replica.weight_bytes == pytest.approx(20e9, rel=1e-6)
    (here / "weights/model.safetensors").unlink()
    counted = plan_of(here, SMALL).replica.weight_bytes
    assert counted == pytest.approx(2 * 8.03e9, rel=0.01)


def test_a_service_can_be_planned_before_its_weights_are_there(here: Path) -> None:
    plan = plan_of(here, CHAT_70B, *NARROW)
    assert plan.replica.weight_bytes * plan.replica.gpus == pytest.approx(141.2e9, rel=0.02)
    with pytest.raises(InvalidInputError, match=r"service.yaml:4:9: .*there is no config.json"):
        planned(here, CHAT_70B.replace("model: llama-3-70b\n", ""))
    weights(here, {"hidden_size": 8})
    with pytest.raises(InvalidInputError, match="has no `num_hidden_layers`"):
        planned(here, SMALL)
    (here / "weights/config.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"service.yaml:4:9: .*cannot be read"):
        planned(here, SMALL)


def test_plans_of_several_clusters_come_by_price(here: Path) -> None:
    spec = service_spec(here, CHAT_70B, "engine.batch_tokens=2048")
    names = ["a100x64", "h100x16"]
    found = plan_service(spec, [load_named_profile(name) for name in names])
    costs = [plan.cost_per_hour for plan in found.plans]
    assert [plan.profile for plan in found.plans] == ["h100x16", "a100x64"]
    assert costs == sorted(costs, key=lambda cost: cost or 0)
    text = planned_lines(found, 80)
    assert text[0].split()[:2] == ["PROFILE", "GPU"] and text[1].startswith("h100x16")
    assert max(map(len, text[4:])) <= 80


def test_the_text_has_money_promises_memory_and_why_cheaper_plans_fail(here: Path) -> None:
    found = planned(here, CHAT_70B)
    text = "\n".join(planned_lines(found, 80))
    plan = found.chosen
    assert plan is not None and plan.cost_per_hour is not None
    assert f"{plan.cost_per_hour:,.2f} USD an hour" in text
    assert "p99 ttft  500 ms" in text and "p99 tpot  50 ms" in text
    assert "Cheaper   " in text and "above its limit of" in " ".join(text.split())
    assert "keys and values of" in text
    next_cheaper = plan.alternatives[0]
    assert next_cheaper.cost_per_hour is not None and not next_cheaper.holds
    assert next_cheaper.cost_per_hour < plan.cost_per_hour


def test_a_limit_without_a_latency_is_asked_back_with_prices(here: Path) -> None:
    bare = ("objectives.p99=500ms", "objectives.ttft=null", "objectives.tpot=null")
    found = planned(here, CHAT_70B, "traffic.rate=60", *bare)
    assert found.chosen is None
    [asked] = found.clarifications
    first, further, whole = asked.readings
    assert first.holds and further.holds and not whole.holds
    assert first.cost_per_hour and further.cost_per_hour
    assert first.cost_per_hour > further.cost_per_hour
    assert "even without other requests p99 of e2e is" in whole.reason
    text = "\n".join(planned_lines(found, 80))
    assert "does not say of which" in " ".join(text.split())
    assert "USD an hour" in text and "nothing holds" in text


def test_traces_give_order_and_lengths(here: Path) -> None:
    weights(here, LLAMA_8B)
    rows = [f"{second / 7:.3f},{100 + second},{20 + second % 5}" for second in range(300)]
    (here / "day.csv").write_text("arrival_seconds,prompt_tokens,output_tokens\n" + "\n".join(rows))
    text = SMALL.replace("  prompt_tokens: 300\n  output_tokens: 60\n", "  trace: day.csv\n")
    plan = plan_of(here, text)
    assert plan.rate == 5 and plan.replica.max_length == 399 + 24
    (here / "day.csv").write_text("arrival_seconds,prompt_tokens,output_tokens\n1,2,3\n2,x,3\n")
    with pytest.raises(InvalidInputError, match=r"day.csv:3: "):
        plan_of(here, text)


def test_what_the_site_has_measured_counts(here: Path) -> None:
    """Slower iterations take more replicas; a smaller error takes fewer."""
    profile = load_named_profile("h100x16")
    unseen = load_serving_calibration().engine("vllm").unseen_error
    measured = {"decode_factor": 1.6, "prompt_factor": 1.6, "error": unseen, "provenance": "a test"}
    path = here / "ours.yaml"
    path.write_text("extends: h100x16\nname: ours\ncalibration: ours.calibration.yaml\n")

    def replicas(**changes: float) -> int:
        serving = {"vllm": {**measured, **changes}}
        site = {"gpu": "H100-80GB SXM", "provenance": "a test", "serving": serving}
        (here / "ours.calibration.yaml").write_text(json.dumps(site))
        loaded = load_named_profile(str(path))
        spec = service_spec(here, CHAT_70B, *changed)
        return plan_on_cluster(service_request(spec, loaded, read_model(spec))).replicas

    changed = ("traffic.rate=40", *NARROW, "objectives.tpot=null")
    spec = service_spec(here, CHAT_70B, *changed)
    packaged = plan_on_cluster(service_request(spec, profile, read_model(spec))).replicas
    assert replicas(decode_factor=1, prompt_factor=1) == packaged
    assert replicas() > packaged
    assert replicas(decode_factor=1, prompt_factor=1, error=0.03) <= packaged


def test_emulated_gpus_are_a_core_each(here: Path) -> None:
    tiny = {**LLAMA_8B, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 512}
    weights(here, tiny)
    plan = plan_of(here, SMALL, profile="sandbox")
    assert plan.replica.gpu == "emulated" and plan.replicas == 1 and plan.cost_per_hour is None
    assert any("guessed until `hpctrain calibrate`" in warning for warning in plan.warnings)
    assert plan.promises[0].high_seconds > 2 * plan.promises[0].predicted_seconds


def test_refusals_name_the_field_and_what_would_help(here: Path) -> None:
    with pytest.raises(DoesNotFitError, match="e2e") as caught:
        planned(here, CHAT_70B, "objectives.e2e.p99=500ms")
    assert "service.yaml" in str(caught.value) and "MLPerf" in str(caught.value.hint)
    with pytest.raises(LimitError, match="no partition `nowhere`"):
        planned(here, CHAT_70B, "resources.partition=nowhere", *NARROW)
    with pytest.raises(LimitError, match="is above the"):
        planned(here, CHAT_70B, "resources.walltime=90d", *NARROW)


def test_preemptible_partitions_are_cheaper_and_need_spares(here: Path) -> None:
    safe = plan_of(here, CHAT_70B, "availability=0.999", *NARROW)
    spot = plan_of(here, CHAT_70B, "availability=0.999", "resources.partition=preemptible", *NARROW)
    assert spot.spare > safe.spare and spot.cost_per_hour and safe.cost_per_hour
    assert spot.cost_per_hour < safe.cost_per_hour
    assert spot.availability >= 0.999
    assert spot.gpu_hours_per_hour is not None
    # successors begin before the time limit of three days: a little more than the GPUs of replicas
    assert spot.gpus < spot.gpu_hours_per_hour < 1.01 * spot.gpus
    assert spot.cost_per_hour == pytest.approx(1.25 * spot.gpu_hours_per_hour)
    grace = plan_of(
        here, CHAT_70B, "resources.partition=preemptible", "drain.longest=20min", *NARROW
    )
    assert any("the grace of 2 min" in warning for warning in grace.warnings)


def test_hours_make_a_day_cheaper(here: Path) -> None:
    text = CHAT_70B + "replicas:\n  hours: {'08:00': 1, '20:00': 0.25}\n"
    reasons = plan_of(here, text, "traffic.rate=60", *NARROW).reasons
    [daily] = [reason for reason in reasons if "replicas.hours" in reason]
    assert "GPU-hours instead of" in daily and "USD" in daily and "% less" in daily


def test_replicas_stay_below_the_most_that_is_allowed(here: Path) -> None:
    with pytest.raises(LimitError, match=r"service.yaml.*`replicas.max` 1"):
        planned(here, CHAT_70B + "replicas: {max: 1}\n", "traffic.rate=60", *NARROW)


def test_an_availability_out_of_reach_is_refused(here: Path) -> None:
    path = here / "ours.yaml"
    path.write_text(
        "extends: h100x16\nname: ours\nreliability: {node_mtbf: 264d, preemption_mtbf: 1s}\n"
    )
    spec = service_spec(here, CHAT_70B, "resources.partition=preemptible")
    with pytest.raises(LimitError, match=r"no number of spares reaches an availability of 0.99"):
        plan_service(spec, [load_named_profile(str(path))])


def test_jobs_that_end_before_their_successor_is_ready_are_refused(here: Path) -> None:
    with pytest.raises(LimitError, match="ends before its successor is ready"):
        planned(here, CHAT_70B, "resources.walltime=2min", *NARROW)
