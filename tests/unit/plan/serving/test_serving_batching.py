"""Continuous batching: against closed forms, and counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_replicas import PLENTY, all_of, requests_of, service, table, typical

from hpctrain.serve.plan.batching import BLOCK_TOKENS, BatchLimits, Journal, Replica
from hpctrain.serve.plan.routing import Window, simulate_arrivals, simulate_open
from hpctrain.serve.plan.step_time import IterationLoad
from hpctrain.serve.plan.traffic import Lengths, Requests, Traffic, draw_requests


def poisson(count: int, prompt: int, output: int, seed: int = 1) -> Requests:
    return draw_requests(Traffic(Lengths(prompt, prompt), Lengths(output, output)), count, seed)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_at_a_time_waits_as_in_a_queue_with_constant_service(load: float) -> None:
    """M/D/1, Pollaczek-Khinchine: the mean wait is rho D / (2 (1 - rho))."""
    service_seconds = 0.5
    one = service(lambda load: service_seconds + 0 * load.prefill_tokens, max_sequences=1)
    got = simulate_open(one, poisson(20_000, 100, 1), load / service_seconds)
    wait = float(got.ttft_seconds.mean()) - service_seconds
    assert wait == pytest.approx(load * service_seconds / (2 * (1 - load)), rel=0.08)


@pytest.mark.parametrize("lengths", [Lengths(40, 40), Lengths(30, 200)])
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_iterations_as_long_as_their_batch_share_the_processor(
    lengths: Lengths, load: float
) -> None:
    """M/G/1-PS: the mean time is E[S] / (1 - rho), whatever the distribution of lengths is."""
    token_seconds = 0.001

    def shared(load: IterationLoad) -> object:
        return token_seconds * (load.prefill_tokens + load.decode_sequences)

    requests = draw_requests(Traffic(Lengths(1, 1), lengths), 20_000, 3)
    mean = float(requests.output_tokens.mean()) * token_seconds
    got = simulate_open(service(shared, max_sequences=512), requests, load / mean)
    assert float(got.e2e_seconds.mean()) == pytest.approx(mean / (1 - load), rel=0.08)


def test_a_request_alone_takes_its_prompt_and_its_tokens() -> None:
    got = simulate_open(service(), requests_of([1.0], 3000, 5), 1.0, all_of())
    first_chunk = typical(IterationLoad(2048, 0, 0, 0))
    second_chunk = typical(IterationLoad(952, 0, 0, 0))
    later = [typical(IterationLoad(0, 0, 1, 3000 + made)) for made in (1, 2, 3, 4)]
    assert got.ttft_seconds[0] == pytest.approx(first_chunk + second_chunk, rel=0.02)  # type: ignore[operator]
    assert got.tpot_seconds[0] == pytest.approx(sum(later) / 4, rel=0.01)  # type: ignore[arg-type]
    assert got.e2e_seconds[0] == pytest.approx(
        got.ttft_seconds[0] + 4 * got.tpot_seconds[0], rel=1e-9
    )


def test_prompts_are_cut_at_the_budget_beside_decoding_sequences() -> None:
    """A second prompt of 190 tokens takes four iterations of 64 - 1 tokens, not three of 64."""
    one = service(lambda load: 1.0 + 0 * load.prefill_tokens, batch_tokens=64)
    got = simulate_arrivals(
        one, requests_of([0.0, 0.5], [10, 190], [100, 2]), np.asarray([0.0, 0.5]), all_of()
    )
    assert got.ttft_seconds.tolist() == [1.0, pytest.approx(5.0 - 0.5)]
    assert got.iterations == 100


def test_what_goes_in_comes_out() -> None:
    requests = draw_requests(Traffic(Lengths(300, 2000), Lengths(100, 400)), 3000, 5)
    got = simulate_open(service(replicas=3), requests, 30.0, all_of())
    assert len(got.e2e_seconds) == 3000 and np.isfinite(got.e2e_seconds).all()
    assert got.output_tokens_produced == requests.output_tokens.sum()
    assert got.prompt_tokens_computed == requests.prompt_tokens.sum()
    assert (got.e2e_seconds >= got.ttft_seconds).all() and (got.ttft_seconds > 0).all()


def test_as_many_are_inside_as_little_says() -> None:
    requests = draw_requests(Traffic(Lengths(300, 2000), Lengths(100, 400)), 6000, 5)
    got = simulate_open(service(), requests, 12.0)
    leaving = got.arrival_seconds + got.e2e_seconds
    moments = np.linspace(got.arrival_seconds[200], got.arrival_seconds[-200], 2000)
    counted = [
        np.searchsorted(got.arrival_seconds, moment) - np.sum(leaving < moment)
        for moment in moments
    ]
    assert got.requests_in_service == pytest.approx(float(np.mean(counted)), rel=0.05)


@pytest.mark.parametrize(("kv_tokens", "tolerance"), [(PLENTY, 1e-9), (4000, 0.01)])
def test_steps_that_are_taken_at_once_are_those_taken_singly(
    kv_tokens: float, tolerance: float
) -> None:
    """Going on to the next end in one step changes no latency; with preemptions hardly any."""
    requests = draw_requests(Traffic(Lengths(300, 900), Lengths(60, 300)), 300, 9)
    limits = BatchLimits(256, 2048, kv_tokens)
    fast, slow = (
        Journal(requests.prompt_tokens.tolist(), requests.output_tokens.tolist()) for _ in range(2)
    )
    once = Replica(table(typical), limits, fast, [0], 0)
    often = _Interrupted(table(typical), limits, slow, [0], 0)
    before = 0.0
    for request, seconds in enumerate([*requests.arrivals(12.0).tolist(), 1e4]):
        once.advance(seconds)
        for moment in np.arange(before, min(seconds, before + 100), 0.003):
            often.advance(float(moment))
            often.cut(float(moment))
        often.advance(seconds)
        if request < requests.count:
            once.submit(request, seconds)
            often.submit(request, seconds)
        before = seconds
    assert once.iterations == pytest.approx(often.iterations, rel=tolerance)
    assert (once.preemptions > 0) == (often.preemptions > 0) == (kv_tokens < PLENTY)
    assert np.allclose(fast.finished, slow.finished, rtol=tolerance)


def test_full_memory_preempts_the_last_and_computes_it_again() -> None:
    """Two sequences of 100 + 60 tokens in memory for 290: the second is computed twice."""
    half_block = BLOCK_TOKENS // 2
    one = service(lambda load: 1.0 + 0 * load.prefill_tokens, kv_tokens=290 + 2 * half_block)
    requests = requests_of([1.0, 0.0], 100, 60)
    got = simulate_open(one, requests, 1.0, all_of())
    assert got.preemptions == 1
    # both have 100 + 1 after the first iteration: there is room for 44 more of each
    again = 100 + 45
    assert got.prompt_tokens_computed == 100 + 100 + again
    assert got.output_tokens_produced == 120
    assert got.e2e_seconds[0] == 60  # one iteration of a second for each token
    assert got.e2e_seconds[1] == 60 + 15  # the 15 tokens that were missing
    assert got.most_kv_tokens <= 290 + 2 * half_block
    roomy = simulate_open(service(lambda load: 1.0 + 0 * load.prefill_tokens), requests, 1.0)
    assert roomy.preemptions == 0


def test_who_was_preempted_comes_before_those_that_wait() -> None:
    """The second sequence gives up its memory to the first, and comes back before the third."""
    half_block = BLOCK_TOKENS // 2
    one = service(lambda load: 1.0 + 0 * load.prefill_tokens, kv_tokens=290 + 2 * half_block)
    requests = requests_of([1.0, 0.0, 0.0], [100, 100, 200], 60)
    got = simulate_open(one, requests, 1.0, all_of())
    assert got.preemptions == 1
    assert got.e2e_seconds.tolist() == [60, 75, 75 + 60]


def test_a_shared_beginning_is_computed_once() -> None:
    requests = requests_of([1.0] * 50, 500, 3, shared=400)
    got = simulate_open(service(), requests, 1.0, all_of())
    assert got.prompt_tokens_computed == 500 + 49 * 100
    alone = simulate_open(service(), requests_of([1.0] * 50, 500, 3), 1.0, all_of())
    assert got.ttft_seconds[1:].max() < alone.ttft_seconds[1:].min()


def test_prompts_that_come_with_their_keys_cost_one_token() -> None:
    got = simulate_open(service(prefilled=True), requests_of([1.0] * 20, 500, 3), 1.0, all_of())
    assert got.prompt_tokens_computed == 20


def test_chance_is_that_of_the_seed() -> None:
    traffic = Traffic(Lengths(300, 2000), Lengths(100, 400))
    first, again, other = (draw_requests(traffic, 500, seed) for seed in (1, 1, 2))
    results = [simulate_open(service(replicas=3), one, 20.0) for one in (first, again, other)]
    assert (results[0].e2e_seconds == results[1].e2e_seconds).all()
    assert not (results[0].e2e_seconds == results[2].e2e_seconds).all()


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_more_requests_wait_longer_and_more_replicas_shorten_it(policy: str) -> None:
    requests = draw_requests(Traffic(Lengths(300, 2000), Lengths(100, 400)), 2000, 5)
    means = [
        float(simulate_open(service(replicas=4, policy=policy), requests, rate).e2e_seconds.mean())  # type: ignore[arg-type]
        for rate in (10, 30, 50, 70)
    ]
    assert means == sorted(means)
    by_replicas = [
        float(
            simulate_open(service(replicas=count, policy=policy), requests, 40.0).e2e_seconds.mean()  # type: ignore[arg-type]
        )
        for count in (2, 3, 5, 8)
    ]
    assert by_replicas == sorted(by_replicas, reverse=True)


def test_routers_that_know_loads_are_better_than_turns() -> None:
    requests = draw_requests(Traffic(Lengths(300, 3000), Lengths(100, 800)), 6000, 5)
    waits = {
        policy: float(
            np.quantile(
                simulate_open(
                    service(replicas=4, policy=policy, max_sequences=24),  # type: ignore[arg-type]
                    requests,
                    32.0,
                ).ttft_seconds,
                0.99,
            )
        )
        for policy in ("least_loaded", "round_robin")
    }
    assert waits["least_loaded"] < 0.9 * waits["round_robin"]


def test_prompts_that_are_known_somewhere_go_there_until_it_is_too_much() -> None:
    requests = requests_of([1.0] * 200, 500, 200, shared=400)
    got = simulate_open(service(replicas=2, policy="cache_aware"), requests, 100.0, all_of())
    even = simulate_open(service(replicas=2, policy="least_loaded"), requests, 100.0, all_of())
    assert got.e2e_seconds.max() > even.e2e_seconds.max()
    unknown = requests_of([1.0] * 200, 500, 200, shared=100)
    same = simulate_open(service(replicas=2, policy="cache_aware"), unknown, 100.0, all_of())
    again = simulate_open(service(replicas=2, policy="least_loaded"), unknown, 100.0, all_of())
    assert (same.e2e_seconds == again.e2e_seconds).all()


def test_hopeless_loads_are_given_up() -> None:
    requests = poisson(5000, 1000, 500)
    got = simulate_open(service(max_sequences=8), requests, 1000.0)
    assert got.iterations < 100 and math.isinf(got.ttft_seconds.max())


def test_bursts_have_the_variance_that_is_asked_for() -> None:
    lengths = Lengths(10, 10)
    for burstiness in (0.25, 1.0, 4.0):
        drawn = draw_requests(Traffic(lengths, lengths, burstiness=burstiness), 40_000, 1)
        gaps = np.diff(drawn.arrival_units)
        assert gaps.mean() == pytest.approx(1, rel=0.03)
        assert gaps.var() == pytest.approx(burstiness, rel=0.08)


def test_replicas_that_begin_in_the_middle_are_as_busy_from_the_start() -> None:
    """Long answers take long to come up: without a start in the middle early ones are fast."""

    def growing(load: IterationLoad) -> object:
        return 0.005 + 5e-4 * (load.decode_sequences + 0.01 * load.prefill_tokens)

    one, rate, fresh, begun, settled = service(growing), 2.5, 0.0, 0.0, 0.0
    for seed in range(6):
        requests = draw_requests(Traffic(Lengths(200, 400), Lengths(500, 900)), 400, seed)
        fresh += simulate_open(one, requests, rate, all_of()).tpot_seconds[:40].mean()
        begun += simulate_open(one, requests, rate, Window(0, begun=20)).tpot_seconds[:40].mean()
        settled += simulate_open(one, requests, rate, Window(0.5)).tpot_seconds.mean()
    assert begun == pytest.approx(settled, rel=0.1)
    assert fresh < 0.8 * settled


def test_late_requests_keep_the_service_busy_and_are_not_counted() -> None:
    requests = draw_requests(Traffic(Lengths(200, 400), Lengths(500, 900)), 1000, 5)
    whole = simulate_open(service(), requests, 5.0, Window(0.1))
    part = simulate_open(service(), requests, 5.0, Window(0.1, cool_down=0.4))
    assert len(part.ttft_seconds) == 500 and np.isfinite(part.e2e_seconds).all()
    assert (part.e2e_seconds == whole.e2e_seconds[:500]).all()
    assert part.iterations < whole.iterations


class _Interrupted(Replica):
    """A replica whose stretches can be cut by nothing."""

    def cut(self, seconds: float) -> None:
        """Cut the stretch under way, as a request does that comes at `seconds`."""
        if self.loads[0]:
            self.submit(-1, seconds)
            assert self.waiting.pop() == -1
            self.loads[0] -= 1
