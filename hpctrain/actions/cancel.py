"""Cancelling a run so that it stays cancelled.

First the ledger, then `Requeue=0` (otherwise a supervisor that is just requeueing the job could
bring it back), then scancel.
"""

from __future__ import annotations

import contextlib
import getpass
from dataclasses import dataclass

from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import last_job_id
from hpctrain.errors import SlurmRefusedError, UsageError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.ledger import EventKind


@dataclass(frozen=True)
class Cancelled:
    """The job that was told to end."""

    run_id: str
    job_id: int


def cancel(run: RunFiles, slurm: SlurmClient) -> Cancelled:
    """Cancel the run's job. Raises UsageError when there is none, SlurmError when Slurm refuses."""
    job_id = last_job_id(run.ledger.events())
    if job_id is None or run.layout.done.exists():
        state = "is done" if run.layout.done.exists() else "was never submitted"
        raise UsageError(f"run `{run.run_id}` {state}: there is nothing to cancel")
    run.ledger.append(EventKind.CANCEL_REQUESTED, job_id=job_id, user=getpass.getuser())
    with contextlib.suppress(SlurmRefusedError):  # a job that has ended cannot be updated
        slurm.update_job(job_id, requeue=False)
    slurm.cancel(job_id)
    return Cancelled(run.run_id, job_id)
