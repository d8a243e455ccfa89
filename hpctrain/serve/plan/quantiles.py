"""Quantiles of simulated latencies, with the interval in which they lie.

Belongs here: order statistics of samples that are not independent. Does not belong here: the error
of the cost model behind them (`promises`), where samples come from (`routing`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpctrain.serve.plan.traffic import Floats

_BATCHES = 20  # of consecutive requests; Law, "Simulation Modeling and Analysis", section 9.5.3
_NORMAL_975 = 1.959963984540054  # of the standard normal distribution


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
