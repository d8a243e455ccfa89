"""Maintain the policy's `History` of a simulated run, launch by launch.

The counts equal those of `hpctrain.judge.launch_history.history`, which computes them
from a list of events; a test compares the two. Does not belong here: deciding.
"""

from __future__ import annotations

from collections import Counter, deque

from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.judge.documents import History


class HistoryCounter:
    """Counts ends of launches since the last one that brought a new checkpoint."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._best = 0.0
        self._by_cause: Counter[str] = Counter()
        self._recent: deque[float] = deque()
        self._ever = False

    def ended(self, cause: Cause, now: float, checkpoint: float, resumed_at: float) -> None:
        """Count the end of a launch that began at `resumed_at` seconds of work.

        `checkpoint` is the work in the newest checkpoint, `now` the wall-clock time, in seconds.
        """
        if checkpoint > self._best:
            self._best, self._ever = checkpoint, True
            self._by_cause.clear()
        if checkpoint <= resumed_at:
            self._by_cause[cause] += 1
        if cause in FAILURE_CAUSES:
            self._recent.append(now)
        while self._recent and self._recent[0] < now - self._window_seconds:
            self._recent.popleft()

    def history(self) -> History:
        """Return the policy's input. Simulated failures have no fingerprints and no steps."""
        if not self._by_cause:
            return History(0, 0, (), recent_failures=len(self._recent), ever_progressed=self._ever)
        return History(
            failures_without_progress=sum(
                count for cause, count in self._by_cause.items() if cause in FAILURE_CAUSES
            ),
            time_limits_without_progress=self._by_cause[Cause.TIME_LIMIT],
            by_cause=tuple(sorted(self._by_cause.items())),
            recent_failures=len(self._recent),
            ever_progressed=self._ever,
        )
