"""The closed forms against a simulation that knows nothing of them: it plays runs, event by event.

Seeded. Every quantity is compared within a few standard errors of the simulation, and these are
made small enough to tell a wrong formula from a right one.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from typing import Any

import forecast_specimens as specimen
import pytest
from variants import varied

from hpctrain.plan.forecast.documents import Forecast, RunFacts
from hpctrain.plan.forecast.predict import Attempt, expected, forecast

REPEATS = 300


class Played:
    """One run, played: wall-clock seconds, what they went into, and how often what happened."""

    def __init__(self, forecast: Forecast, facts: RunFacts, work_per_step: float) -> None:
        self.stops, self.checkpoint = forecast.interruptions, forecast.checkpoint
        self.facts = facts
        self.work_left = facts.train_steps * work_per_step
        self.between_saves = forecast.interval.steps * work_per_step
        self.spent: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()

    def run(self, dice: random.Random) -> None:
        while self.work_left > 1e-6:
            self.happened["start"] += 1
            self.spent["waiting"] += self.facts.queue_seconds
            self.attempt(dice)

    def attempt(self, dice: random.Random) -> None:
        failure = dice.expovariate(1 / self.stops.failure_mtbf_seconds)
        preemption = self.stops.preemption_mtbf_seconds
        warning = dice.expovariate(1 / preemption) if preemption else float("inf")
        limit = float(self.facts.walltime) if self.facts.walltime else float("inf")
        last_call = limit - self.checkpoint.last_save_seconds
        end = min(failure, warning)
        clock = self.spend("starting", 0.0, self.stops.restart_seconds, end)
        done, kept, written_at, in_flight = 0.0, 0.0, float("inf"), 0.0
        while clock < end and clock < last_call and done < self.work_left - 1e-9:
            part = min(self.between_saves, self.work_left - done, last_call - clock)
            after = self.spend("working", clock, part, end)
            done += after - clock
            clock = after
            if clock >= end or done >= self.work_left - 1e-9 or clock >= last_call:
                break
            if self.checkpoint.asynchronous:
                if in_flight:  # the save before: wait for it, it may be through already
                    if written_at > clock:
                        clock = self.spend("saving", clock, written_at - clock, end)
                    if clock >= end:
                        break
                    kept, in_flight = in_flight, 0.0
                stage = min(self.checkpoint.stall_seconds, max(0.0, last_call - clock))
                clock = self.spend("saving", clock, stage, end)
                if clock < end:
                    in_flight, written_at = done, clock + self.checkpoint.write_seconds
            else:
                stall = min(self.checkpoint.stall_seconds, max(0.0, last_call - clock))
                clock = self.spend("saving", clock, stall, end)
                if clock < end:
                    kept = done
        if in_flight and written_at <= clock:
            kept = in_flight
        self.finish(clock, end, failure, warning, done, kept)

    def spend(self, what: str, clock: float, seconds: float, end: float) -> float:
        until = min(clock + seconds, end)
        self.spent[what] += until - clock
        return until

    def finish(
        self, clock: float, end: float, failure: float, warning: float, done: float, kept: float
    ) -> None:
        cut_off = clock >= end
        graceful = not cut_off or (warning < failure and self.stops.warned)
        if cut_off:
            self.happened["preemption" if warning < failure else "failure"] += 1
            if warning < failure:
                self.spent["waiting"] += self.facts.preemption_wait_seconds or 0.0
        if graceful:
            self.spent["saving"] += self.checkpoint.last_save_seconds
            kept = done
        self.spent["redone"] += done - kept
        self.spent["working"] -= done - kept
        self.work_left -= kept


def played(predicted: Forecast, facts: RunFacts, seed: int) -> list[Played]:
    dice, work = random.Random(seed), predicted.interval.seconds / predicted.interval.steps
    runs = []
    for _ in range(REPEATS):
        one = Played(predicted, facts, work)
        one.run(dice)
        runs.append(one)
    return runs


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "synchronous, no limit": ({"asynchronous": False}, {}, {}),
    "asynchronous, no limit": ({}, {}, {}),
    "rare saves": ({"every_steps": 1500}, {}, {}),
    "slow file system, saves overlap": (
        {"every_steps": 6},
        {"node_mtbf": "60d"},
        {"parameters": 10**12, "train_steps": 8000},
    ),
    "time limit of 12 h": ({}, {}, {"walltime": "12:00:00"}),
    "time limit shorter than the interval": (
        {"every_steps": 1500, "asynchronous": False},
        {},
        {"walltime": "3:00:00"},
    ),
    "preemptions with warning": (
        {},
        {"preemption_mtbf": "5h", "grace": "10min"},
        {"preemption_wait_seconds": 5000.0},
    ),
    "preemptions without warning": ({}, {"preemption_mtbf": "5h", "grace": "0s"}, {}),
    "everything at once": (
        {},
        {"preemption_mtbf": "9h", "grace": "10min"},
        {"walltime": "8:00:00", "queue_seconds": 1800.0, "preemption_wait_seconds": 600.0},
    ),
    "many failures": ({}, {"node_mtbf": "10d"}, {"train_steps": 10_000}),
    "short run in one slice": (
        {},
        {"node_mtbf": "60d"},
        {"train_steps": 17_280, "walltime": "7d"},
    ),
    "evaluations": ({"evaluation": {"every_steps": 100, "batches": 30}}, {}, {}),
}


@pytest.mark.parametrize("case", varied(CASES, *list(CASES)[::3]))
def test_agrees_with_played_runs(case: str) -> None:
    in_spec, in_profile, in_facts = CASES[case]
    facts = specimen.facts(**in_facts)
    spec = specimen.spec(**{"every_steps": 200, **in_spec})
    predicted = forecast(spec, specimen.profile(**in_profile), facts)
    runs = played(predicted, facts, seed=len(case))
    times = predicted.times
    check("all", times.total_seconds, [sum(run.spent.values()) for run in runs], 0.005)
    whole = times.total_seconds
    for what in ("saving", "redone", "starting", "waiting"):
        found = [run.spent[what] / whole for run in runs]
        check(what, getattr(times, f"{what}_seconds") / whole, found, 0.03)
    for what, number in (
        ("failure", predicted.failures),
        ("preemption", predicted.preemptions),
        ("start", predicted.starts),
    ):
        check(what, number, [float(run.happened[what]) for run in runs], 0.03)


def check(what: str, predicted: float, found: list[float], share: float) -> None:
    """Within `share` of the mean, or four standard errors where these are larger."""
    mean = statistics.fmean(found)
    error = statistics.stdev(found) / len(found) ** 0.5
    assert abs(predicted - mean) <= max(share * mean, 4 * error) + 1e-9, (what, predicted, mean)
    assert error <= 0.05 * mean + 1e-3, f"{what}: the simulation is too coarse to tell"


def test_parts_of_an_attempt_add_up() -> None:
    attempt = Attempt(600, 20, 50, 300, 70, 36_000, 1 / 20_000, 1 / 30_000, True)
    mean = expected(attempt)
    assert mean.failed + mean.preempted + mean.limited == pytest.approx(1)
    assert mean.failed == pytest.approx(mean.preempted * 1.5)
    assert 0 < mean.saved_seconds < attempt.full_work_seconds
