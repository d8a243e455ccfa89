"""The attempt that every part of the supervisor works for: settings, ledger, Slurm, signals.

Belongs here: which attempt this is, and which earlier one has recorded no end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import UsageError
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.judge.launch_history import mean_time_to_failure
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, Event, EventKind
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.client import SlurmClient
from hpctrain.supervise.srun_process import Signals, write_log

# -- Identify this attempt, and find unfinished earlier ones in the ledger ----------------------
# An attempt is one start of the job by Slurm: (job id, restart count).


# slurm.h: INFINITE and NO_VAL are 0xffffffff and 0xfffffffe.
_NO_TIME = 0xFFFFFFFE


@dataclass(frozen=True)
class JobAttempt:
    """One start of the job by Slurm; `cluster` is Slurm's ClusterName, None if unknown.

    `array_job_id`: of an element of a job array the id of the whole. `end_time`: its time limit
    when it started, in seconds since the epoch; None before Slurm 24.05.
    """

    job_id: int
    restart_count: int
    nodes: str
    node: str
    cluster: str | None = None
    array_job_id: int | None = None
    end_time: float | None = None

    @property
    def submitted_id(self) -> int:
        """The id that sbatch printed."""
        return self.array_job_id or self.job_id

    def __str__(self) -> str:
        return f"{self.job_id}.{self.restart_count}"


def attempt_from(environment: Mapping[str, str]) -> JobAttempt:
    """Read the attempt from Slurm's variables. SLURM_RESTART_COUNT is unset in the first one."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    try:
        return JobAttempt(
            job_id=int(environment["SLURM_JOB_ID"]),
            restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0),
            nodes=environment["SLURM_JOB_NODELIST"],
            node=environment.get("SLURMD_NODENAME", ""),
            cluster=environment.get("SLURM_CLUSTER_NAME") or None,
            array_job_id=int(environment.get("SLURM_ARRAY_JOB_ID") or 0) or None,
            # NO_VAL means no limit.
            end_time=float(end) if end.isdigit() and int(end) < _NO_TIME else None,
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the supervisor runs inside a Slurm job, but {error} is missing or wrong",
            hint="submit the script with `hpctrain submit` or `sbatch`",
        ) from error


def unfinished_attempt(events: Sequence[Event], current: JobAttempt) -> Event | None:
    """Find the start event of the newest earlier attempt that has recorded no end."""
    open_start: Event | None = None
    for event in events:
        if event.event is EventKind.ATTEMPT_STARTED:
            open_start = event
        elif open_start is not None and _key(event) == _key(open_start):
            acted = event.event is EventKind.ACTION and event.action != ActionKind.RELAUNCH
            if acted or event.event is EventKind.ATTEMPT_LOST:
                open_start = None
    if open_start is None:
        return None
    same = _key(open_start) == (current.job_id, current.restart_count)
    return None if same else open_start


def _key(event: Event) -> tuple[int | None, int | None]:
    """Identify the attempt of an event; an old supervisor may write after a new one has started."""
    return event.job_id, event.restart_count


def is_of_attempt(event: Event, started: Event) -> bool:
    """True if an event belongs to the attempt that began with `started`."""
    return _key(event) == _key(started)


def why_lost(
    lost: Event, events: Sequence[Event], current: JobAttempt, gone: Sequence[str] = ()
) -> tuple[Cause, str]:
    """Find the cause and reason of the end of an attempt whose supervisor recorded none.

    `gone`: its nodes that are down, or have booted since. They weigh more than a TERM, because an
    orderly shutdown of a node sends TERM to every process.
    """
    restarted = lost.job_id == current.job_id and current.restart_count > (lost.restart_count or 0)
    if restarted and gone:
        names = ", ".join(gone)
        return Cause.NODE_FAILURE, f"Slurm restarted the job: {names} went down or was rebooted"
    later = events[events.index(lost) :]
    signals = [e.signal for e in later if e.event is EventKind.SIGNAL and is_of_attempt(e, lost)]
    # A lost node's kernel may still send HUP to what is left there.
    if "TERM" in signals:
        reason = "its supervisor got signal TERM and ended before it could record a reason"
        return Cause.EXTERNAL_SIGNAL, reason
    if restarted:
        return (
            Cause.NODE_FAILURE,
            "Slurm restarted the job and its supervisor recorded no end: its node was lost",
        )
    return Cause.SUPERVISOR_LOST, "its supervisor was killed, and Slurm reports no reason"


# ----------------------------------------------------------------------------------------------


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
