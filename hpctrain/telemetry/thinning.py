"""Curves and timelines of at most so many points: pictures of long runs stay small. Pure.

Belongs here: leaving points out without losing what can be seen. Does not belong here: reading
metrics, drawing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from hpctrain.telemetry.timeline import Segment

Point = tuple[float, float | None]


def is_number(value: float | None) -> bool:
    """Return whether a value is known and finite."""
    return value is not None and math.isfinite(value)


def thinned(points: Sequence[Point], parts: int = 600) -> list[Point]:
    """Keep the first, lowest, highest and last point of each part of a curve, so spikes survive.

    Points ascend in x, and parts have the same width in it. Of the points without a finite value
    one per part stays, which is a gap in the curve.
    """
    if len(points) <= 4 * parts:
        return list(points)
    first, last = points[0][0], points[-1][0]
    kept: list[Point] = []
    start = 0
    for part in range(1, parts + 1):
        border = first + (last - first) * part / parts
        end = len(points) if part == parts else bisect_left(points, border, key=itemgetter(0))
        if end > start:
            kept += _extremes(points[start:end])
        start = max(start, end)
    return kept


def _extremes(part: Sequence[Point]) -> list[Point]:
    """Choose the points of one part that can be seen, in their order."""
    known = [point for point in part if (value := point[1]) is not None and math.isfinite(value)]
    chosen = {part[0], part[-1]}
    if len(known) < len(part):
        chosen.add(next(point for point in part if not is_number(point[1])))
    if known:
        chosen |= {min(known, key=itemgetter(1)), max(known, key=itemgetter(1))}
    return sorted(chosen, key=itemgetter(0))


def averaged(points: Sequence[Point], parts: int = 200) -> list[Point]:
    """Return the mean of each part of a curve at the middle of the part; unknown values are left
    out."""
    size = max(1, -(-len(points) // parts))
    means: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        known = [value for _, value in part if value is not None and math.isfinite(value)]
        means.append((part[len(part) // 2][0], math.fsum(known) / len(known) if known else None))
    return means


def coarse_segments(segments: Sequence[Segment], slots: int = 1500) -> list[Segment]:
    """Return a timeline of at most so many segments; what is longer than a slot stays exact.

    Shorter neighbours become one segment of the category that takes most of their time.
    """
    if len(segments) <= slots:
        return list(segments)
    shortest = (segments[-1].end - segments[0].start) / slots
    coarse: list[Segment] = []
    group: list[Segment] = []

    def close() -> None:
        if not group:
            return
        spent: Counter[tuple[str, str | None]] = Counter()
        for one in group:
            spent[one.category, one.cause] += one.end - one.start
        longest = spent.most_common(1)[0][0]
        chosen = next(one for one in group if (one.category, one.cause) == longest)
        coarse.append(chosen._replace(start=group[0].start, end=group[-1].end))
        group.clear()

    for segment in segments:
        if segment.end - segment.start >= shortest:
            close()
            coarse.append(segment)
            continue
        group.append(segment)
        if segment.end - group[0].start >= shortest:
            close()
    close()
    return coarse
