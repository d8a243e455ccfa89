"""Latencies under constant load: limits that hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_specimens import ENGINE, GPU, replica

from bench.serving_steady_state import (
    ClosedLoad,
    OpenLoad,
    closed_loop,
    disaggregated,
    grouped_prompt_seconds,
    kept_tokens,
    open_loop,
    prompt_seconds,
)
from hpctrain.serve.plan.served_model import ReplicaLayout
from hpctrain.serve.plan.step_time import IterationLoad, iteration_seconds, largest_batch

BIG = replica(gpu=replace(GPU, memory=288e9))


def test_a_single_stream_waits_for_nobody() -> None:
    load = ClosedLoad(1000.0, 100.0, 1.0)
    alone = closed_loop(BIG, load)
    pure = iteration_seconds(BIG, IterationLoad(0.0, 0.0, 1.0, 1050.0))
    assert float(alone.tpot_mean) == pytest.approx(float(pure), rel=1e-3)
    busy = IterationLoad(0.0, 0.0, 1.0, 1050.0)
    prompt = prompt_seconds(BIG, 1000.0, busy, pure)
    assert float(alone.ttft_mean) == pytest.approx(float(prompt), rel=0.02)


def test_streams_share_the_time_of_prompts() -> None:
    # short answers: every answer of O tokens meets the prompts of the others
    load = ClosedLoad(1000.0, np.array([10.0, 1000.0]), 32.0)
    found = np.asarray(closed_loop(BIG, load).tpot_mean)
    assert found[0] > 2 * found[1]


def test_throughput_grows_and_latency_too() -> None:
    found = closed_loop(BIG, ClosedLoad(1000.0, 500.0, np.array([1.0, 4.0, 16.0, 64.0])))
    assert (np.diff(found.request_rate) > 0).all()
    assert (np.diff(found.tpot_mean) > 0).all() and (np.diff(found.ttft_mean) > 0).all()


def test_streams_beyond_the_memory_wait_in_front() -> None:
    case = replica()
    few, many = (closed_loop(case, ClosedLoad(4000.0, 1000.0, n)) for n in (20.0, 2000.0))
    assert float(many.in_service) < 2000
    assert float(many.ttft_mean) > 20 * float(few.ttft_mean)
    # Little's law: what is in service times its time there, over the rate
    cycle = float(many.in_service) / float(many.request_rate)
    total = float(many.ttft_mean) + 1000 * float(many.tpot_mean)
    assert total == pytest.approx(2000 / float(many.request_rate)) and total > cycle


def test_equal_lengths_keep_prompts_together() -> None:
    bunched = replica(gpu=replace(GPU, memory=288e9), bunched_prompts=1e9)
    load = ClosedLoad(1000.0, 200.0, 33.0, equal_lengths=1.0)
    spread = closed_loop(bunched, replace(load, equal_lengths=0.0))
    together = closed_loop(bunched, load)
    assert float(together.ttft_mean) > 3 * float(spread.ttft_mean)
    assert float(together.tpot_mean) < float(spread.tpot_mean)


def test_the_first_prompts_of_a_measurement_wait_for_each_other() -> None:
    # 64 prompts of 1024 tokens at once, eight in each iteration of 8192 tokens: the mean one has
    # its first token after (64 + 8) / 2 of them
    first = replica(gpu=replace(GPU, memory=288e9), prompts_first=1.0)
    load = ClosedLoad(1024.0, 500.0, 64.0, requests_per_stream=1.0)
    each = float(grouped_prompt_seconds(first, 1024.0, 8.0))
    assert float(closed_loop(first, load).ttft_mean) == pytest.approx(36 * each, rel=0.02)
    later = closed_loop(first, replace(load, requests_per_stream=1e9))
    assert float(later.ttft_mean) < 2 * each
    tenth = closed_loop(first, replace(load, requests_per_stream=10.0))
    assert float(later.ttft_mean) < float(tenth.ttft_mean) < 36 * each


def test_prompts_that_come_while_nobody_looks_are_computed_together() -> None:
    load = ClosedLoad(1024.0, 500.0, 64.0, requests_per_stream=1e9)
    seldom = replace(load, waited_iterations=20.0)
    plain, held = (closed_loop(BIG, one) for one in (load, seldom))
    # 20 iterations in the mean, and 2 x 20 x 64 / 500 = 5 prompts that came meanwhile
    pure = float(iteration_seconds(BIG, IterationLoad(0.0, 0.0, 64.0, 1274.0)))
    each = float(grouped_prompt_seconds(BIG, 1024.0, 8.0))
    assert float(held.ttft_mean) > float(plain.ttft_mean) + 19 * pure + 4 * each


def test_prompts_alone_take_longer_than_beside_decoding() -> None:
    """The weights are read once more."""
    alone = replica(gpu=replace(GPU, memory=288e9), prompts_first=1.0)
    load = ClosedLoad(64.0, 100.0, 32.0)
    assert float(closed_loop(alone, load).tpot_mean) > float(closed_loop(BIG, load).tpot_mean)


@pytest.mark.parametrize(("drafted", "kept"), [(0, 1.0), (1, 1.5), (3, 1.875)])
def test_drafted_tokens_are_kept_with_falling_chance(drafted: int, kept: float) -> None:
    # acceptance 0.5: 1 + 1/2 + 1/4 + 1/8 (arXiv 2211.17192, equation 1)
    assert float(kept_tokens(ENGINE, drafted)) == kept


def test_speculation_helps_small_batches() -> None:
    load = ClosedLoad(1000.0, 500.0, 1.0)
    plain, ahead = (closed_loop(BIG, replace(load, drafted_tokens=n)).tpot_mean for n in (0.0, 3.0))
    assert float(ahead) < 0.7 * float(plain)


def test_separate_pools_leave_decoding_alone() -> None:
    load = ClosedLoad(8000.0, 200.0, 32.0)
    apart = disaggregated(BIG, BIG, (4.0, 1.0), load)
    mixed = closed_loop(BIG, load)
    assert float(apart.tpot_mean) < float(mixed.tpot_mean)
    pure = iteration_seconds(BIG, IterationLoad(0.0, 0.0, 32.0, 8100.0))
    assert float(apart.tpot_mean) <= float(pure)


def test_a_narrow_prefill_pool_makes_streams_wait() -> None:
    load = ClosedLoad(8000.0, 100.0, 256.0)
    one, many = (disaggregated(BIG, BIG, (n, 8.0), load) for n in (1.0, 64.0))
    assert float(one.ttft_mean) > 5 * float(many.ttft_mean)
    assert float(one.request_rate) < float(many.request_rate)


def test_an_idle_open_loop_is_a_single_stream() -> None:
    found = open_loop(BIG, OpenLoad(500.0, 100.0, 1e-6))
    pure = iteration_seconds(BIG, IterationLoad(0.0, 0.0, 1.0, 550.0))
    assert float(found.tpot_mean) == pytest.approx(float(pure), rel=1e-3)
    assert float(found.request_rate) == pytest.approx(1e-6)


def test_an_open_loop_obeys_littles_law() -> None:
    found = open_loop(BIG, OpenLoad(300.0, 300.0, 5.0))
    expected = 5.0 * 300 * float(found.tpot_mean)
    assert float(found.in_service) == pytest.approx(expected, rel=0.01)
    assert float(found.ttft_p99) > float(found.ttft_mean) > float(found.tpot_mean)


def test_a_rate_that_cannot_be_served_fills_the_batch() -> None:
    found = open_loop(replica(), OpenLoad(300.0, 300.0, 1e4))
    room = largest_batch(replica(), 300.0 + 300 * 0.5)
    assert float(found.request_rate) < 1e4
    assert float(found.in_service) == pytest.approx(float(room), rel=0.01)


def test_arrays_give_what_numbers_give() -> None:
    streams = np.array([1.0, 8.0, 64.0])
    together = closed_loop(BIG, ClosedLoad(2000.0, 300.0, streams))
    for index, n in enumerate(streams):
        alone = closed_loop(BIG, ClosedLoad(2000.0, 300.0, float(n)))
        assert np.asarray(together.ttft_mean)[index] == pytest.approx(float(alone.ttft_mean))
        assert np.asarray(together.tpot_mean)[index] == pytest.approx(float(alone.tpot_mean))


def test_a_replica_of_more_gpus_is_faster() -> None:
    load = ClosedLoad(2000.0, 300.0, 16.0)
    cases = [replica(layout=ReplicaLayout(tp), gpu=replace(GPU, memory=288e9)) for tp in (2, 4, 8)]
    times = [float(closed_loop(case, load).tpot_mean) for case in cases]
    assert times == sorted(times, reverse=True)
