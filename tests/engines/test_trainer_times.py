"""How long each rank computes: a slow rank shows, and those that wait for it do not."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deepspeed_trials import ZERO
from trial_runs import EVALUATING, GPT, MODULE_GPT, PP2, Trial, keep_quietest_window, trained

from hpctrain.records.run_records import RankTimes, read_record
from hpctrain.train.datasets.token_samples import TokenSamples
from hpctrain.train.engines.megatron import engine
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import ComputeTimers, EventClock, RankClock, StepClock

SLOW_RANK = 2
# Large against what computing takes here (milliseconds), so that a busy machine does not decide;
# of several windows the quietest is looked at, so that its pauses do not either.
USUAL_SECONDS, SLOW_SECONDS = 0.05, 0.3
WINDOWS = dict(rank_times_interval_steps=2, train_steps=8, lr_decay_steps=8)


def _one_is_slow() -> None:
    keep_quietest_window()
    real = engine.forward_step
    slow = os.environ["RANK"] == str(SLOW_RANK)

    def step(iterator: Any, model: Any) -> Any:
        time.sleep(SLOW_SECONDS if slow else USUAL_SECONDS)
        return real(iterator, model)

    engine.forward_step = step


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
def test_a_slow_rank_shows_and_only_it(trial: Callable[..., Trial]) -> None:
    """Its pipeline neighbour and its data-parallel one wait for it in every step. An evaluation
    in each window, of twice as many microbatches, is not counted."""
    slow = trial(eval_interval_steps=2, eval_batches=4, **WINDOWS, **PP2, data_parallel_size=2)
    assert slow.train(prepare=_one_is_slow) == [0] * 4
    times = read_record(slow.run.rank_times, RankTimes)
    assert times is not None
    assert (times.epoch, times.last_step) == (0, times.first_step + 1)
    assert times.first_step in (2, 4, 6)
    assert len(times.nodes) == 4 and all(times.nodes)
    others = list(times.compute_seconds)
    its_own = others.pop(SLOW_RANK)
    assert min(others) > 2 * USUAL_SECONDS, "two microbatches in each step"
    assert its_own > 2 * SLOW_SECONDS and its_own > max(others), times.compute_seconds


def _one_reads_slowly() -> None:
    keep_quietest_window()
    real = TokenSamples.microbatches
    slow = os.environ["RANK"] == "1"

    def microbatches(self: TokenSamples, *place: Any) -> Iterator[Any]:
        for batch in real(self, *place):
            time.sleep(SLOW_SECONDS if slow else 0)
            yield batch

    TokenSamples.microbatches = microbatches


@pytest.mark.variant("test_the_time_of_each_rank")
@pytest.mark.parametrize(
    "base",
    [GPT, *(base for base in (MODULE_GPT, ZERO))],
    ids=lambda base: base.get("engine", ""),
)
def test_waiting_for_data_is_told_apart(base: dict[str, Any], trial: Callable[..., Trial]) -> None:
    slow = trial({**base, **WINDOWS}, data_parallel_size=2)
    assert slow.train(prepare=_one_reads_slowly) == [0] * 2
    times = read_record(slow.run.rank_times, RankTimes)
    assert times is not None
    quick, waited = times.data_seconds
    assert waited >= 2 * SLOW_SECONDS, "two microbatches in each step"
    assert quick < waited, "only the other rank reads slowly"
    others = times.compute_seconds, times.backward_seconds, times.optimizer_seconds
    assert times.compute_seconds[0] > 0 and times.optimizer_seconds[0] > 0
    parts = (*others, times.data_seconds, times.rest_seconds)
    for rank in range(2):
        assert sum(each[rank] for each in parts) == pytest.approx(times.step_seconds[rank])
    assert min(times.peak_memory_bytes) > 10**7 and len(times.reserved_memory_bytes) == 2


def test_a_record_of_an_older_version_is_read() -> None:
    old = RankTimes.model_validate_json(
        '{"epoch":1,"first_step":2,"last_step":4,"time":0,"compute_seconds":[1,2],"nodes":["a","b"]}'
    )
    assert old.compute_seconds == (1, 2) and old.rest_seconds == old.data_seconds == ()


@pytest.mark.variant("test_the_time_of_each_rank")
def test_timing_changes_no_numbers(trial: Callable[..., Trial]) -> None:
    settings = dict(PP2, dropout=0.1, **EVALUATING)
    often, never = trial(rank_times_interval_steps=1, **settings), trained(**settings)
    assert never.config.rank_times_interval_steps > 6
    assert often.train() == [0] * 2
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


def test_steps_that_do_not_count_are_in_no_window() -> None:
    told: list[RankTimes] = []
    clock = RankClock(StepClock(), _Alone(), 0, ("n0",), 1, 3, told.append)
    for step in range(1, 9):
        clock.finished_step(step, 9.0 if step in (1, 3, 4) else 1.0, counts=step not in (3, 4))
    assert [(one.first_step, one.last_step, one.step_seconds) for one in told] == [(2, 6, (1.0,))]


def test_measuring_costs_next_to_nothing() -> None:
    """In a step with 16 microbatches 1500 calls of functions, of Python and of C, which are
    0.1 % of a step of 100 ms."""
    inner = StepClock()
    timers = ComputeTimers(inner)
    clock = RankClock(inner, _Alone(), 0, ("n0",), 1, 10**9, lambda times: None)
    batches = inner.reading(iter(range(10**6)))

    def step(number: int) -> None:
        for _ in range(16):
            for name in ("forward-compute", "backward-compute"):
                timers(name, log_level=2).start()
                next(batches)
                timers(name).stop()
        clock.finished_step(number, 0.1)

    assert calls_of(lambda: step(1)) <= 1500


def calls_of(work: Callable[[], None]) -> int:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)
