"""Arithmetic of intervals of time: what overlaps, what is left. Pure; any unit.

An interval is (begin, end); a list of them is sorted and without overlaps once it was `merged`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, sorted and without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The moments that are in both; both are merged."""
    found: list[Interval] = []
    left = right = 0
    while left < len(one) and right < len(other):
        begin = max(one[left][0], other[right][0])
        end = min(one[left][1], other[right][1])
        if begin < end:
            found.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Of merged intervals."""
    return sum(end - begin for begin, end in intervals)
