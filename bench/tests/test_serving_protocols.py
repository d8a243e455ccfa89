"""What the scripts of benchmarks set, and engines' generations, from the columns of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.serving_predictions import _set_up
from bench.serving_protocols import AS_DEFAULT, INFERENCE_X, BenchmarkRun, Protocol, inference_x
from bench.serving_rows import engine_of, serving_row
from hpctrain.spec.loader import load_serving_calibration

RUN = BenchmarkRun(
    engine="sglang",
    model="deepseek-ai/deepseek-r1",
    weights="fp4",
    generation="blackwell",
    tp=8,
    streams=64.0,
    prompt_tokens=1024.0,
    output_tokens=1024.0,
)


@pytest.mark.parametrize(("streams", "waited"), [(4.0, 5.0), (16.0, 15.0), (128.0, 15.0)])
def test_sglang_looks_for_requests_less_often_with_many_streams(
    streams: float, waited: float
) -> None:
    assert inference_x(replace(RUN, streams=streams)).waited_iterations == waited
    hopper = replace(RUN, streams=streams, generation="hopper")
    assert inference_x(hopper).waited_iterations == 0


def test_held_back_prompts_wait_less_the_more_come() -> None:
    # 20 iterations for the first; 20 x 64 / 1024 = 1.25 others come meanwhile and wait for half
    run = replace(RUN, engine="tensorrt-llm", model="meta-llama/llama-3.1-70b", tp=4)
    assert inference_x(run).waited_iterations == pytest.approx(20 * (1 + 0.625) / 2.25)
    few = inference_x(replace(run, streams=1.0)).waited_iterations
    assert few == pytest.approx(20, rel=0.02)
    assert inference_x(replace(run, output_tokens=8192.0)).waited_iterations == 0
    assert inference_x(replace(run, tp=8)).waited_iterations == 0


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, 16384),
        ({"weights": "fp8"}, 32768),
        ({"weights": "fp8", "tp": 4}, 8192),
        ({"model": "zhipuai/glm-5"}, 32768),
        ({"engine": "vllm", "model": "minimaxai/minimax-m2.5"}, 2048),
        ({"engine": "vllm"}, None),
        ({"engine": "tensorrt-llm"}, 8192),
        ({"engine": "tensorrt-llm", "drafted_tokens": 3}, 64 * 4 + 1024 + 64),
        ({"engine": "tensorrt-llm", "model": "openai/gpt-oss-120b"}, 20000),
    ],
)
def test_token_budgets_of_the_scripts(changes: dict[str, object], budget: float | None) -> None:
    assert inference_x(replace(RUN, **changes)).token_budget == budget  # type: ignore[arg-type]


def test_what_a_script_sets_replaces_the_engines_own() -> None:
    engine = load_serving_calibration().engine("sglang")
    assert _set_up(engine, AS_DEFAULT) == engine == _set_up(engine, INFERENCE_X)
    changed = _set_up(engine, Protocol(token_budget=4096.0, memory_share=0.95))
    assert (changed.token_budget, changed.memory_share) == (4096.0, 0.95)
    assert changed.iteration_seconds == engine.iteration_seconds


@pytest.mark.parametrize(
    ("engine", "version", "day", "expected"),
    [
        ("trtllm", "1.1.0rc2.post2", "", "tensorrt-llm-2025"),
        ("trtllm", "1.2.0rc6", "", "tensorrt-llm"),
        ("trtllm", "0.5.1-rc0.pre3", "", "tensorrt-llm-2025"),  # of Dynamo
        ("trtllm", "0.8.1.post2", "", "tensorrt-llm"),
        ("sglang", "0.5.6.post2", "", "sglang-2025"),
        ("sglang", "0.5.10.post1", "", "sglang"),
        ("sglang", "nightly", "2025-12-01", "sglang-2025"),
        ("sglang", "nightly", "2026-03-01", "sglang"),
        ("vllm", "0.12.0", "", "vllm"),
    ],
)
def test_older_generations_of_engines(engine: str, version: str, day: str, expected: str) -> None:
    ref = f"silicon_sample.csv measured={day}T00:00" if day else "elsewhere"
    cells = {"engine": engine, "engine_version": version, "source_ref": ref}
    assert engine_of(serving_row(2, cells)) == expected
