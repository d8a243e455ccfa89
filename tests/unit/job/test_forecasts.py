"""One forecast: `plan`, `--budget`, `--deadline` and `simulate` name the same days and hours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain

from hpctrain.base.units import Duration
from hpctrain.job import plan as planning
from hpctrain.job.plan import Inputs
from hpctrain.plan.forecast.documents import Forecast, RunFacts
from hpctrain.plan.forecast.predict import forecast, run_facts
from hpctrain.plan.job import TrainingJob
from hpctrain.simulate.forecasts import forecast_run, scenario_of, trials_of
from hpctrain.spec.profile.hardware import ReliabilityProfile

GPT175B = "examples/gpt175b.yaml"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return planning.load(ROOT / GPT175B, "a100x64")


@pytest.fixture(scope="module")
def job(inputs: Inputs) -> TrainingJob:
    option = planning.plan_option(inputs, "time", before_seconds=0)
    assert option.decision is not None and option.forecast is None
    return option.decision.job


@pytest.fixture(scope="module")
def facts(job: TrainingJob) -> RunFacts:
    found = run_facts(job)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def played(job: TrainingJob, facts: RunFacts) -> Forecast:
    return forecast_run(job, facts)


def document(*arguments: str) -> dict[str, Any]:
    done = hpctrain(*arguments, "-p", "a100x64", str(ROOT / GPT175B), "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.all_runs_played
def test_plan_and_simulate_are_one_forecast(played: Forecast) -> None:
    planned = document("plan")["forecast"]
    simulated = document("simulate", "--spares", "0", "--interval", "spec")
    (outcome,) = simulated["simulation"]["choice"]["outcomes"]
    assert planned["gpu_hours"] == outcome["gpu_hours"]["mean"] == played.gpu_hours
    assert planned["spread"]["most_seconds"] == pytest.approx(outcome["days"]["p95"] * 86400)
    assert sum(
        seconds for name, seconds in planned["times"].items() if name != "repair_seconds"
    ) == pytest.approx(outcome["days"]["mean"] * 86400)


def test_a_full_machine_waits_for_repairs(
    job: TrainingJob, facts: RunFacts, played: Forecast
) -> None:
    nodes = job.profile.nodes
    more = job.profile.model_copy(
        update={"nodes": nodes.model_copy(update={"count": nodes.count + 4})}
    )
    free = forecast_run(replace(job, profile=more), facts)
    assert played.times.repair_seconds > 10 * 86400 > 86400 > free.times.repair_seconds
    assert played.days - free.days == pytest.approx(
        (played.times.repair_seconds - free.times.repair_seconds) / 86400, abs=0.2
    )
    closed = forecast(job.spec, job.profile, facts)
    assert free.days == pytest.approx(closed.days, rel=0.01), "as the closed form without waits"


def test_the_site_says_how_long_a_repair_takes(
    job: TrainingJob, facts: RunFacts, played: Forecast
) -> None:
    assert any(one.kind == "repair" for one in played.assumptions)
    reliability = job.profile.reliability
    assert isinstance(reliability, ReliabilityProfile)
    quick = reliability.model_copy(update={"repair": Duration(3600)})
    site = job.profile.model_copy(update={"reliability": quick})
    found = forecast_run(replace(job, profile=site), facts)
    assert found.times.repair_seconds < played.times.repair_seconds / 10
    assert not any(one.kind == "repair" for one in found.assumptions)


def test_sizes_are_ordered_as_they_are_played(inputs: Inputs) -> None:
    free = Inputs(planning.freed(inputs.spec), inputs.profile, inputs.knowledge)
    options = [planning.plan_option(free, "time", gpus) for gpus in (448, 512)]
    small, large = (option.forecast for option in options)
    assert small is not None and large is not None
    assert small.step_seconds > large.step_seconds and small.days < large.days
    assert planning.best_option(options, "time").gpus == 448
    assert planning.best_option(options, "gpu-hours").gpus == 512


def test_the_interval_of_the_spec_is_played(
    job: TrainingJob, facts: RunFacts, played: Forecast
) -> None:
    seldom = job.spec.checkpoint.model_copy(
        update={"every_steps": None, "every": Duration(6 * 3600)}
    )
    spec = job.spec.model_copy(update={"checkpoint": seldom})
    assert (
        forecast_run(replace(job, spec=spec), facts).times.redone_seconds
        > 5 * played.times.redone_seconds
    )


def test_a_deadline_is_met_by_95_of_100_runs(played: Forecast) -> None:
    assert played.spread is not None
    mean, most = played.times.total_seconds, played.spread.most_seconds
    between, late = (mean + most) / 2, most * 1.01
    assert mean < between < most
    given = ("--gpus", "512", "--deadline")
    assert (
        hpctrain("plan", "-p", "a100x64", str(ROOT / GPT175B), *given, f"{between:.0f}s").exit_code
        == 4
    )
    met = hpctrain("plan", "-p", "a100x64", str(ROOT / GPT175B), *given, f"{late:.0f}s")
    assert met.exit_code == 0 and "95 of 100 played runs" in met.stdout


def test_a_site_that_does_not_requeue_is_played_with_people_who_resume(
    job: TrainingJob, facts: RunFacts
) -> None:
    site = job.profile.model_copy(update={"continuation": "none"})
    found = forecast_run(replace(job, profile=site), facts)
    assert found.spread is not None and found.spread.stopped == 0
    assert any("hpctrain resume" in one.text for one in found.assumptions)


def test_a_run_that_is_stopped_too_often_is_not_played(job: TrainingJob, facts: RunFacts) -> None:
    short = facts.model_copy(update={"walltime": Duration(800)})
    found = forecast_run(job, short)
    closed = forecast(job.spec, job.profile, short)
    assert found == closed and found.spread is None
    assert not trials_of(scenario_of(job, short, closed))
