"""Compute the productive share of a run in rolling windows: the last and the worst. Pure.

After ByteRobust (arXiv 2509.16293), which reports the ratio of the last hour beside that of the
whole run: the whole-run average of a long run hides one bad day.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

from pydantic import BaseModel, ConfigDict

from hpctrain.telemetry.clock_repair import ticks
from hpctrain.telemetry.time_categories import Category, Segment

_MOVES_PER_WINDOW = 60
# With more moves (for windows of an hour: ten weeks) the window moves in larger steps.
_MOST_MOVES = 100_000


class RollingGoodput(BaseModel):
    """Productive share of the last and of the worst window; None for a run shorter than one."""

    model_config = ConfigDict(frozen=True)

    last: float | None
    worst: float | None


def rolling_goodput(segments: Sequence[Segment], window_seconds: float) -> RollingGoodput:
    """Compute the shares for windows of that length which lie inside the run.

    The window moves by a sixtieth of its length, so `worst` is within 1/60 of the true minimum.
    """
    window = ticks(window_seconds)
    if not segments or segments[-1].end - segments[0].start < window:
        return RollingGoodput(last=None, worst=None)
    curve = _ProductiveTicks(segments)
    first, last = segments[0].start + window, segments[-1].end
    move = max(1, window // _MOVES_PER_WINDOW, (last - first) // _MOST_MOVES)
    ends = (*range(first, last, move), last)
    shares = [(curve.before(end) - curve.before(end - window)) / window for end in ends]
    return RollingGoodput(last=shares[-1], worst=min(shares))


class _ProductiveTicks:
    """Cumulative productive ticks since the beginning of the run."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        lengths = (s.end - s.start if s.category is Category.PRODUCTIVE else 0 for s in segments)
        self._before = [0, *accumulate(lengths)]

    def before(self, moment: int) -> int:
        """Return the productive ticks before `moment`, which lies inside the run."""
        index = bisect.bisect_right(self._starts, moment) - 1
        segment = self._segments[index]
        inside = moment - segment.start if segment.category is Category.PRODUCTIVE else 0
        return self._before[index] + inside
