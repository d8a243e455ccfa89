"""Batches that grow: steps and samples, the plan, and what is refused before the queue.

megatron-core's own calculator is the reference in tests/engines/test_batch_ramp.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from planner_knowledge import knowledge_of
from specimens import cluster, run_spec

from hpctrain.base.errors import DoesNotFitError
from hpctrain.base.units import Duration
from hpctrain.job.plan_text import forecast_lines, plan_lines
from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.plan.documents import BatchSplit, Plan
from hpctrain.plan.forecast.predict import forecast, run_facts
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.runs.status import growth_of_steps
from hpctrain.spec.batch import batch_sizes
from hpctrain.spec.run import RunSpec
from hpctrain.trials.rehearsal import rehearsal_overrides
from hpctrain.trials.variants import trial_overrides

# 16, 32, 48 and then 64 samples: 4, 2 and 1 steps before those of the whole batch.
RAMP = dict(start=16, increment=16, samples=150)
SIZES = [16] * 4 + [32] * 2 + [48] + [64] * 3


def ramped(
    ramp: dict[str, int] | None = RAMP, micro: int | str = 4, gpus: int = 4, **changes: Any
) -> RunSpec:
    document = run_spec(batch=64, micro=micro, gpus=gpus, **changes).model_dump(
        by_alias=True, exclude_unset=True
    )
    return RunSpec.model_validate({**document, "batch": {**document["batch"], "ramp_up": ramp}})


def planned(spec: RunSpec) -> Plan:
    profile = cluster()
    return make_plan(spec, profile, knowledge_of(profile))


def test_steps_and_samples_both_ways() -> None:
    sizes = ramped().batch.sizes
    assert [sizes.size_after(step) for step in range(10)] == SIZES
    consumed = [sum(SIZES[:step]) for step in range(11)]
    assert [sizes.samples_after(step) for step in range(11)] == consumed
    assert [sizes.steps_for(samples) for samples in consumed] == [*range(11)]
    assert [sizes.steps_for(samples + 1) for samples in consumed] == [*range(1, 12)]
    assert sizes.ramp(10) == [(16, 4), (32, 2), (48, 1)] and sizes.ramp(5) == [(16, 4), (32, 1)]


def test_a_budget_in_tokens_has_more_steps() -> None:
    spec = ramped(budget={"tokens": str(64 * 1000)})
    assert spec.train_steps == 7 + -(-(1000 - 176) // 64)
    assert ramped(None, budget={"tokens": str(64 * 1000)}).train_steps == 16


def test_the_sizes_that_ranks_cannot_divide_are_named() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        planned(ramped(dict(start=24, increment=8, samples=150), micro=4, parallel=dict(tp=1)))
    message = str(caught.value)
    assert "batches of the ramp-up are not divisible by micro 4 x dp 4: 24, 40, 56; say" in message
    assert "multiples of 16" in message
    plan = planned(ramped(dict(start=24, increment=8, samples=150), micro="auto"))
    assert 8 % (plan.batch.micro_batch * plan.layout.dp) == 0


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (dict(start=64, increment=8, samples=10), "start 64 must be below global 64"),
        (dict(start=16, increment=10, samples=10), "say global 56 or 66, or another increment"),
        (dict(start=16, increment=8, samples=0), "greater than or equal to 1"),
    ],
)
def test_what_is_no_ramp(ramp: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ramped(ramp)


def test_too_many_increments() -> None:
    batch = {"global": 5000, "ramp_up": dict(start=1, increment=1, samples=10)}
    with pytest.raises(ValueError, match="more than 1,000"):
        RunSpec.model_validate({**run_spec().model_dump(exclude_unset=True), "batch": batch})


def test_a_run_lasts_as_long_as_its_smaller_steps() -> None:
    plan, plain = planned(ramped()), planned(ramped(None))
    assert plan.step_seconds == plain.step_seconds and plain.batch.ramp == ()
    assert "ramp" not in plain.batch.model_dump()
    seconds = [one.step_seconds for one in plan.batch.ramp]
    assert [(one.global_batch, one.steps) for one in plan.batch.ramp] == [(16, 4), (32, 2), (48, 1)]
    assert seconds == sorted(seconds) and seconds[-1] < plan.step_seconds  # type: ignore[type-var,operator]
    whole = sum(s * n for s, n in zip(seconds, (4, 2, 1), strict=True)) + 3 * plan.step_seconds  # type: ignore[operator,misc]
    assert plan.training_seconds == pytest.approx(whole)
    smaller = planned(ramped(None).model_copy(update={"batch": ramped_batch(16)}))
    assert seconds[0] == smaller.step_seconds, "as a run whose batch it is"
    assert plan.prediction is not None
    assert plan.prediction.days == pytest.approx(whole / 86400)
    assert plan.batch.train_samples == sum(SIZES)
    text = "\n".join(plan_lines(plan, 200))
    assert "before, 7 smaller steps, from 16 to 48" in text
    assert f"10 steps = {sum(SIZES) * 64:,} tokens" in text


def ramped_batch(size: int) -> Any:
    return run_spec(batch=size, micro=4).batch


def test_the_forecast_counts_them() -> None:
    profile, spec = cluster(), ramped()
    job = TrainingJob(spec, profile, planned(spec))
    facts = run_facts(job)
    assert facts is not None and facts.tokens == sum(SIZES) * 64
    assert facts.training_seconds == job.plan.training_seconds
    expected = forecast(spec, profile, facts)
    assert expected.times.training_seconds == job.plan.training_seconds
    assert "10 steps of up to" in " ".join(forecast_lines(expected, 200))


def test_the_time_that_is_left_grows_with_the_batch() -> None:
    ramp = ((4, 0.25), (2, 0.5), (1, 0.75))
    assert growth_of_steps(ramp, 2, 8) == pytest.approx(
        (2 * 0.25 + 2 * 0.5 + 0.75 + 3) / (8 * 0.25)
    )
    assert growth_of_steps(ramp, 7, 3) == pytest.approx(1 / 0.75)
    assert growth_of_steps(ramp, 8, 2) == 1.0
    split = BatchSplit(
        global_batch=64, micro_batch=1, accumulation=1, train_steps=10, tokens_per_step=64,
        ramp=planned(ramped()).batch.ramp,
    )  # fmt: skip
    assert split.shares(None) == ramp


def test_trials_have_whole_batches() -> None:
    assert "batch.ramp_up=" in trial_overrides(ramped(), "short", 20, Duration(600))
    assert "batch.ramp_up=" in rehearsal_overrides(ramped(), 4, Duration(600))
    plain = (trial_overrides(ramped(None), "a", 20, Duration(600)),
             rehearsal_overrides(ramped(None), 4, Duration(600)))  # fmt: skip
    assert not any("batch.ramp_up=" in each for each in plain)


def test_what_cannot_be_trained_while_batches_grow() -> None:
    graphs = dict(name="megatron", megatron={"cuda_graph_impl": "local"})
    assert "engine.megatron.cuda_graph_impl" in dict(untrainable_fields(ramped(engine=graphs)))
    assert untrainable_fields(ramped()) == untrainable_fields(ramped(None))
    external = dict(name="megatron-lm", checkout="/megatron")
    assert "batch.ramp_up" not in dict(untrainable_fields(ramped(engine=external)))
    (message,) = [
        message
        for field, message in untrainable_fields(ramped(engine=external, budget={"steps": 7}))
        if field == "batch.ramp_up"
    ]
    assert "before the batch has grown" in message


def test_the_largest_ramp_is_computed_at_once() -> None:
    sizes = batch_sizes(10**9, (10**6, 10**6, 10**15))
    assert len(sizes.stages) == 1000 and sizes.all[-1] == 10**9
