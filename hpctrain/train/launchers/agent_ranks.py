"""What an agent does for the ranks below it before anything else: signals, and their end with it.

Does not belong here: starting ranks (see `rank_processes`), what a rank does with a signal (see
`stop`, `stacks`). Imports nothing heavy, because it must take effect at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

from hpctrain.train.stop import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1
# Loaded before a process forks.
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (prctl(2)).

    A rank without its agent receives no signals and would keep its GPU; only some of Slurm's
    process-tracking plugins find it then.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- Forward signals from an agent to the ranks that it has started ------------------------------
# Slurm's proctrack/cgroup sends signals to the tasks of a step only, not to their children
# (src/plugins/proctrack/cgroup, "only signal slurm tasks unless signal is SIGKILL"). Ranks below
# an agent therefore receive only the signals that it forwards.


# SIGQUIT makes ranks dump their stacks.
FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)


class SignalForwarder:
    """Signals that have arrived here, and those pending for each rank."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._pending: set[tuple[int, int]] = set()  # (pid, signal number)

    def install(self) -> None:
        """Install the handlers. Children do not inherit them: exec resets caught signals."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, lambda number, frame: self._arrived.append(number))

    def forward(self, pids: Collection[int]) -> None:
        """Deliver pending signals; call periodically. They stay queued while there are no ranks.

        A signal stays pending until the process has a handler: a starting process would die of it.
        """
        if not pids:
            return
        arrived, self._arrived = self._arrived, []
        self._pending |= {(pid, number) for pid in pids for number in arrived}
        for pid, number in tuple(self._pending):
            try:
                if not catches(pid, number):
                    continue
                os.kill(pid, number)
            except (FileNotFoundError, ProcessLookupError):
                pass  # the process is gone
            self._pending.discard((pid, number))


def catches(pid: int, number: int) -> bool:
    """Check whether the process has a handler for the signal (proc(5), SigCgt in PID/status).

    Raises FileNotFoundError or ProcessLookupError when there is no such process.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "State" and value.split()[0] in ("Z", "X"):
            raise ProcessLookupError(pid)
        if name == "SigCgt":
            return bool(int(value, 16) >> (number - 1) & 1)
    return False
