"""What LoRA leaves to learn, and what that saves in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of

from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.weights import weights_of
from hpctrain.plan.documents import Plan
from hpctrain.plan.mesh.candidate import candidate_of, columns_of
from hpctrain.plan.model.parameters import (
    count_model,
    linear_parameters,
    model_flops_per_step,
    total_parameters,
)
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.run import ParallelSpec, RunSpec

LLAMA_7B: dict[str, Any] = dict(
    family="llama", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000, seq=2048
)


def spec(**fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        dict(
            name="tuned",
            model=LLAMA_7B,
            batch={"global": 8, "micro": 1},
            budget=dict(steps=4),
            optimizer=dict(lr=1e-4),
            checkpoint=dict(every_steps=2),
            engine=dict(name="ddp"),
            resources=dict(gpus=8),
            recompute="full",
        )
        | fields
    )


# peft prints for Llama-2-7B with r=8 and q_proj, v_proj: "trainable params: 4,194,304"; with all
# linear layers and r=16: 39,976,960.
@pytest.mark.parametrize(
    ("lora", "count"),
    [(dict(rank=8, targets=("q_proj", "v_proj")), 4_194_304), (dict(rank=16), 39_976_960)],
)
def test_known_counts(lora: dict[str, Any], count: int) -> None:
    assert count_model(spec(lora=lora)).trainable == count


def test_everything_learns_without_lora() -> None:
    counts = count_model(spec())
    assert counts.trainable == counts.parameters == total_parameters(spec().model)
    assert counts.trainable_share == 1.0


def planned(**fields: Any) -> Plan:
    return make_plan(spec(**fields), load_profile(find_profile("a100x64")).document)


def test_frozen_weights_have_no_gradients_and_no_moments() -> None:
    tuned = planned(lora={}).memory[0]
    thin = 39_976_960
    weights = total_parameters(spec().model) + thin  # 32000 is a multiple of 128
    assert tuned.weights_bytes == 2 * weights
    assert tuned.gradients_bytes == 4 * thin
    assert tuned.optimizer_bytes == 4 * weights + 8 * thin


def test_the_plan_counts_thin_matrices_and_what_learns() -> None:
    tuned = planned(lora=dict(rank=8, targets=("q_proj", "v_proj")))
    assert tuned.parameters == 6_738_415_616 + 4_194_304
    assert tuned.parameters == tuned.stages[0].parameters_per_gpu
    assert tuned.learned == tuned.learned_parameters == 4_194_304


def test_the_search_counts_what_the_plan_counts() -> None:
    tuned = spec(lora=dict(rank=64))
    columns = columns_of(replace(candidate_of(tuned, ParallelSpec(), 8), recompute=2))
    case = case_of(PlanRequest(tuned, load_profile(find_profile("a100x64")).document), columns)
    assert float(np.max(weights_of(case).dense)) == pytest.approx(
        count_model(tuned).parameters, rel=1e-5
    )


def test_frozen_weights_need_two_products_of_three() -> None:
    model, tuned = spec().model, spec(lora={})
    whole = model_flops_per_step(model, 8)
    tokens = 8 * model.seq
    expected = whole - 2 * linear_parameters(model) * tokens + 6 * 39_976_960 * tokens
    assert count_model(tuned).flops_per_step == expected
    assert count_model(spec()).flops_per_step == whole
    assert planned(lora={}).model_flops_per_step == expected


def test_a_step_of_tuning_is_shorter_by_the_gradients_of_frozen_weights() -> None:
    larger = dict(engine=dict(name="fsdp"), resources=dict(gpus=64), batch={"global": 64})
    whole, tuned = predicted(**larger), predicted(**larger, lora={})
    assert 0.6 < tuned / whole < 0.9  # norms of many kernels take as long


def predicted(**fields: Any) -> float:
    profile = load_profile(find_profile("a100x64")).document
    plan = make_plan(spec(**fields), profile, knowledge_of(profile))
    assert plan.prediction is not None
    return plan.prediction.parts.compute_seconds


def test_a_model_of_7_billion_is_tuned_where_it_could_not_be_trained() -> None:
    with pytest.raises(Exception, match="GiB"):
        planned()
    assert planned(lora={}).memory[0].total_bytes < 80 * 2**30
