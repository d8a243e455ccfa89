"""Quantiles of measured latencies, with intervals that assume no distribution.

The interval of a quantile is a pair of order statistics (H. A. David and H. N. Nagaraja, "Order
Statistics", 3rd edition, section 7.1): the number of n independent samples below the quantile of
share p is binomial(n, p), whatever the samples are distributed as. Belongs here: ranks, and the
samples that have them. Does not belong here: where samples come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.serve.plan.quantiles import variance_ratio
from hpctrain.serve.plan.traffic import Floats

CONFIDENCE = 0.95
# Standard deviations beyond which binomial probabilities are nothing beside the tails asked for.
_WINDOW = 9.0


@dataclass(frozen=True)
class RankInterval:
    """Ranks from 1 between which a quantile lies; None: the samples do not bound it there."""

    low: int | None
    high: int | None


def rank_interval(samples: int, share: float, confidence: float = CONFIDENCE) -> RankInterval:
    """Return the ranks whose samples bound a quantile of independent samples.

    The quantile is below the sample of rank `low`, and above that of rank `high`, with a
    probability of at most (1 - confidence) / 2 each.
    """
    if samples < 1:
        return RankInterval(None, None)
    tail = (1 - confidence) / 2
    centre = samples * share
    reach = math.ceil(_WINDOW * math.sqrt(centre * (1 - share))) + 20
    first, last = max(0, math.floor(centre) - reach), min(samples, math.ceil(centre) + reach)
    chances = [_binomial(samples, share, count) for count in range(first, last + 1)]
    below, low = 0.0, first
    for low, chance in enumerate(chances, first):  # noqa: B007
        if below + chance > tail:
            break
        below += chance
    above, high = 0.0, last
    for high in range(last, first - 1, -1):
        if above + chances[high - first] > tail:
            break
        above += chances[high - first]
    high += 1
    return RankInterval(low if low >= 1 else None, high if high <= samples else None)


def _binomial(samples: int, share: float, count: int) -> float:
    """Return the probability of `count` successes, by logarithms of the gamma function."""
    chosen = math.lgamma(samples + 1) - math.lgamma(count + 1) - math.lgamma(samples - count + 1)
    return math.exp(chosen + count * math.log(share) + (samples - count) * math.log1p(-share))


@dataclass(frozen=True)
class SampleQuantile:
    """A quantile of samples and its interval; infinite where requests failed or samples are few.

    `independent`: how many independent samples say as much as these.
    """

    value: float
    low: float
    high: float
    samples: int
    independent: int


def sample_quantile(
    samples: Sequence[float], share: float, confidence: float = CONFIDENCE
) -> SampleQuantile:
    """Estimate a quantile of latencies that stand in the order of their requests.

    Neighbouring requests wait in the same queue, so that n of them say less than n independent
    ones: their number is divided by how much more the share of slow ones varies between batches
    than it would by chance (`variance_ratio`), and ranks are those of that number.
    """
    count = len(samples)
    if count == 0:
        return SampleQuantile(math.nan, math.nan, math.nan, 0, 0)
    given = np.asarray(samples, dtype=np.float64)
    ordered = np.sort(given)
    value = _at(ordered, share)
    independent = max(1, round(count / variance_ratio(given > value, share)))
    ranks = rank_interval(independent, share, confidence)
    low, high = 0.0, math.inf
    if ranks.low is not None:
        low = float(ordered[max(0, math.floor(ranks.low * count / independent) - 1)])
    if ranks.high is not None:
        high = float(ordered[min(count, math.ceil(ranks.high * count / independent)) - 1])
    return SampleQuantile(value, low, high, count, independent)


def sample_at(samples: Sequence[float], share: float) -> float:
    """Return the least sample that a share of them does not exceed; 0 without samples."""
    return _at(sorted(samples), share) if samples else 0.0


def _at(ordered: Sequence[float] | Floats, share: float) -> float:
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])
