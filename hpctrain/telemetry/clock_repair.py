"""Repair timestamps that several machines wrote into one ordered log. Pure.

A later entry happened later, but its clock may have been set back or be wrong. Belongs here:
microsecond arithmetic, and making timestamps agree with the order. Does not belong here: what the
timestamps are of.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

TICKS_PER_SECOND = 1_000_000
# A time beyond this (the year 33,658) is a damaged number.
_LATEST_SECONDS = 1e12


def ticks(seconds: float) -> int:
    """Convert to whole microseconds, which add up exactly; returns 0 for a damaged number."""
    if not math.isfinite(seconds) or abs(seconds) > _LATEST_SECONDS:
        return 0
    return round(seconds * TICKS_PER_SECOND)


def moment(time: float) -> int | None:
    """Convert seconds since the epoch to ticks; returns None for a damaged time."""
    return ticks(time) or None


def seconds(count: int) -> float:
    """Convert ticks to seconds."""
    return count / TICKS_PER_SECOND


def non_decreasing_times(times: Sequence[int | None]) -> list[int]:
    """Make times, in the order written, non-decreasing with as few changes as possible.

    The longest non-decreasing subsequence is kept (patience sorting: Fredman 1975, Discrete
    Mathematics 11, 29-35). Every other time becomes that of the kept one before it, or of the first
    kept one. So one wrong clock does not change the times of the others. None is never kept.
    """
    known = [(index, time) for index, time in enumerate(times) if time is not None]
    in_order = [time for _, time in known]
    if len(known) == len(times) and in_order == sorted(in_order):  # as nearly always
        return in_order
    kept = _longest_non_decreasing(in_order)
    trusted = dict(known[position] for position in kept)
    latest = known[kept[0]][1] if kept else 0
    result = []
    for index in range(len(times)):
        latest = trusted.get(index, latest)
        result.append(latest)
    return result


def _longest_non_decreasing(times: Sequence[int]) -> list[int]:
    """Return the positions of the longest non-decreasing subsequence."""
    lowest_end: list[int] = []
    positions: list[int] = []
    before: list[int] = []
    for index, time in enumerate(times):
        length = bisect.bisect_right(lowest_end, time)
        before.append(positions[length - 1] if length else -1)
        if length == len(lowest_end):
            lowest_end.append(time)
            positions.append(index)
        else:
            lowest_end[length], positions[length] = time, index
    chain, index = [], positions[-1] if positions else -1
    while index >= 0:
        chain.append(index)
        index = before[index]
    return chain[::-1]
