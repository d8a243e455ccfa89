"""Record signals that request a stop until the next step boundary, and end the process.

Does not belong here: the file `control/stop` (`hpctrain.records.requests`), agreement of ranks (see
`step_agreement`), the reaction (see `loop`). Imports nothing heavy, because it must take effect
before torch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

# SIGTERM: Slurm's preemption, time limit and scancel. SIGUSR1, SIGUSR2: warnings that sites
# configure (sbatch(1), --signal). Slurm sends SIGCONT before SIGTERM; it is ignored.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# What Slurm and people send to all processes of a step, and what a process below a rank (a writer
# of checkpoints, a reader of data) leaves to its rank: that one decides when both end.
LEFT_TO_RANKS = (*STOP_SIGNALS, signal.SIGINT, signal.SIGQUIT)


class StopSignals:
    """Records that a stop signal has arrived; `name` is the first one."""

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        """Install handlers for the stop signals of this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self.remember(number))
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        # requests stacks (see `stacks`); until their file is open it must not end the process
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    @property
    def requested(self) -> bool:
        return self.name is not None

    def remember(self, number: int) -> None:
        """Record a signal that has arrived, if it is the first stop signal."""
        if self.name is None and number in STOP_SIGNALS:
            self.name = signal.Signals(number).name


def leave(code: int) -> NoReturn:
    """End the process without interpreter teardown.

    Threads of gloo and NCCL may still run; teardown can hang or abort a rank that has completed its
    work. It removes signal handlers first, too: a signal of the supervisor, which follows its stop
    file, would then determine the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
