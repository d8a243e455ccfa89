"""The doubt about the step time is in the quantiles of days and GPU-hours, not in their means."""

from __future__ import annotations

import math

import pytest

from hpctrain.simulate.monte_carlo import simulate
from hpctrain.simulate.scenario import Scenario
from tests.unit.simulate.simulated_scenarios import scenario


def days(deviation: float, **fields: float) -> tuple[float, float, float]:
    made: Scenario = scenario(step_deviation=deviation, **fields)
    found = simulate(made, 200, 1)
    hours = found.gpu_hours
    assert hours.p95 / hours.mean == pytest.approx(found.days.p95 / found.days.mean, rel=0.02)
    return found.days.p5, found.days.mean, found.days.p95


def test_a_doubtful_step_widens_the_range_and_keeps_the_mean() -> None:
    sure, doubtful = days(0.0), days(0.15)
    assert doubtful[1] == sure[1]
    assert doubtful[0] < sure[0]
    assert doubtful[2] > sure[2]


def test_the_first_start_takes_as_long_however_slow_the_steps_are() -> None:
    fields = {"work_seconds": 60.0, "restart_seconds": 600.0, "failures_per_node_day": 0.0}
    low, mean, high = days(0.5, **fields)
    assert low * 86400 > 600
    assert high * 86400 < 600 + 2.5 * (mean * 86400 - 600)


def test_without_failures_the_range_is_that_of_the_step() -> None:
    low, mean, high = days(0.2, failures_per_node_day=0.0)
    assert high / mean == pytest.approx(math.exp(1.645 * 0.2), rel=0.03)
    assert low / mean == pytest.approx(math.exp(-1.645 * 0.2), rel=0.03)
