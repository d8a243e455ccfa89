"""What every part of the supervisor needs to know about the attempt it works for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpctrain.slurm.client import SlurmClient
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import BufferedLedger, EventKind
from hpctrain.store.supervise_config import SuperviseConfig
from hpctrain.supervise.attempt import Attempt
from hpctrain.supervise.job_log import write_log
from hpctrain.supervise.judge.launch_history import mean_time_to_failure
from hpctrain.supervise.srun_process import Signals


@dataclass(frozen=True)
class AttemptContext:
    """One attempt: its run directory, its settings, its ways to Slurm and to the ledger."""

    run_layout: RunLayout
    config: SuperviseConfig
    attempt: Attempt
    ledger: BufferedLedger
    slurm: SlurmClient
    signals: Signals

    @property
    def job_id(self) -> int:
        return self.attempt.job_id

    def mttf_seconds(self) -> float | None:
        """Expected time between failures of this run, from the profile and its own ledger."""
        return mean_time_to_failure(self.ledger.events(), self.config.mttf_seconds)

    def note(self, kind: EventKind, **fields: object) -> None:
        """Append an event of this attempt to the ledger; one that cannot be written now waits."""
        attempt = self.attempt
        self.ledger.append(
            kind, job_id=attempt.job_id, restart_count=attempt.restart_count, **fields
        )


def say(text: str) -> None:
    """One line into the job's log."""
    clock = time.strftime("%H:%M:%S")
    write_log(f"hpctrain {clock} {text}\n")
