"""Simulate many runs of one scenario: means, quantiles, shares, and a choice among scenarios.

Does not belong here: the course of one run (`simulated_run`), tables.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from hpctrain.judge.causes import Cause
from hpctrain.plan.forecast.intervals import best_steps
from hpctrain.simulate.scenario import Scenario
from hpctrain.simulate.simulated_run import RunOutcome, SimulatedRun, decisions_about
from hpctrain.spec.document import Document
from hpctrain.telemetry.timeline import Category

Name = TypeVar("Name", Category, Cause)


class Distribution(Document):
    """Mean, standard error of the mean, and the quantiles 5 % and 95 % over the trials.

    Quantiles of times have the doubt about the step time in them; means are as predicted.
    """

    mean: float
    standard_error: float
    p5: float
    p95: float


class Outcome(Document):
    """Statistics of `trials` simulated runs of one scenario. Seconds are means per run.

    Runs that stopped count in `stopped` (a share) and in nothing else. If all runs stopped, `days`,
    `gpu_hours` and the ratios are those up to the stop.
    """

    trials: int
    spare_nodes: int
    interval_seconds: float
    ettr: Distribution
    ettr_without_queue: Distribution
    days: Distribution
    gpu_hours: Distribution
    seconds: dict[str, float]
    lost_seconds: dict[str, float]
    failures: float
    requeues: float
    launches: float
    preemptions: float
    repair_seconds: float
    stopped: float
    stop_reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Asked:
    """A scenario as a key: by its text, because documents with tables have no hash."""

    text: str
    scenario: Scenario = field(compare=False)


def simulate(scenario: Scenario, trials: int, seed: int) -> Outcome:
    """Simulate a scenario. The same seed gives the same numbers, on every machine.

    An outcome is kept, and given again: most points of a sweep are the same run to a forecast.
    """
    return _simulated(_Asked(repr(scenario), scenario), trials, seed)


@functools.lru_cache(maxsize=256)
def _simulated(asked: _Asked, trials: int, seed: int) -> Outcome:
    scenario = asked.scenario
    decisions = decisions_about(scenario)
    draws = (random.Random(f"{seed}/{n}") for n in range(trials))
    runs = [SimulatedRun(scenario, draw, decisions).run() for draw in draws]
    ended = [run for run in runs if run.stopped is None]
    shown = ended or runs
    paces = _paces(scenario.step_deviation, len(shown), seed)
    held_gpus, start = scenario.held_gpus, scenario.restart_seconds
    reasons = Counter(run.stopped for run in runs if run.stopped is not None)
    return Outcome(
        trials=trials,
        spare_nodes=scenario.spare_nodes,
        interval_seconds=scenario.work_between_saves,
        ettr=_spread([_productive(run) / run.wall_seconds for run in shown]),
        ettr_without_queue=_spread([_productive(run) / run.occupied_seconds for run in shown]),
        days=_spread(
            [run.wall_seconds / 86400 for run in shown],
            paces,
            (scenario.first_wait_seconds + start) / 86400,
        ),
        gpu_hours=_spread(
            [held_gpus * run.occupied_seconds / 3600 for run in shown],
            paces,
            held_gpus * start / 3600,
        ),
        seconds=_means([run.seconds for run in shown]),
        lost_seconds=_means([run.lost_seconds for run in shown]),
        failures=statistics.fmean(sum(run.failures.values()) for run in shown),
        requeues=statistics.fmean(run.requeues for run in shown),
        launches=statistics.fmean(run.launches for run in shown),
        preemptions=statistics.fmean(run.preemptions for run in shown),
        repair_seconds=statistics.fmean(run.repair_seconds for run in shown),
        stopped=1 - len(ended) / trials,
        stop_reasons=tuple(reason for reason, _ in reasons.most_common(3)),
    )


def _paces(deviation: float, count: int, seed: int) -> list[float]:
    """Draw by how much each run is slower or faster than predicted, the median 1.

    One quantile of the lognormal distribution for each run, in an order of their own. A run that
    steps more slowly has more failures in the same measure, so that all of its time stretches but
    for the first start.
    """
    if not deviation:
        return []
    normal = statistics.NormalDist(0.0, deviation)
    paces = [math.exp(normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
    random.Random(f"{seed}/pace").shuffle(paces)
    return paces


def _productive(run: RunOutcome) -> float:
    return run.seconds.get(Category.PRODUCTIVE, 0.0)


def _spread(
    values: Sequence[float], paces: Sequence[float] = (), once: float = 0.0
) -> Distribution:
    """Compute the statistics of values; with `paces`, quantiles of values times these.

    `once` of each value is spent once, however long the steps are.
    """
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    drawn = zip(values, paces, strict=True) if paces else ()
    paced = [min(once, value) + max(0.0, value - once) * pace for value, pace in drawn]
    ordered = sorted(paced or values)
    return Distribution(
        mean=statistics.fmean(values),
        standard_error=deviation / math.sqrt(len(values)),
        p5=_quantile(ordered, 0.05),
        p95=_quantile(ordered, 0.95),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _means(tables: Sequence[Mapping[Name, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for table in tables:
        for name, seconds in table.items():
            sums[str(name)] += seconds
    return {name: total / len(tables) for name, total in sorted(sums.items())}


# -- A checkpoint interval and a number of spare nodes, of every combination ----------------------


Goal = Literal["gpu-hours", "time"]
# Combinations that stop more often than the safest by more than this share are excluded.
_MORE_STOPS = 0.05
_NOISE_ERRORS = 2.0
_QUANTILE = 0.95


class Choice(Document):
    """All outcomes, the index of the best, and the reasons as sentences.

    `poisson_spares`: the 95 % quantile of the nodes that a job loses in `poisson_seconds`.
    """

    goal: Goal
    outcomes: tuple[Outcome, ...]
    best: int
    reasons: tuple[str, ...]
    poisson_spares: int
    poisson_seconds: float


def auto_interval_seconds(scenario: Scenario) -> float:
    """Return Daly's interval (`plan.forecast.intervals`), not shorter than a background write."""
    if math.isinf(scenario.mttf_seconds):
        return scenario.interval_seconds
    stall, write = scenario.save_stall_seconds, scenario.save_write_seconds
    steps = best_steps(max(stall, 1e-9), scenario.mttf_seconds, write, scenario.step_seconds)
    return steps * scenario.step_seconds


