"""Objectives of a service, and what a simulation says about them.

Belongs here: comparing latencies with limits, and the intervals that the cost model's error and the
simulation's own spread make. Does not belong here: simulating (`routing`), measured latencies
(`hpctrain.serve.load.summary`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.serve.plan.documents import Promise
from hpctrain.serve.plan.routing import Outcome
from hpctrain.serve.plan.traffic import Floats
from hpctrain.spec.service import LATENCY_NAMES, LatencyName, ObjectivesSpec

# Of the standard normal distribution: bounds of 95 %, and what 9 of 10 do not exceed.
_NORMAL_975, _NORMAL_90 = 1.959963984540054, 1.2815515655446004


@dataclass(frozen=True)
class Objective:
    """A limit in seconds for one percentile (`p99`) of one latency."""

    latency: LatencyName
    percentile: str
    limit_seconds: float

    @property
    def share(self) -> float:
        """0.99 for `p99`."""
        return int(self.percentile.removeprefix("p")) / 100

    def __str__(self) -> str:
        return f"{self.percentile} of {self.latency}"


@dataclass(frozen=True)
class ModelError:
    """How far iterations are from their predicted time: standard deviation of the logarithm.

    A plan has to keep its promises with iterations that take `cautious` times as long, which 9 of
    10 measured ones do not exceed; 95 % lie between `fast` and `slow`.
    """

    log_deviation: float

    @property
    def cautious(self) -> float:
        return math.exp(_NORMAL_90 * self.log_deviation)

    @property
    def slow(self) -> float:
        return math.exp(_NORMAL_975 * self.log_deviation)

    @property
    def fast(self) -> float:
        return 1 / self.slow


EXACT = ModelError(0.0)


def objectives_of(spec: ObjectivesSpec) -> tuple[Objective, ...]:
    """List the limits that are given with the name of a latency."""
    return tuple(
        Objective(name, percentile, limit)
        for name in LATENCY_NAMES
        if name in spec.named
        for percentile, limit in spec.named[name].limits.items()
    )


def latencies(outcome: Outcome, name: LatencyName) -> Floats:
    return {
        "ttft": outcome.ttft_seconds,
        "tpot": outcome.tpot_seconds,
        "e2e": outcome.e2e_seconds,
    }[name]


def tightness(outcome: Outcome, objectives: Sequence[Objective]) -> tuple[float, Objective]:
    """Return the objective that is nearest to its limit, or furthest above: seconds over limit."""
    found = []
    for index, one in enumerate(objectives):
        value = quantile(latencies(outcome, one.latency), one.share).value
        # requests of one token have no time per further token
        found.append((0.0 if math.isnan(value) else value / one.limit_seconds, index))
    worst, index = max(found)
    return worst, objectives[index]


@dataclass(frozen=True)
class Simulated:
    """The same requests with iterations as predicted, and slower or faster by the model's error."""

    usual: Outcome
    cautious: Outcome
    slow: Outcome
    fast: Outcome


def promises(simulated: Simulated, objectives: Sequence[Objective]) -> tuple[Promise, ...]:
    """Compare each objective with the simulation; both the usual and the cautious one hold it.

    The chance of the simulation and the error of the cost model are independent: distances to the
    bounds add up as squares.
    """
    found = []
    for one in objectives:
        usual, cautious, fast, slow = (
            quantile(latencies(outcome, one.latency), one.share)
            for outcome in (simulated.usual, simulated.cautious, simulated.fast, simulated.slow)
        )
        below = math.hypot(usual.value - usual.low, usual.value - fast.value)
        above = math.hypot(usual.high - usual.value, slow.value - usual.value)
        found.append(
            Promise(
                latency=one.latency,
                percentile=one.percentile,
                limit_seconds=one.limit_seconds,
                predicted_seconds=usual.value,
                low_seconds=usual.value - below,
                high_seconds=usual.value + above,
                holds=max(usual.value, cautious.value) <= one.limit_seconds,
            )
        )
    return tuple(found)


# -- quantiles of simulated latencies, with the interval in which they lie ----------------------

_BATCHES = 20  # of consecutive requests; Law, "Simulation Modeling and Analysis", section 9.5.3


@dataclass(frozen=True)
class Quantile:
    """A quantile and the bounds between which it lies with a probability of 95 %."""

    value: float
    low: float
    high: float


def quantile(samples: Floats, share: float) -> Quantile:
    """Estimate a quantile of latencies that stand in the order of their requests.

    The bounds are order statistics (David and Nagaraja, "Order Statistics", section 7.1): of n
    independent samples, those with ranks n p -+ 1.96 sqrt(n p (1 - p)). Requests that are near to
    each other wait in the same queue, so n is divided by how much more the share of slow ones
    varies between batches of consecutive requests than it would if they were independent.
    """
    if len(samples) == 0:
        return Quantile(math.nan, math.nan, math.nan)
    ordered = np.sort(samples)
    value = _at(ordered, share)
    if not math.isfinite(value):
        return Quantile(value, value, value)
    independent = len(samples) / variance_ratio(samples > value, share)
    spread = _NORMAL_975 * math.sqrt(share * (1 - share) / independent)
    return Quantile(value, _at(ordered, share - spread), _at(ordered, share + spread))


def variance_ratio(slow: np.ndarray, share: float) -> float:
    """Compare the variance of batch means with that of independent samples; at least 1."""
    size = len(slow) // _BATCHES
    if size < 2:
        return 1.0
    means = slow[: size * _BATCHES].reshape(_BATCHES, size).mean(axis=1)
    independent = share * (1 - share) / size
    return max(1.0, float(means.var(ddof=1)) / independent)


def _at(ordered: Floats, share: float) -> float:
    """Return the order statistic of a share: the least that so many samples do not exceed."""
    rank = math.ceil(min(1.0, max(0.0, share)) * len(ordered))
    return float(ordered[max(0, rank - 1)])
