"""The share of productive time in windows that slide over a run. Pure.

After ByteRobust (arXiv 2509.16293), which watches the ratio of the last hour beside that of the
whole run: a run that has been well for weeks hides a bad day. Belongs here: windows over segments.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpctrain.telemetry.clocks import ticks
from hpctrain.telemetry.segments import Category, Segment

_MOVES_PER_WINDOW = 60
# Beyond this (of hours: ten weeks) the window moves further at a time.
_MOST_MOVES = 100_000


@dataclass(frozen=True)
class Sliding:
    """Productive share of the last and of the worst window; None for a run shorter than one."""

    last: float | None
    worst: float | None


def sliding(segments: Sequence[Segment], window_seconds: float) -> Sliding:
    """Over windows of that length inside the run, with everything in them that is not productive.

    The window moves by a sixtieth of its length, so `worst` is within a sixtieth of the very
    worst.
    """
    window = ticks(window_seconds)
    if not segments or segments[-1].end - segments[0].start < window:
        return Sliding(None, None)
    curve = _Curve(segments)
    first, last = segments[0].start + window, segments[-1].end
    move = max(1, window // _MOVES_PER_WINDOW, (last - first) // _MOST_MOVES)
    ends = (*range(first, last, move), last)
    shares = [(curve.at(end) - curve.at(end - window)) / window for end in ends]
    return Sliding(last=shares[-1], worst=min(shares))


class _Curve:
    """Productive ticks from the beginning up to a moment."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        lengths = (
            one.end - one.start if one.category is Category.PRODUCTIVE else 0 for one in segments
        )
        self._before = [0, *accumulate(lengths)]

    def at(self, moment: int) -> int:
        """Productive ticks before `moment`, which lies inside the run."""
        index = bisect.bisect_right(self._starts, moment) - 1
        segment = self._segments[index]
        inside = moment - segment.start if segment.category is Category.PRODUCTIVE else 0
        return self._before[index] + inside
