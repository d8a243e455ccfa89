"""What a rank does because an agent has started it, and not srun itself.

Belongs here: what makes both the same for whoever looks: the log of the rank, and that it does not
outlive the task. Does not belong here: the name of the log (see `store.layout`), the agent (see
`agent`). Imports nothing heavy, because it must be in force before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

# Set by the agent for each rank.
LOG_VARIABLE = "HPCTRAIN_RANK_LOG"
_PR_SET_PDEATHSIG = 1


def settle_below_agent(environment: Mapping[str, str] = os.environ) -> None:
    """Do it if an agent has started this process."""
    path = environment.get(LOG_VARIABLE)
    if path:
        _take_own_log(path)
        die_with_parent()


def _take_own_log(path: str) -> None:
    """Both streams through one descriptor that appends, or they would write over each other. Where
    the file cannot be opened, output stays with the agent's."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def die_with_parent() -> None:
    """A rank without its agent hears no signal and would keep its GPU (prctl(2)): only some of
    Slurm's ways to track processes find it after that."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
