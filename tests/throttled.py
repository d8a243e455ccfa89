"""Slow a process down for real: another one stops and continues it, most of the time stopped.

Belongs here: that, for tests that need a slow rank without a slow machine. Nothing of it is in the
package.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

# A busy machine may wake the other process late: then the process runs longer, and is still slow.
RUN_SECONDS, STOP_SECONDS = 0.001, 2.0


@contextlib.contextmanager
def throttled() -> Iterator[None]:
    """This process computes for a thousandth of the time, within the block.

    On a busy machine the other one wakes tens of milliseconds late: then for a few hundredths.
    """
    slowed, (ending, end) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        _stop_and_continue(slowed, ending)
    os.close(ending)
    try:
        yield
    finally:
        os.close(end)
        os.waitpid(child, 0)


def _stop_and_continue(slowed: int, ending: int) -> None:
    """Never returns; ends with the block, or with the process that is slowed."""
    while os.getppid() == slowed and not select.select([ending], [], [], 0)[0]:
        os.kill(slowed, signal.SIGSTOP)
        time.sleep(STOP_SECONDS)
        os.kill(slowed, signal.SIGCONT)
        time.sleep(RUN_SECONDS)
    os._exit(0)
