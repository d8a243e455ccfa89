"""Clocks that tests put in the place of the process's own (`hpctrain.base.clock`).

Where the other side is a real process or thread, virtual time runs through a time limit before that
side can do anything: play it on the same clock (`VirtualClock.at`), or keep real time and wait for
a condition (tests/waiting.py).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

import pytest

from hpctrain.base.clock import Clock

_MOST_PAUSES = 100_000


class VirtualClock(Clock):
    """Time in which only pauses take time, and those none of ours.

    It belongs to the thread that made it; pauses of other threads are real. With `all_threads` it
    is for a single module: `monkeypatch.setattr(module, "clock", VirtualClock(all_threads=True))`.
    Who pauses for more than `limit_seconds` in all, or very often, never looks at its deadline: the
    test fails.
    """

    def __init__(
        self,
        begins_at: float | None = None,
        limit_seconds: float = 30 * 86400.0,
        *,
        all_threads: bool = False,
    ) -> None:
        self.begins_at = time.time() if begins_at is None else begins_at
        self.passed_seconds = 0.0
        self.pauses: list[float] = []
        self._left_seconds = limit_seconds
        self._planned: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._owner = None if all_threads else threading.get_ident()

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Plan something for so many seconds after the beginning; it happens during a pause."""
        self._count += 1
        heapq.heappush(self._planned, (seconds, self._count, action))

    def advance(self, seconds: float) -> None:
        """Let time pass, with all that is planned."""
        self._pass(seconds, lambda: False)

    def advance_to(self, now: float) -> None:
        """Let it become so many seconds since the epoch."""
        self.advance(now - self.now())

    def now(self) -> float:
        return self.begins_at + self.passed_seconds

    def monotonic(self) -> float:
        return self.passed_seconds

    def sleep(self, seconds: float) -> None:
        if self._is_foreign():
            super().sleep(seconds)
        else:
            self._pause(seconds, lambda: False)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if self._is_foreign():
            return super().wait(event, seconds)
        if not event.is_set():
            self._pause(self._left_seconds if seconds is None else seconds, event.is_set)
        return event.is_set()

    def _is_foreign(self) -> bool:
        return self._owner not in (None, threading.get_ident())

    def _pause(self, seconds: float, is_over: Callable[[], bool]) -> None:
        self.pauses.append(seconds)
        before = self.passed_seconds
        self._pass(seconds, is_over)
        self._left_seconds -= self.passed_seconds - before
        if self._left_seconds <= 0 or len(self.pauses) > _MOST_PAUSES:
            pytest.fail(f"{len(self.pauses)} pauses, the last at {self.passed_seconds:.0f} s")

    def _pass(self, seconds: float, is_over: Callable[[], bool]) -> None:
        ends_at = self.passed_seconds + max(0.0, seconds)
        while not is_over() and self._planned and self._planned[0][0] <= ends_at:
            moment, _, action = heapq.heappop(self._planned)
            self.passed_seconds = max(self.passed_seconds, moment)
            action()
        if not is_over():
            self.passed_seconds = max(self.passed_seconds, ends_at)


class ShiftedClock(Clock):
    """Real time, which a test sets ahead: the time of day, or the time that has passed."""

    def __init__(self) -> None:
        self.ahead_seconds = self.monotonic_ahead_seconds = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_seconds

    def monotonic(self) -> float:
        return super().monotonic() + self.monotonic_ahead_seconds
