"""Many runs of one scenario, and what they say: means, quantiles, shares.

Belongs here: repeating and adding up. Does not belong here: the course of one run (`trial`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from hpctrain.simulate.scenario import Scenario
from hpctrain.simulate.trial import Played, Trial
from hpctrain.spec.document import Document
from hpctrain.supervise.judge.causes import Cause
from hpctrain.telemetry.segments import Category

Name = TypeVar("Name", Category, Cause)


class Spread(Document):
    """Mean, standard error of the mean, and the quantiles 5 % and 95 % over the trials."""

    mean: float
    standard_error: float
    p5: float
    p95: float


class Outcome(Document):
    """What playing a scenario `trials` times has given. Seconds are means for each run.

    Runs that stopped count in `stopped` (a share) and in nothing else, unless all of them did:
    then `days`, `gpu_hours` and the ratios are those up to the stop.
    """

    trials: int
    spare_nodes: int
    interval_seconds: float
    ettr: Spread
    ettr_without_queue: Spread
    days: Spread
    gpu_hours: Spread
    seconds: dict[str, float]
    lost_seconds: dict[str, float]
    failures: float
    requeues: float
    stopped: float
    stop_reasons: tuple[str, ...]


def play(scenario: Scenario, trials: int, seed: int) -> Outcome:
    """Play a scenario. The same seed gives the same numbers, on every machine."""
    runs = [Trial(scenario, random.Random(f"{seed}/{n}")).play() for n in range(trials)]
    ended = [run for run in runs if run.stopped is None]
    shown = ended or runs
    held_gpus = scenario.held_gpus
    return Outcome(
        trials=trials,
        spare_nodes=scenario.spare_nodes,
        interval_seconds=scenario.work_between_saves,
        ettr=_spread([_productive(run) / run.wall_seconds for run in shown]),
        ettr_without_queue=_spread([_productive(run) / run.occupied_seconds for run in shown]),
        days=_spread([run.wall_seconds / 86400 for run in shown]),
        gpu_hours=_spread([held_gpus * run.occupied_seconds / 3600 for run in shown]),
        seconds=_means([run.seconds for run in shown]),
        lost_seconds=_means([run.lost_seconds for run in shown]),
        failures=statistics.fmean(sum(run.failures.values()) for run in shown),
        requeues=statistics.fmean(run.requeues for run in shown),
        stopped=1 - len(ended) / trials,
        stop_reasons=_reasons(runs),
    )


def _productive(run: Played) -> float:
    return run.seconds.get(Category.PRODUCTIVE, 0.0)


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    return Spread(
        mean=statistics.fmean(ordered),
        standard_error=deviation / math.sqrt(len(ordered)),
        p5=_quantile(ordered, 0.05),
        p95=_quantile(ordered, 0.95),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _means(tables: Sequence[Mapping[Name, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for table in tables:
        for name, seconds in table.items():
            sums[str(name)] += seconds
    return {name: total / len(tables) for name, total in sorted(sums.items())}


def _reasons(runs: Sequence[Played]) -> tuple[str, ...]:
    """Why runs stopped, the most frequent reasons first, three at most."""
    counted = Counter(run.stopped for run in runs if run.stopped is not None)
    return tuple(reason for reason, _ in counted.most_common(3))
