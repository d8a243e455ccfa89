"""Handing signals on: what an agent gets is meant for the ranks that it has started.

Slurm's proctrack/cgroup gives signals to the tasks of a step only, not to what these have started
(src/plugins/proctrack/cgroup, "only signal slurm tasks unless signal is SIGKILL"), so ranks below
an agent hear nothing but through it. Belongs here: remembering, and giving each rank what it is
owed. Does not belong here: what a rank does then (see `stop`, `stacks`). Imports nothing heavy,
because it must be in force before torch is imported.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

from hpctrain.train.stop import STOP_SIGNALS

# SIGQUIT asks ranks for their stacks; torchelastic's own handler would end them all.
PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)


class Passing:
    """Signals that have arrived here, and the ranks that have not got them yet."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._owed: set[tuple[int, int]] = set()

    def install(self) -> None:
        """Take over these signals. Children do not inherit it: exec resets caught signals."""
        for number in PASSED_ON:
            signal.signal(number, self._remember)

    def hand_on(self, pids: Collection[int]) -> None:
        """Give the ranks what they are owed; call this often. Without ranks it is kept for them."""
        if not pids:
            return
        arrived, self._arrived = self._arrived, []
        self._owed |= {(pid, number) for pid in pids for number in arrived}
        self._owed = {owed for owed in self._owed if not _given(*owed)}

    def _remember(self, number: int, frame: object) -> None:
        self._arrived.append(number)


def _given(pid: int, number: int) -> bool:
    """Send it if the process listens, for one that is still starting would die of it; True too
    when the process is gone."""
    try:
        if not catches(pid, number):
            return False
        os.kill(pid, number)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return True


def catches(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal (proc(5), SigCgt of /proc/PID/status).

    Raises FileNotFoundError or ProcessLookupError when there is no such process.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "State" and value.split()[0] in ("Z", "X"):
            raise ProcessLookupError(pid)
        if name == "SigCgt":
            return bool(int(value, 16) >> (number - 1) & 1)
    return False
