"""Set up a rank that an agent has started, so that it behaves like one started by srun.

The rank writes to its own log and does not outlive the agent. Does not belong here: the name of the
log (see `records.layout`), the agent (see `agent`). Imports nothing heavy, because it must take
effect before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

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
