"""Intervals of quantiles hold as often as they say, for requests that depend on each other, too."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpctrain.serve.plan.promises import (
    ModelError,
    Objective,
    objectives_of,
    quantile,
    variance_ratio,
)
from hpctrain.spec.service import ObjectivesSpec


def coverage(correlation: float, trials: int = 300, count: int = 2000) -> float:
    """How often the interval contains the 90th percentile of samples that follow each other.

    They are a Gaussian AR(1) process.
    """
    generator = np.random.default_rng(5)
    inside = 0
    for _ in range(trials):
        noise = generator.standard_normal(count)
        normal = np.empty(count)
        normal[0] = noise[0]
        for index in range(1, count):
            step = math.sqrt(1 - correlation**2) * noise[index]
            normal[index] = correlation * normal[index - 1] + step
        # the 90th percentile of a standard normal variable is 1.2816
        found = quantile(normal, 0.9)
        inside += found.low <= 1.2815515655446004 <= found.high
    return inside / trials


def test_intervals_of_independent_samples_hold_nineteen_times_of_twenty() -> None:
    assert 0.92 <= coverage(0.0) <= 0.985


def test_intervals_of_a_queue_are_wider() -> None:
    assert coverage(0.9, trials=150) >= 0.87


def test_the_ratio_of_variances_is_that_of_the_process() -> None:
    """Of AR(1) values above their median, correlation falls as 2/pi asin(r^k)."""
    generator = np.random.default_rng(2)
    independent = generator.random(40_000) > 0.5
    assert variance_ratio(independent, 0.5) == pytest.approx(1, abs=0.9)
    repeated = np.repeat(generator.random(4000) > 0.5, 10)
    assert variance_ratio(repeated, 0.5) == pytest.approx(10, rel=0.6)


def test_quantiles_are_order_statistics() -> None:
    samples = np.asarray([3.0, 1.0, 2.0, 5.0, 4.0])
    assert quantile(samples, 0.5).value == 3 and quantile(samples, 1.0).value == 5
    assert quantile(samples, 0.01).value == 1
    assert math.isnan(quantile(np.asarray([]), 0.5).value)
    endless = quantile(np.asarray([1.0] * 90 + [math.inf] * 10), 0.99)
    assert endless.value == math.inf


def test_limits_are_those_of_the_spec() -> None:
    spec = ObjectivesSpec.model_validate(
        {"tpot": {"p50": "30ms", "p99": "50ms"}, "ttft": {"p99": "0.5s"}}
    )
    assert objectives_of(spec) == (
        Objective("ttft", "p99", 0.5),
        Objective("tpot", "p50", 0.03),
        Objective("tpot", "p99", 0.05),
    )
    assert objectives_of(spec)[1].share == 0.5


def test_nine_of_ten_are_not_slower_than_a_cautious_iteration() -> None:
    error = ModelError(0.1)
    ratios = np.exp(0.1 * np.random.default_rng(1).standard_normal(100_000))
    assert float((ratios <= error.cautious).mean()) == pytest.approx(0.9, abs=0.005)
    inside = (ratios >= error.fast) & (ratios <= error.slow)
    assert float(inside.mean()) == pytest.approx(0.95, abs=0.005)
