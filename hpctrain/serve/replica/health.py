"""Tell an engine that computes from one that only seems to.

An engine whose worker hangs may go on answering its health check. So tokens are looked at, too: an
engine that computes requests makes some, and one that has nothing to do is asked for one. Belongs
here: when an engine counts as hung. Does not belong here: asking it (`answers`).
"""

from __future__ import annotations

from hpctrain.serve.replica.answers import EngineAnswers

# Health checks in a row that may fail; the lease is not renewed from the first one on.
_FAILED_CHECKS = 3
# Requests in flight and no token for so long: longer than the prompt of any request takes.
STUCK_SECONDS = 180.0
_CANARY_TIMEOUT_SECONDS = 60.0


class HealthWatch:
    """Looks at one engine again and again; `doubtful` while its last check has failed."""

    def __init__(
        self, answers: EngineAnswers, health_seconds: float, canary_seconds: float
    ) -> None:
        self._answers = answers
        self._health_seconds, self._canary_seconds = health_seconds, canary_seconds
        self._next_at: float | None = None
        self._failed = 0
        self._tokens: float | None = None
        self._moved_at: float | None = None

    @property
    def doubtful(self) -> bool:
        return self._failed > 0

    def problem(self, now: float) -> str | None:
        """Look if it is time to; returns what is wrong. `now` is in monotonic seconds."""
        if self._next_at is not None and now < self._next_at:
            return None
        self._next_at = now + self._health_seconds
        if not self._answers.is_ready():
            self._failed += 1
            if self._failed < _FAILED_CHECKS:
                return None
            return f"{self._failed} health checks in a row have failed"
        self._failed = 0
        return self._stuck(now)

    def _stuck(self, now: float) -> str | None:
        """Whether tokens are made; an idle engine is asked for one now and then."""
        load = self._answers.load()
        tokens = load.tokens if load is not None else None
        if self._moved_at is None or (load is not None and tokens != self._tokens):
            self._tokens, self._moved_at = tokens, now
            return None
        still_seconds = now - self._moved_at
        if load is not None and load.in_flight:
            if still_seconds <= STUCK_SECONDS:
                return None
            return (
                f"{load.in_flight} requests are in flight, and no token was computed for "
                f"{still_seconds:.0f} s"
            )
        if still_seconds <= self._canary_seconds:
            return None
        self._moved_at = now
        problem = self._answers.canary(_CANARY_TIMEOUT_SECONDS)
        return None if problem is None else f"the engine is idle, and {problem}"
