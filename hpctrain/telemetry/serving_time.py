"""Count the time in which a replica computes requests as productive. Pure.

The account of a run knows steps; a replica has none, so that all of its launches would be starts.
Belongs here: that one change of a timeline. Does not belong here: when a replica did so
(`hpctrain.serve.replica_lives`), the timeline itself (`timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.telemetry.clock_repair import ticks
from hpctrain.telemetry.goodput import OCCUPYING
from hpctrain.telemetry.time_categories import Category, Segment
from hpctrain.telemetry.timeline import Timeline


def with_work(timeline: Timeline, working: Sequence[tuple[float, float]]) -> Timeline:
    """Make productive what a replica has held GPUs for while it worked.

    `working`: intervals in seconds since the epoch, in order and without overlap.
    """
    windows = [(ticks(begin), ticks(end)) for begin, end in working]
    segments: list[Segment] = []
    for segment in timeline.segments:
        left = segment
        if segment.category in OCCUPYING:
            for begin, end in windows:
                first, last = max(left.start, begin), min(left.end, end)
                if first >= last:
                    continue
                if left.start < first:
                    segments.append(left._replace(end=first))
                segments.append(Segment(first, last, Category.PRODUCTIVE, None))
                left = left._replace(start=last)
        if left.start < left.end:
            segments.append(left)
    return replace(timeline, segments=tuple(segments))
