"""Remember signals that ask a rank to stop, until a step boundary.

Belongs here: the flag. Does not belong here: the file `control/stop`
(`hpctrain.store.requests`), how the ranks agree (see `step_agreement`) and what is
done then (see `loop`). Imports nothing heavy, because it must be in force before torch is imported.
"""

from __future__ import annotations

import signal

# SIGTERM: Slurm's preemption, time limit and scancel. SIGUSR1, SIGUSR2: what sites let Slurm send
# as a warning (sbatch(1), --signal). SIGCONT precedes SIGTERM in Slurm and must not matter.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Remembers that a stop signal has arrived; `name` says which one came first."""

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        """Take over the stop signals of this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self.remember(number))
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        # asks for stacks (see `stacks`); until that file is open it must not end the process
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    @property
    def requested(self) -> bool:
        return self.name is not None

    def remember(self, number: int) -> None:
        """This signal has arrived; others than stop signals do not matter."""
        if self.name is None and number in STOP_SIGNALS:
            self.name = signal.Signals(number).name
