"""Which job goes on after this one, where Slurm does not requeue.

A chain grows while it runs: each job submits the one behind it. Singletons and the elements of an
array are all submitted at once, and here only ended. Belongs here: making, keeping apart and ending
the jobs of one run from inside one of them. Does not belong here: deciding to go on (`policy`), or
the first submission (`hpctrain.actions.submit`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpctrain.errors import SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.store.jobs import (
    cancel_requested,
    generation,
    started_ids,
    submitted_ids,
    successor_ids,
)
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import Event, EventKind
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.documents import ActionKind

_POLL_SECONDS = 2.0
_FORGOTTEN = "Invalid job id specified"
# Beyond KillWait: epilog, and the message that the job is over.
_ENDING_SECONDS = 30.0


def successor_options(run_layout: RunLayout, job_id: int) -> list[str]:
    """What sbatch is told about the job that goes on after `job_id`.

    sbatch(1), --dependency=afterany: it may begin once that job has ended in any way;
    --kill-on-invalid-dep: should that become impossible, it does not wait for ever.
    """
    return [
        f"--dependency=afterany:{job_id}",
        "--kill-on-invalid-dep=yes",
        f"--chdir={run_layout.directory}",
    ]


def ensure_successor(context: AttemptContext) -> None:
    """Have a job in the queue that goes on after this one: it needs one in a chain only.

    Nodes from which nobody may submit, or a silent Slurm, do not keep the run from training: the
    ledger says so, and `hpctrain watch` submits the run again when it has no job left.
    """
    if context.config.continuation != "chain" or context.run_layout.done.exists():
        return
    events = context.ledger.events()
    if cancel_requested(events) or successor_ids(events, context.job_id):
        return
    try:
        job_id = _submit(context)
    except SlurmError as error:
        words = f"no successor could be submitted: {error}"
        context.ledger.append(EventKind.SUBMIT_FAILED, reason=words, successor_of=context.job_id)
        say(words)
        return
    say(f"job {job_id} goes on after this one")
    # A cancel that was being done meanwhile has not seen the new job.
    if cancel_requested(context.ledger.events()):
        _cancel_waiting(context.slurm, [job_id])


def _submit(context: AttemptContext) -> int:
    script = context.run_layout.script
    options = successor_options(context.run_layout, context.job_id)
    job_id = context.slurm.submit(script, options).job_id
    context.ledger.append(
        EventKind.SUBMITTED, job_id=job_id, successor_of=context.job_id, reason="successor"
    )
    return job_id


def end_succession(context: AttemptContext) -> None:
    """No other job of this run is to start: cancel those of this generation that wait.

    Raises nothing: what Slurm does not hear now, the next job finds in the ledger.
    """
    if context.config.continuation not in ("chain", "singleton", "array"):
        return
    # Our own job may be among them (the last element of an array has the id of the whole), but it
    # runs, and so it is left alone.
    ids = submitted_ids(generation(context.ledger.events()))
    words = _cancel_waiting(context.slurm, ids)
    if words:
        context.note(EventKind.OBSERVED, reason=words)
        say(words)


def _cancel_waiting(slurm: SlurmClient, ids: Sequence[int]) -> str:
    """Cancel what waits of `ids`; returns what went wrong, in words.

    Jobs that Slurm has forgotten (MinJobAge) wait no more; scancel goes on with the others.
    """
    try:
        slurm.cancel_all(ids, pending_only=True)
    except SlurmError as error:
        if all(_FORGOTTEN in line for line in str(error).splitlines()):
            return ""
        return f"jobs that wait could not be cancelled: {error}"
    return ""


def must_leave(context: AttemptContext) -> str | None:
    """Why this attempt must leave at once, in words; None if it need not.

    It leaves to another job of the run that runs, and after one that has stopped the run or was
    cancelled: a user who ends the running job of a chain means the run. One that is just ending is
    waited for. Silence of Slurm keeps nobody from training: epochs keep two writers apart.
    """
    events = context.ledger.events()
    ids = {*submitted_ids(events), *started_ids(events)} - {context.job_id}
    if not ids:
        return None
    stopped = stopped_before(events, context.job_id)
    if stopped is not None:
        end_succession(context)
        return f"job {stopped.job_id} has stopped this run ({stopped.reason})"
    patience_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            jobs = context.slurm.jobs({*ids, context.job_id})
        except SlurmError:
            return None
        cancelled = cancelled_job(jobs, events)
        if cancelled is not None:
            return _leave_cancelled(context, cancelled)
        words = reason_to_leave(context.job_id, jobs)
        ending = [job for job in jobs.values() if job.state is JobState.COMPLETING]
        if words or not ending or time.monotonic() >= deadline or context.signals.final:
            break
        time.sleep(_POLL_SECONDS)
    return words


def stopped_before(events: Sequence[Event], job_id: int) -> Event | None:
    """The word of an earlier job of this generation that the run is not to go on.

    Its successors are cancelled with it, unless Slurm does not hear that. A supervisor that has
    outlived its generation has no say in this one.
    """
    recent = generation(events)
    others = {*submitted_ids(recent), *started_ids(recent)} - {job_id}
    for event in reversed(recent):
        if event.event is EventKind.ACTION and event.job_id in others:
            return event if event.action == ActionKind.STOP else None
    return None


def _leave_cancelled(context: AttemptContext, cancelled: JobRecord) -> str:
    """Have it in the ledger, for Slurm forgets; then no other job is to start either."""
    words = f"job {cancelled.job_id} of this run was cancelled: cancelled runs stay cancelled"
    context.ledger.append(EventKind.CANCEL_REQUESTED, job_id=cancelled.job_id, reason=words)
    end_succession(context)
    return words


def cancelled_job(jobs: dict[int, JobRecord], events: Sequence[Event]) -> JobRecord | None:
    """A job of this generation that was cancelled while it ran. One that was cancelled while it
    waited is no word about the run: the supervisor itself does so."""
    begun = set(started_ids(generation(events)))
    for job in jobs.values():
        if job.state is JobState.CANCELLED and job.job_id in begun:
            return job
    return None


def reason_to_leave(job_id: int, jobs: dict[int, JobRecord]) -> str | None:
    """Which other job of a run keeps `job_id` from it. Of two that run, the first one stays."""
    mine = jobs.get(job_id) or JobRecord(job_id)
    for other in jobs.values():
        holds_nodes = other.state.is_active and other.state is not JobState.COMPLETING
        if other.job_id != job_id and holds_nodes and _order(other) < _order(mine):
            state = other.state.lower()
            return f"job {other.job_id} of this run is {state}: the run is left to it"
    return None


def _order(job: JobRecord) -> tuple[float, int]:
    """Who came first; a start that nobody tells of came last."""
    return (float("inf") if job.start_time is None else job.start_time), job.job_id
