"""What a rank and the agent above it do for each other: signals, the rank's log, its end.

Does not belong here: the name of the log (see `records.layout`), the agent (see
`torchelastic_agent`), what a rank does with a signal (see `stop`, `stacks`). Imports nothing
heavy, because it must take effect before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from hpctrain.train.stop import STOP_SIGNALS

# -- Set up a rank that an agent has started, so that it behaves like one started by srun --------
# The rank writes to its own log and does not outlive the agent.


# Set by the agent for each rank.
LOG_VARIABLE = "HPCTRAIN_RANK_LOG"
_PR_SET_PDEATHSIG = 1


def set_up_under_agent(environment: Mapping[str, str] = os.environ) -> None:
    """Redirect output to the rank's log and die with the agent, if an agent started this process.

    Without access to the log, output goes to the agent's.
    """
    path = environment.get(LOG_VARIABLE)
    if not path:
        return
    try:
        # one appending descriptor for both streams, or they would overwrite each other
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        pass
    else:
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
    die_with_parent()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (prctl(2)).

    A rank without its agent receives no signals and would keep its GPU; only some of Slurm's
    process-tracking plugins find it then.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- Forward signals from an agent to the ranks that it has started ------------------------------
# Slurm's proctrack/cgroup sends signals to the tasks of a step only, not to their children
# (src/plugins/proctrack/cgroup, "only signal slurm tasks unless signal is SIGKILL"). Ranks below
# an agent therefore receive only the signals that it forwards.


# SIGQUIT makes ranks dump their stacks; torchelastic's own handler would end them all.
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
