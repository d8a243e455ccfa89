"""Times that can be computed with, out of times that several machines have written down. Pure.

What is written later happened later; clocks may say otherwise, because they are set back, or one
of them is wrong. Belongs here: making times agree with the order. Does not belong here: what the
times are of.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

TICKS_PER_SECOND = 1_000_000
# A time beyond this (the year 33,658) is a damaged number.
_LATEST_SECONDS = 1e12


def ticks(seconds: float) -> int:
    """Whole microseconds: integers add up exactly. What is no number counts as 0."""
    if not math.isfinite(seconds) or abs(seconds) > _LATEST_SECONDS:
        return 0
    return round(seconds * TICKS_PER_SECOND)


def moment(time: float) -> int | None:
    """Ticks since the epoch; None for a damaged time."""
    return ticks(time) or None


def seconds(count: int) -> float:
    """From ticks."""
    return count / TICKS_PER_SECOND


def agreeing(times: Sequence[int | None]) -> list[int]:
    """The times in the order written, made non-decreasing with as few changes as possible.

    The longest non-decreasing subsequence is kept (patience sorting: Fredman 1975, Discrete
    Mathematics 11, 29-35); each other time becomes that of the kept one before it, or of the first
    kept one. So one wrong clock does not move what the others say. None is not kept.
    """
    known = [(index, time) for index, time in enumerate(times) if time is not None]
    run = _longest_run([time for _, time in known])
    trusted = dict(known[position] for position in run)
    latest = known[run[0]][1] if run else 0
    result = []
    for index in range(len(times)):
        latest = trusted.get(index, latest)
        result.append(latest)
    return result


def _longest_run(times: Sequence[int]) -> list[int]:
    """Positions of the longest non-decreasing subsequence."""
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
    run, index = [], positions[-1] if positions else -1
    while index >= 0:
        run.append(index)
        index = before[index]
    return run[::-1]
