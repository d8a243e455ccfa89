"""What time it is, and waiting: the one place that asks the operating system for either.

Every process has one current clock. A test puts another one in its place, in which time passes
without waiting. Belongs here: reading the time, pauses, waits for an event. Does not belong here:
how long a pause is, when to give up; waits for a process or a descriptor, which take real time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The operating system's time."""

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since some moment, for durations and deadlines."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Do nothing for so many seconds."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait at most so many seconds for an event (None: for ever); return whether it is set."""
        return event.wait(seconds)


_current = Clock()


def now() -> float:
    """Return the seconds since the epoch."""
    return _current.now()


def monotonic() -> float:
    """Return seconds since some moment, for durations and deadlines."""
    return _current.monotonic()


def sleep(seconds: float) -> None:
    """Do nothing for so many seconds."""
    _current.sleep(seconds)


def wait(event: threading.Event, seconds: float | None) -> bool:
    """Wait at most so many seconds for an event (None: for ever); return whether it is set."""
    return _current.wait(event, seconds)


@contextmanager
def replaced(by: Clock) -> Iterator[None]:
    """Let this process, with all its threads, go by another clock for a while."""
    global _current
    before, _current = _current, by
    try:
        yield
    finally:
        _current = before
