"""How long each rank computes: a slow rank shows, and those that wait for it do not."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from trial_runs import Trial

from hpctrain.store.signs import RankTimes, read_record
from hpctrain.train.control import Control
from hpctrain.train.megatron import forward
from hpctrain.train.times import ComputeTimers, EventClock, RankClock

SLOW_RANK = 2
# Large against what computing takes here, so that a busy machine does not decide the test.
USUAL_SECONDS, SLOW_SECONDS = 0.05, 0.1
TP1_PP2_DP2 = dict(
    pipeline_model_parallel_size=2, pipeline_layer_split=((2,), (2,)), data_parallel_size=2
)


def _one_is_slow() -> None:
    real = forward.forward_step
    slow = os.environ["RANK"] == str(SLOW_RANK)

    def step(iterator: Any, model: Any) -> Any:
        time.sleep(SLOW_SECONDS if slow else USUAL_SECONDS)
        return real(iterator, model)

    forward.forward_step = step


def test_a_slow_rank_shows_and_only_it(trial: Callable[..., Trial]) -> None:
    """Its pipeline neighbour and its data-parallel one wait for it in every step. An evaluation
    in the window, of twice as many microbatches, is not counted."""
    slow = trial(rank_times_interval_steps=3, eval_interval_steps=3, eval_batches=6, **TP1_PP2_DP2)
    assert slow.train(prepare=_one_is_slow) == [0] * 4
    times = read_record(slow.run.rank_times, RankTimes)
    assert times is not None
    assert (times.epoch, times.first_step, times.last_step) == (0, 2, 4)
    assert len(times.nodes) == 4 and all(times.nodes)
    median = statistics.median(times.compute_seconds)
    assert 2 * USUAL_SECONDS < median < 2 * SLOW_SECONDS, "two microbatches in each step"
    odd = [rank for rank, each in enumerate(times.compute_seconds) if each >= 1.2 * median]
    assert odd == [SLOW_RANK], times.compute_seconds


def test_timing_changes_no_numbers(trial: Callable[..., Trial]) -> None:
    often = trial(rank_times_interval_steps=1, **TP1_PP2_DP2)
    never = trial(rank_times_interval_steps=100, **TP1_PP2_DP2)
    assert often.train() == never.train() == [0] * 4
    assert often.exact == never.exact
    assert often.run.rank_times.exists() and not never.run.rank_times.exists()


class _Event:
    """An event in a stream whose clock the test turns."""

    now_ms = 0.0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def record(self) -> None:
        self.at = self.now_ms

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_events_are_paired_and_used_again() -> None:
    clock = EventClock(_Event)
    for step in range(3):
        for _ in range(4):
            clock.start()
            _Event.now_ms += 250 * (step + 1)
            clock.stop()
            _Event.now_ms += 1000  # waiting
        assert clock.take_seconds() == step + 1
    assert clock.take_seconds() == 0
    assert _Event.made == 8


class _Alone(Control):
    """Control of one rank, for a test without processes."""

    def __init__(self) -> None:
        self.work = type("Work", (), {"wait": lambda self: None})()

    def start_sum(self, vector: Any) -> Any:
        return self.work


def test_measuring_costs_next_to_nothing() -> None:
    """At most 0.1 % of a step of 100 ms with 16 microbatches, on a machine that does other work."""
    timers = ComputeTimers()
    clock = RankClock(timers.take_seconds, _Alone(), 0, ("n0",), 1, 10**9, lambda times: None)
    best = float("inf")
    for step in range(50):
        began_at = time.perf_counter()
        for _ in range(16):
            for name in ("forward-compute", "backward-compute"):
                timers(name, log_level=2).start()
                timers(name).stop()
        clock.finished_step(step)
        best = min(best, time.perf_counter() - began_at)
    assert best <= 1e-3 * 0.1, best
