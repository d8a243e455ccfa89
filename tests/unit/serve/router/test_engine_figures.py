"""What engines say of themselves, added up: with the metrics of a stand-in and by hand."""

from __future__ import annotations

import math

import pytest

from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.router.traffic import (
    WINDOW_SECONDS,
    ArrivalRate,
    Engines,
    Percentiles,
    figures_of,
    percentile,
)

METRICS = SERVING_ENGINES["vllm"].metrics
assert METRICS is not None
# As vLLM 0.32 writes them: two engines of one process, and a name that begins like another one.
TEXT = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 8.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf",model_name="m"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 8.0
vllm:time_to_first_token_seconds_count{engine="1",model_name="m"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 3.0
"""


def test_the_figures_of_an_engine() -> None:
    assert METRICS is not None
    found = figures_of(TEXT, METRICS)
    assert (found.running, found.waiting, found.kv_share) == (5.0, 4.0, 0.5)
    assert found.ttft == {0.1: 6.0, math.inf: 10.0}
    assert found.e2e == {}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({0.1: 0.0, 0.2: 100.0, math.inf: 100.0}, 0.199),
        ({0.1: 99.0, 0.2: 100.0, math.inf: 100.0}, 0.1),
        ({0.1: 50.0, math.inf: 100.0}, 0.1),
        ({0.1: 0.0, math.inf: 0.0}, None),
        ({}, None),
    ],
)
def test_a_percentile_of_a_histogram(counts: dict[float, float], expected: float | None) -> None:
    found = percentile(counts, 0.99)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_percentiles_are_of_the_last_minutes_and_of_all_engines() -> None:
    percentiles = Percentiles()
    old = {0.1: 1000.0, 1.0: 1000.0, math.inf: 1000.0}
    assert percentiles.add(0.0, {"a": old}) is None
    slow = {0.1: 1000.0, 1.0: 1100.0, math.inf: 1100.0}
    assert percentiles.add(60.0, {"a": slow, "b": {0.1: 0.0, 1.0: 0.0, math.inf: 0.0}}) == (
        pytest.approx(0.1 + 0.9 * 0.99)
    )
    fast = {0.1: 9900.0, 1.0: 9900.0, math.inf: 9900.0}
    assert percentiles.add(61.0, {"a": slow, "b": fast}) == pytest.approx(0.1)
    later = WINDOW_SECONDS + 62.0
    assert percentiles.add(later, {"a": slow, "b": fast}) is None
    # an engine that was started anew counts from nothing
    assert percentiles.add(later + 1, {"a": {0.1: 0.0, 1.0: 0.0, math.inf: 0.0}}) is None


def test_the_rate_of_arrivals() -> None:
    rate = ArrivalRate(window_seconds=60.0)
    assert rate.add(0.0, 100) is None
    assert rate.add(10.0, 150) == 5.0
    for second in range(20, 200, 10):
        last = rate.add(float(second), 150 + 2 * (second - 10))
    assert last == 2.0
    assert rate.add(200.0, 3) is None, "the router was started anew"
    assert rate.add(210.0, 13) == 1.0


def test_engines_without_metrics_are_not_asked() -> None:
    engines = Engines(None)
    assert engines.ask(["http://127.0.0.1:1"]) == {}
    engines.close()
