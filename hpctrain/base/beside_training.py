"""Be a process beside training: give way to it, and end with whoever started this process.

Belongs here: priority, signals, and the wait for the end. Does not belong here: what such a process
does (`hpctrain.tracking`, `hpctrain.observe.attempt_exporter`), starting it (`hpctrain.supervise`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

# Slurm and people send these to all processes of a job; the supervisor says when it is over.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LEAST_PRIORITY = 19
_KILL_FIRST = "1000"


def give_way() -> None:
    """Leave CPUs and memory to training: where memory ends, the kernel kills this process first."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_LEAST_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILL_FIRST)


def stdin_closed_within(seconds: float) -> bool:
    """Wait so long for the end of stdin; what is written to it is ignored.

    The stdin of such a process is closed when it has to end, and when its parent was killed.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            return True
    return False
