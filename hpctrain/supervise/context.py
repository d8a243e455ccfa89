"""The attempt that every part of the supervisor works for: settings, ledger, Slurm, signals."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpctrain.judge.launch_history import mean_time_to_failure
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, EventKind
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.client import SlurmClient
from hpctrain.supervise.attempt import JobAttempt
from hpctrain.supervise.job_log import write_log
from hpctrain.supervise.srun_process import Signals


@dataclass(frozen=True)
class AttemptContext:
    """One attempt: its run directory, settings, ledger, signals and client of Slurm."""

    run_layout: RunLayout
    config: SuperviseConfig
    attempt: JobAttempt
    ledger: BufferedLedger
    slurm: SlurmClient
    signals: Signals

    @property
    def job_id(self) -> int:
        return self.attempt.job_id

    @property
    def hurries(self) -> bool:
        """True once Slurm ends a job that only its own `scontrol requeue` brings back in time.

        Then nothing that can wait may come before that call.
        """
        return self.signals.final and self.config.continuation == "requeue"

    def mttf_seconds(self) -> float | None:
        """Estimate the time between failures of this run, from the profile and its own ledger."""
        return mean_time_to_failure(self.ledger.events(), self.config.mttf_seconds)

    def note(self, kind: EventKind, **fields: object) -> None:
        """Append an event of this attempt to the ledger; it is buffered if it cannot be written."""
        attempt = self.attempt
        self.ledger.append(
            kind, job_id=attempt.job_id, restart_count=attempt.restart_count, **fields
        )


def log_message(text: str) -> None:
    """Write one line with the time into the job's log."""
    write_log(f"hpctrain {time.strftime('%H:%M:%S')} {text}\n")
