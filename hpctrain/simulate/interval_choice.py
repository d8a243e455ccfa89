"""Choose a checkpoint interval and a number of spare nodes by simulating every combination.

Belongs here: the comparison and its reasons. Does not belong here: simulating (see
`monte_carlo`), tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hpctrain.plan.forecast.intervals import best_steps
from hpctrain.simulate.monte_carlo import Distribution, Outcome, simulate
from hpctrain.simulate.scenario import Scenario
from hpctrain.spec.document import Document

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
