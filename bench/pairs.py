"""What pairs of neighbouring measurements say: the median of their ratios, and how sure it is.

Belongs here: that statistic. Does not belong here: measuring anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The median of `count` ratios; the true one lies between `low` and `high` with 95 %."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return (
            f"{self.median:6.4f}, median of {self.count} pairs, "
            f"between {self.low:.4f} and {self.high:.4f}"
        )


def ratio(ratios: Sequence[float]) -> Ratio:
    """Of one measurement to its neighbour; at least one."""
    return Ratio(statistics.median(ratios), *interval(ratios), len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The ranks between which the median lies with 95 %, whatever the distribution: n/2 -/+
    1.96 sqrt(n)/2 (Conover 1999, Practical Nonparametric Statistics, section 3.2)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = len(values) / 2 - half, len(values) / 2 + half
    return ordered[max(0, int(low))], ordered[min(len(values) - 1, int(high))]
