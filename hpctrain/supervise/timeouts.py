"""Run work in a thread, so that a hung file system cannot block the caller; retry after errors.

A hung file system blocks whoever reads or writes, for minutes or for ever (nfs(5), `hard`), and the
supervisor has signals to handle meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.base import clock
from hpctrain.base.durable import FULL_ERRNOS
from hpctrain.supervise.context import AttemptContext

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


# -- Retry work on the run directory while its storage fails ------------------------------------


# Longer than a remount or a failover usually takes.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_Result = TypeVar("_Result")


def retry_while_storage_fails(context: AttemptContext, work: Callable[[], _Result]) -> _Result:
    """Repeat `work` while it raises OSError.

    Raises the last OSError after a minute, or at once if the job is being ended or the disk is
    full.
    """
    deadline = clock.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return work()
        except OSError as error:
            over = clock.monotonic() >= deadline or context.signals.final
            if over or error.errno in FULL_ERRNOS:
                raise
        clock.sleep(_RETRY_SECONDS)
