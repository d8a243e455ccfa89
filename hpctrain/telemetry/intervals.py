"""Merge, intersect and measure time intervals. Pure; any unit.

An interval is (begin, end). A merged list is sorted and has no overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted and without overlaps."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > begin:
            union.append((begin, end))
    return union


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two merged lists."""
    common: list[Interval] = []
    left = right = 0
    while left < len(one) and right < len(other):
        begin = max(one[left][0], other[right][0])
        end = min(one[left][1], other[right][1])
        if begin < end:
            common.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return common


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of merged intervals."""
    return sum(end - begin for begin, end in intervals)
