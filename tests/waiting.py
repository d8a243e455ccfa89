"""Waiting for what another process or thread does: the one place of the unit tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

# Ends a test that would hang; a busy machine may take its time.
PATIENCE_SECONDS = 300.0


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], object] = "what was awaited",
    *,
    pause_seconds: float = 0.01,
) -> None:
    """Look again and again, seldom where a look starts a process; `what` goes into a failure."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never {what() if callable(what) else what}"
        time.sleep(pause_seconds)
