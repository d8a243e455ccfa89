"""Factors that are fitted to requests and counters of a simulated engine with other constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated_replicas import all_of, requests_of, service, typical

from hpctrain.serve.plan.measured_speed import (
    EngineCounters,
    MeasuredIteration,
    MeasuredSpeed,
    RequestTimes,
    fit_speed,
    iteration_between,
    iterations_of,
    request_seconds,
)
from hpctrain.serve.plan.routing import Outcome, simulate_open
from hpctrain.serve.plan.step_time import IterationLoad
from hpctrain.serve.plan.traffic import Lengths, Requests, Traffic, draw_requests

CHAT = Traffic(Lengths(300, 1500), Lengths(100, 400))


def slower(load: IterationLoad) -> object:
    """An engine that decodes 1.4 times as long as `typical`, and computes prompts 2.5 times."""
    return MeasuredSpeed(1.4, 2.5).corrected(typical)(load)  # type: ignore[arg-type]


def times_of(requests: Requests, got: Outcome) -> RequestTimes:
    begin = got.arrival_seconds
    return RequestTimes(
        begin_seconds=begin,
        first_token_seconds=begin + got.ttft_seconds,
        last_token_seconds=begin + got.e2e_seconds,
        prompt_tokens=requests.prompt_tokens.astype(float),
        output_tokens=requests.output_tokens.astype(float),
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_factors_are_found_from_requests(replicas: int) -> None:
    requests = draw_requests(CHAT, 800, 3)
    rate = 6.0 * replicas
    got = simulate_open(service(slower, replicas=replicas), requests, rate, all_of())
    measured = iterations_of(times_of(requests, got), replicas)
    found = fit_speed(typical, measured)  # type: ignore[arg-type]
    assert found is not None
    assert found.decode_factor == pytest.approx(1.4, rel=0.06)
    assert found.prompt_factor == pytest.approx(2.5, rel=0.15)
    assert found.log_deviation is not None and found.log_deviation < 0.08


def test_a_corrected_prediction_is_what_was_measured() -> None:
    requests = draw_requests(CHAT, 800, 3)
    real = simulate_open(service(slower), requests, 7.0, all_of())
    found = fit_speed(typical, iterations_of(times_of(requests, real)))  # type: ignore[arg-type]
    assert found is not None
    others = draw_requests(CHAT, 1500, 8)
    corrected = found.corrected(typical)  # type: ignore[arg-type]
    for rate in (3.0, 9.0):
        measured, predicted, before = (
            simulate_open(service(cost), others, rate) for cost in (slower, corrected, typical)
        )
        for share in (0.5, 0.99):
            for name in ("ttft_seconds", "tpot_seconds"):
                truth, now, then = (
                    np.quantile(getattr(one, name), share) for one in (measured, predicted, before)
                )
                assert abs(now / truth - 1) < 0.15 < abs(then / truth - 1)


def test_what_a_request_takes_outside_of_iterations_is_found() -> None:
    requests = draw_requests(CHAT, 400, 3)
    one = replace(service(), request_seconds=0.08)
    times = times_of(requests, simulate_open(one, requests, 0.5, all_of()))
    assert request_seconds(times, typical) == pytest.approx(0.08, rel=0.15)  # type: ignore[arg-type]


def test_counters_of_an_engine_give_its_mean_iteration() -> None:
    """Forty sequences at 30 ms make 1333 tokens a second; 600 tokens of prompts come with them."""
    before = EngineCounters(10.0, 1000, 2000, 1.0, 50, 50)
    answered = 600
    after = EngineCounters(
        moment_seconds=70.0,
        prompt_tokens=1000 + 60 * 600,
        generated_tokens=2000 + 60 * 40 / 0.03,
        tpot_sum_seconds=1.0 + answered * 0.03,
        tpot_count=50 + answered,
        requests=50 + answered,
    )
    found = iteration_between(before, after)
    assert found is not None
    assert found.seconds == pytest.approx(0.03) and found.sequences == pytest.approx(40)
    assert found.prompt_tokens == pytest.approx(18)
    assert found.context_tokens == pytest.approx(60 + 80_000 / 600 / 2)
    assert iteration_between(after, after) is None


def test_wild_measurements_hardly_count() -> None:
    steady = [
        MeasuredIteration(0.0, n, 500.0, 1.4 * float(typical(IterationLoad(0, 0, n, 500.0))))  # type: ignore[arg-type]
        for n in range(1, 60)
    ]
    wild = [
        replace(one, seconds=one.seconds * factor) for factor in (0.2, 20) for one in steady[:4]
    ]
    found = fit_speed(typical, [*steady, *wild])  # type: ignore[arg-type]
    assert found is not None and found.decode_factor == pytest.approx(1.4, rel=0.03)
    assert found.prompt_factor == 1.0  # nothing was measured about prompts
    assert fit_speed(typical, steady[:3]) is None  # type: ignore[arg-type]


def test_answers_that_overlap_share_iterations() -> None:
    """Two answers of 11 tokens at the same time: two sequences, and one prompt in the first."""
    requests = requests_of([1.0, 0.5], 100, 11)
    one = service(lambda load: 1.0 + 0 * load.prefill_tokens)
    got = simulate_open(one, requests, 1.0, all_of())
    first, second = iterations_of(times_of(requests, got))
    assert first.seconds == second.seconds == 1.0
    assert first.prompt_tokens == pytest.approx(100 / 10) and second.prompt_tokens == 0
    assert first.sequences == second.sequences == pytest.approx(1 + 9 / 10)
