"""Which interval and how many spare nodes: every combination played, the best marked, and why.

Belongs here: the comparison and its sentences. Does not belong here: playing (`trials`), tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hpctrain.plan.forecast.intervals import best_steps
from hpctrain.simulate.scenario import Scenario
from hpctrain.simulate.trials import Outcome, Spread, play
from hpctrain.spec.document import Document

Goal = Literal["gpu-hours", "time"]
# Combinations that stop this much more often than the safest are no choice.
_MORE_STOPS = 0.05
_NOISE_ERRORS = 2.0
_QUANTILE = 0.95


class Choice(Document):
    """All outcomes, the position of the best, the reasons in sentences.

    `poisson_spares`: the 95 % quantile of the nodes that a job loses in `poisson_seconds`.
    """

    goal: Goal
    outcomes: tuple[Outcome, ...]
    best: int
    reasons: tuple[str, ...]
    poisson_spares: int
    poisson_seconds: float


def auto_interval_seconds(scenario: Scenario) -> float:
    """Daly's interval (`plan.forecast.intervals`), no shorter than a write in the background."""
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
    """Play `scenario` with each number of spare nodes and each interval (seconds).

    All combinations use the same seed, so that they differ less by chance than by themselves.
    """
    outcomes = []
    for spare_nodes in spares:
        for seconds in intervals:
            change = {"spare_nodes": spare_nodes, "interval_seconds": seconds}
            outcomes.append(play(scenario.model_copy(update=change), trials, seed))
    best = _best(outcomes, goal)
    attempt = min(scenario.walltime_seconds, scenario.work_seconds)
    return Choice(
        goal=goal,
        outcomes=tuple(outcomes),
        best=best,
        reasons=tuple(_reasons(outcomes, best, goal)),
        poisson_spares=poisson_spares(scenario, attempt),
        poisson_seconds=attempt,
    )


def poisson_spares(scenario: Scenario, seconds: float) -> int:
    """Spare nodes that last for `seconds` in 95 of 100 jobs, if a node stays away once it is lost:
    the quantile of a Poisson law with mean N r_f T, of the failures that take a node."""
    share = scenario.failure_mix.share_taking_nodes
    mean = scenario.nodes * scenario.failures_per_second * share * seconds
    count, log_term = 0, -mean
    total = math.exp(log_term)
    while total < _QUANTILE:
        count += 1
        log_term += math.log(mean) - math.log(count)
        total += math.exp(log_term)
    return count


def _measure(outcome: Outcome, goal: Goal) -> Spread:
    return outcome.days if goal == "time" else outcome.gpu_hours


def _allowed(outcomes: Sequence[Outcome]) -> list[int]:
    """Positions of those that are about as likely to reach the end as the safest."""
    safest = min(outcome.stopped for outcome in outcomes)
    return [i for i, one in enumerate(outcomes) if one.stopped <= safest + _MORE_STOPS]


def _best(outcomes: Sequence[Outcome], goal: Goal) -> int:
    return min(_allowed(outcomes), key=lambda i: (_measure(outcomes[i], goal).mean, i))


def _reasons(outcomes: Sequence[Outcome], best: int, goal: Goal) -> list[str]:
    allowed, chosen = _allowed(outcomes), outcomes[best]
    words = "fewest GPU-hours, spare nodes included" if goal == "gpu-hours" else "shortest time"
    lines = [f"{words}, of {len(allowed)} that are about as likely to reach the end as any"]
    mine = _measure(chosen, goal)
    alike = [i for i in allowed if i != best and _alike(_measure(outcomes[i], goal), mine)]
    if alike:
        lines.append(f"{len(alike)} others are as good within the noise of these trials")
    risky = len(outcomes) - len(allowed)
    if risky:
        lines.append(f"{risky} others stop more often: more than {_MORE_STOPS:.0%} above the best")
    if chosen.stopped:
        lines.append(
            f"{chosen.stopped:.0%} of the runs stop even so, most often: {chosen.stop_reasons[0]}"
        )
    return lines


def _alike(one: Spread, best: Spread) -> bool:
    """Within two standard errors of the difference of two means, taken as independent."""
    noise = _NOISE_ERRORS * math.hypot(one.standard_error, best.standard_error)
    return one.mean - best.mean < noise
