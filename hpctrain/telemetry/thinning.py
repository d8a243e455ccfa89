"""Curves and timelines of at most so many points: pictures of long runs stay small. Pure.

Belongs here: leaving points out without losing what can be seen. Does not belong here: reading
metrics, drawing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from hpctrain.telemetry.time_categories import Segment

Point = tuple[float, float | None]


def is_number(value: float | None) -> bool:
    """Return whether a value is known and finite."""
    return value is not None and math.isfinite(value)


def thinned(points: Sequence[Point], parts: int = 600) -> list[Point]:
    """Keep the first, lowest, highest and last point of each part of a curve, so spikes survive.

    Parts have the same width in x. Of the points without a finite value one per part stays, which
    is a gap in the curve.
    """
    if len(points) <= 4 * parts:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / parts or 1.0
    kept: list[Point] = []
    # A curve that turns back begins another part.
    for _, members in itertools.groupby(points, lambda point: int((point[0] - first) / width)):
        part = list(members)
        known = [index for index, (_, value) in enumerate(part) if is_number(value)]
        gap = next((index for index, (_, value) in enumerate(part) if not is_number(value)), None)
        chosen = {0, len(part) - 1}
        if gap is not None:
            chosen.add(gap)
        if known:
            chosen.add(min(known, key=lambda index: part[index][1] or 0.0))
            chosen.add(max(known, key=lambda index: part[index][1] or 0.0))
        kept += [part[index] for index in sorted(chosen)]
    return kept


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