def choose(
    scenario: Scenario,
    spares: Sequence[int],
    intervals: Sequence[float],
    trials: int,
    seed: int,
    goal: Goal = "gpu-hours",
) -> Choice:
    """Simulate `scenario` with each number of spare nodes and each interval (seconds).

    All combinations use the same seed, which reduces the noise of their differences.
    """
    outcomes = []
    for spare_nodes in spares:
        for seconds in intervals:
            change = {"spare_nodes": spare_nodes, "interval_seconds": seconds}
            outcomes.append(simulate(scenario.model_copy(update=change), trials, seed))
    # about as likely to reach the end as the safest combination
    limit = min(outcome.stopped for outcome in outcomes) + _MORE_STOPS
    allowed = [index for index, outcome in enumerate(outcomes) if outcome.stopped <= limit]
    best = min(allowed, key=lambda index: (_measure(outcomes[index], goal).mean, index))
    attempt = min(scenario.walltime_seconds, scenario.work_seconds)
    return Choice(
        goal=goal,
        outcomes=tuple(outcomes),
        best=best,
        reasons=tuple(_reasons(outcomes, allowed, best, goal)),
        poisson_spares=poisson_spares(scenario, attempt),
        poisson_seconds=attempt,
    )


def poisson_spares(scenario: Scenario, seconds: float) -> int:
    """Return the spare nodes that suffice for `seconds` in 95 of 100 jobs without repairs.

    It is the quantile of a Poisson distribution with mean N r_f T of the failures that take a node.
    """
    share = scenario.failure_mix.share_taking_nodes
    mean = scenario.nodes * scenario.failures_per_second * share * seconds
    count, log_term = 0, -mean
    total = math.exp(log_term)
    while total < _QUANTILE:
        count += 1
        log_term += math.log(mean) - math.log(count)
        total += math.exp(log_term)
    return count


def _measure(outcome: Outcome, goal: Goal) -> Distribution:
    return outcome.days if goal == "time" else outcome.gpu_hours


def _reasons(
    outcomes: Sequence[Outcome], allowed: Sequence[int], best: int, goal: Goal
) -> list[str]:
    chosen = outcomes[best]
    target = "fewest GPU-hours, spare nodes included" if goal == "gpu-hours" else "shortest time"
    lines = [f"{target}, of {len(allowed)} that are about as likely to reach the end as any"]
    measure = _measure(chosen, goal)
    equal = 0
    for index in allowed:
        other = _measure(outcomes[index], goal)
        # two standard errors of the difference of two means, taken as independent
        noise = _NOISE_ERRORS * math.hypot(other.standard_error, measure.standard_error)
        equal += index != best and other.mean - measure.mean < noise
    if equal:
        lines.append(f"{equal} others are as good within the noise of these trials")
    risky = len(outcomes) - len(allowed)
    if risky:
        lines.append(f"{risky} others stop more often: more than {_MORE_STOPS:.0%} above the best")
    if chosen.stopped:
        lines.append(
            f"{chosen.stopped:.0%} of the runs stop even so, most often: {chosen.stop_reasons[0]}"
        )
    return lines
