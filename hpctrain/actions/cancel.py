"""Cancelling a run so that it stays cancelled.

First the ledger, then `Requeue=0` (otherwise a supervisor that is just requeueing the job could
bring it back), then scancel: the jobs that wait before the one that runs, or they would follow it.
"""

from __future__ import annotations

import contextlib
import getpass
from dataclasses import dataclass

from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import last_job_id
from hpctrain.errors import SlurmRefusedError, UsageError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.jobs import generation, started_ids, submitted_ids
from hpctrain.store.ledger import EventKind


@dataclass(frozen=True)
class Cancelled:
    """The jobs that were told to end; `job_id` is the one that counts."""

    run_id: str
    job_id: int
    job_ids: tuple[int, ...] = ()


def cancel(run: RunFiles, slurm: SlurmClient) -> Cancelled:
    """Cancel the run's jobs. Raises UsageError without any, SlurmError when Slurm refuses."""
    job_id = _job_to_name(run)
    if job_id is None or run.layout.done.exists():
        state = "is done" if run.layout.done.exists() else "was never submitted"
        raise UsageError(f"run `{run.run_id}` {state}: there is nothing to cancel")
    run.ledger.append(EventKind.CANCEL_REQUESTED, job_id=job_id, user=getpass.getuser())
    with contextlib.suppress(SlurmRefusedError):  # a job that has ended cannot be updated
        slurm.update_job(job_id, requeue=False)
    ids: list[int] = []
    # A job may have submitted its successor while we cancelled the others.
    while more := [one for one in _job_ids(run) if one not in ids]:
        slurm.cancel_all(more, pending_only=True)
        slurm.cancel_all(more)
        ids.extend(more)
    return Cancelled(run.run_id, job_id, tuple(ids))


def _job_to_name(run: RunFiles) -> int | None:
    """The job that began last, whose supervisor looks for a cancel of its own id, else the newest
    that waits."""
    events = run.ledger.events()
    begun = started_ids(generation(events))
    return begun[-1] if begun else last_job_id(events)


def _job_ids(run: RunFiles) -> list[int]:
    return submitted_ids(generation(run.ledger.events()))
