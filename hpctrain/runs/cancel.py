"""Cancels a run so that it stays cancelled, and reports exactly which jobs have ended.

The first query finds the run's jobs, because an id alone may be somebody else's job. Then the
ledger announces the cancel, so that a supervisor that is terminated can find the reason. Then
comes `Requeue=0`: otherwise a supervisor that is just requeueing its job could revive it. The last
step is scancel, for waiting jobs before the running one, because they would start after it. If
Slurm refuses, the announcement is withdrawn, or it would be followed at the next crash.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError, SlurmRefusedError, SlurmUnreachableError, UsageError
from hpctrain.job.job_queries import jobs_of, record_found
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import user_name
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.slurm.client import Backoff, SlurmClient
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

# A controller that has accepted scancel shows COMPLETING or CANCELLED within one pass.
_CONFIRM_SECONDS = 5.0


@dataclass(frozen=True)
class Cancelled:
    """The cancelled jobs; `job_id` is the one that counts, None if there was none.

    `already`: the run was cancelled before, so nothing was done. `still` are jobs that Slurm still
    shows as running or waiting.
    """

    run_id: str
    job_id: int | None = None
    job_ids: tuple[int, ...] = ()
    already: bool = False
    still: tuple[int, ...] = ()


def cancel(run: RunFiles, slurm: SlurmClient) -> Cancelled:
    """Cancel the run's jobs.

    Raises UsageError for a run that has nothing to cancel or whose jobs are on another cluster,
    SlurmUnreachableError or SlurmRefusedError when nothing, or not everything, was cancelled.
    """
    if run.layout.done.exists():
        raise UsageError(f"run `{run.run_id}` is done: there is nothing to cancel")
    run.refuse_unless_writable("cancel")
    live = _live(run, slurm)
    if not live:
        row = statuses([run], slurm)[0]
        if row.state is RunState.CANCELLED:
            return Cancelled(run.run_id, already=True)
        if row.state is RunState.RUNNING:  # it is just ending, and will not be requeued
            return Cancelled(run.run_id, row.job_id, already=True)
        reason = f": {row.reason}" if row.reason else ""
        raise UsageError(
            f"run `{run.run_id}` is {row.state}, so there is nothing to cancel{reason}",
            hint=f"`{run.command('resume')}` would continue it",
        )
    # One line for each job, because every supervisor looks for a cancel of its own job.
    active = [job for job in live if job.state.is_active]
    ordered = [*(job for job in live if job not in active), *active]
    for job in ordered:
        run.ledger.append(EventKind.CANCEL_REQUESTED, job_id=job.job_id, user=user_name())
    announced = _Announced(ordered[-1].job_id)
    try:
        # A job may have submitted its successor while we cancelled the others.
        while more := [job for job in live if job.submitted_id not in announced.cancelled]:
            announced.cancel(more, slurm)
            live = _live(run, slurm)
    except SlurmError as error:
        raise _withdraw(run, slurm, live, announced.cancelled, error) from error
    still = _wait_for_end(run, slurm, tuple(announced.cancelled))
    if not still:
        run.ledger.append(EventKind.CANCELLED, job_id=announced.job_id, user=user_name())
    return Cancelled(run.run_id, announced.job_id, tuple(announced.cancelled), still=still)


class _Announced:
    """A cancel that the ledger contains: the jobs that Slurm has accepted to end so far."""

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        self.cancelled: list[int] = []

    def cancel(self, jobs: list[JobRecord], slurm: SlurmClient) -> None:
        for job in jobs:
            with contextlib.suppress(SlurmRefusedError):  # a job that has just ended
                slurm.update_job(job.job_id, requeue=False)
        ids = list(dict.fromkeys(job.submitted_id for job in jobs))
        slurm.cancel_all(ids, pending_only=True)
        slurm.cancel_all(ids)
        self.cancelled += ids


def _live(run: RunFiles, slurm: SlurmClient) -> list[JobRecord]:
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError(
            f"Slurm does not answer, so nothing of run `{run.run_id}` was cancelled",
            hint=f"try again, or `{run.command('stop')}`: the run itself follows that",
        )
    record_found(run, found)
    ending = (JobState.COMPLETING,)
    return [job for job in found.live if job.state not in ending or job.requeue]


def _withdraw(
    run: RunFiles,
    slurm: SlurmClient,
    live: list[JobRecord],
    cancelled: list[int],
    error: SlurmError,
) -> SlurmError:
    """Withdraw the announcement if Slurm has followed none of it; returns the error to raise."""
    if not cancelled:
        for job in live:
            with contextlib.suppress(SlurmError):
                slurm.update_job(job.job_id, requeue=job.requeue)
            run.ledger.append(
                EventKind.CANCEL_FAILED, job_id=job.job_id, user=user_name(), reason=str(error)
            )
        message = f"nothing of run `{run.run_id}` was cancelled: {error}"
    else:
        ids = ", ".join(map(str, cancelled))
        message = f"run `{run.run_id}`: job {ids} was cancelled, others perhaps not: {error}"
    kind = SlurmRefusedError if isinstance(error, SlurmRefusedError) else SlurmUnreachableError
    return kind(message, hint=f"`{run.command('cancel')}` again")


def _wait_for_end(run: RunFiles, slurm: SlurmClient, asked_for: tuple[int, ...]) -> tuple[int, ...]:
    """Wait a few seconds for jobs to end; returns those that Slurm has not begun to end."""
    deadline, pauses = clock.monotonic() + _CONFIRM_SECONDS, Backoff()
    while True:
        found = jobs_of(run, slurm)
        going = [job for job in found.live if job.state is not JobState.COMPLETING]
        if (found.answered and not going) or clock.monotonic() >= deadline:
            return tuple(job.job_id for job in going) if found.answered else asked_for
        clock.sleep(pauses.next_seconds())
