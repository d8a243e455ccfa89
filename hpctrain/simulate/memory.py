"""What the ledger of a played run would say: `History` kept up to date launch by launch.

The same counts as `hpctrain.supervise.judge.launch_history.history`, which reads them off a list of
events; a test holds the two against each other. Belongs here: counting. Does not belong here:
deciding.
"""

from __future__ import annotations

from collections import Counter, deque

from hpctrain.supervise.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.supervise.judge.documents import History


class Memory:
    """Counts ends of launches since the last one that brought a new checkpoint."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._best = 0.0
        self._by_cause: Counter[str] = Counter()
        self._recent: deque[float] = deque()
        self._ever = False

    def ended(self, cause: Cause, now: float, checkpoint: float, resumed_at: float) -> None:
        """A launch that began at `resumed_at` has ended; the newest checkpoint is `checkpoint`."""
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
        """As the policy wants it. Played failures have no fingerprints and no steps."""
        return History(
            failures_without_progress=sum(
                count for cause, count in self._by_cause.items() if cause in FAILURE_CAUSES
            ),
            time_limits_without_progress=self._by_cause[Cause.TIME_LIMIT],
            by_cause=tuple(sorted(self._by_cause.items())),
            recent_failures=len(self._recent),
            ever_progressed=self._ever,
        )
