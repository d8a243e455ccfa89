"""Run work in a thread, so that a hung file system cannot block the caller.

A hung file system blocks whoever reads or writes, for minutes or for ever (nfs(5), `hard`), and the
supervisor has signals to handle meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

_GIVE_UP_CHECK_SECONDS = 0.2


def run_with_timeout(
    work: Callable[[], object],
    timeout_seconds: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Run `work` in a thread and return whether it ended in time; its OSError is suppressed.

    For records and files that matter less than the caller's time. Late work is not undone.
    `give_up` is called a few times a second; if it returns True, waiting ends.
    """

    def attempt() -> None:
        with contextlib.suppress(OSError):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    deadline = time.monotonic() + timeout_seconds
    thread.start()
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, _GIVE_UP_CHECK_SECONDS))
        if give_up():
            break
    return not thread.is_alive()
