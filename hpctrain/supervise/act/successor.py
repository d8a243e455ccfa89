"""Submit, cancel and adopt the other jobs of a run, where Slurm does not requeue.

A chain grows while it runs: each job submits the next one. Singletons and the elements of an array
are all submitted at once, and here only cancelled. Belongs here: submitting, telling apart and
cancelling the jobs of one run from inside one of them. Does not belong here: deciding to continue
(`policy`), the first submission (`hpctrain.job.job_submission`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.documents import ActionKind
from hpctrain.records.jobs import (
    being_submitted,
    cancel_requested,
    cluster_of,
    generation,
    job_ids,
    sbatch_options,
    started_ids,
    submitted_ids,
    successor_ids,
)
from hpctrain.records.kept_code import keep_script
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_jobs import RunJobs, identity_of, select_jobs
from hpctrain.records.run_records import Progress, read_record
from hpctrain.slurm.backoff import Backoff
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.supervise.act.requeue import exclude
from hpctrain.supervise.context import AttemptContext, log_message

_ENDS = (ActionKind.STOP, ActionKind.FINISH)
# Beyond KillWait: epilog, and the message that the job is over.
_ENDING_SECONDS = 30.0


def successor_options(run_layout: RunLayout, job_id: int) -> list[str]:
    """Return the sbatch options of the job that continues the run after `job_id`.

    sbatch(1), --dependency=afterany: it may begin once that job has ended in any way;
    --kill-on-invalid-dep: should that become impossible, it does not wait for ever.
    """
    return [
        f"--dependency=afterany:{job_id}",
        "--kill-on-invalid-dep=yes",
        *sbatch_options(run_layout.directory),
    ]


def ensure_successor(context: AttemptContext) -> None:
    """Submit the next job of a chain, unless it has been submitted; other runs need none.

    If the submission fails (these nodes may not submit, or Slurm does not answer), the run trains
    all the same: the ledger records it, and `hpctrain watch` submits a run without a job again.
    """
    if context.config.continuation != "chain" or context.run_layout.done.exists():
        return
    events = context.ledger.events()
    if cancel_requested(events) or successor_ids(events, context.job_id):
        return
    options = successor_options(context.run_layout, context.job_id)
    digest = keep_script(context.run_layout)
    try:
        script, variables = context.run_layout.script, context.config.submit_variables
        job_id = context.slurm.submit(script, options, variables=variables).job_id
    except SlurmError as error:
        reason = f"no successor could be submitted: {error}"
        context.ledger.append(EventKind.SUBMIT_FAILED, reason=reason, successor_of=context.job_id)
        log_message(reason)
        return
    context.ledger.append(
        EventKind.SUBMITTED,
        job_id=job_id,
        successor_of=context.job_id,
        reason="successor",
        cluster=context.attempt.cluster,
        script_sha256=digest,
    )
    log_message(f"job {job_id} will continue after this one")
    # A cancel that ran at the same time has not seen the new job.
    if cancel_requested(context.ledger.events()):
        _cancel_waiting(context)


def adopt_own_job(context: AttemptContext) -> None:
    """Record this job in the ledger, unless the client that submitted it has.

    It was started with sbatch by hand, or its client died before it could record the job. A run
    that was over starts a new generation with it; otherwise the job joins the present one.
    """
    events = context.ledger.events()
    if context.attempt.submitted_id in submitted_ids(events):
        return
    recent = generation(events)
    last = next((e for e in reversed(recent) if e.event is EventKind.ACTION), None)
    over = cancel_requested(events) or (last is not None and last.action in _ENDS)
    earlier = [] if over or being_submitted(events) else job_ids(recent)
    context.ledger.append(
        EventKind.ADOPTED,
        job_id=context.attempt.submitted_id,
        successor_of=earlier[-1] if earlier else None,
        cluster=context.attempt.cluster,
        reason="started by hand, or its client died before it could record it",
    )


def end_succession(context: AttemptContext) -> None:
    """Cancel the pending jobs of this generation, so that no other job of the run starts.

    Raises nothing: if Slurm does not get this, the next job finds the stop in the ledger.
    """
    if context.config.continuation not in ("chain", "singleton", "array"):
        return
    # Our own job may be among them (the last element of an array has the id of the whole), but it
    # runs, and only pending jobs are cancelled.
    problem = _cancel_waiting(context)
    if problem:
        context.note(EventKind.OBSERVED, reason=problem)
        log_message(problem)


def exclude_from_successors(context: AttemptContext, nodes: Sequence[str]) -> str:
    """Exclude `nodes` from the pending jobs of the run; return the result as text."""
    try:
        waiting = _jobs_of_run(context, context.ledger.events()).waiting
    except SlurmError as error:
        return f"{', '.join(nodes)} could not be excluded: {error}"
    ids = dict.fromkeys(job.submitted_id for job in waiting)
    results = (f"job {job_id}: {exclude(context.slurm, job_id, nodes)}" for job_id in ids)
    return "; ".join(results) or "no pending job could exclude them"


def _cancel_waiting(context: AttemptContext) -> str:
    """Cancel the pending jobs of the run; return the error as text, empty if there is none.

    Slurm is queried first: an id in the ledger may be the job of another user by now.
    """
    try:
        waiting = _jobs_of_run(context, context.ledger.events()).waiting
        context.slurm.cancel_all({job.submitted_id for job in waiting}, pending_only=True)
    except SlurmError as error:
        return f"pending jobs could not be cancelled: {error}"
    return ""


def _jobs_of_run(context: AttemptContext, events: Sequence[Event]) -> RunJobs:
    """Query the jobs of the run. Raises SlurmError when Slurm does not answer."""
    records = context.slurm.jobs_of_users({os.getuid()})
    identity = identity_of(context.run_layout.directory)
    return select_jobs(identity, events, records.values(), context.attempt.cluster)


def must_leave(context: AttemptContext) -> str | None:
    """Return why this attempt must end at once; None if it may train.

    It must if another job of the run is running, or if an earlier one has stopped the run or was
    cancelled: a user who cancels the running job of a chain means the run. A job that is just
    ending is waited for. Without an answer of Slurm the attempt trains, because epochs keep two
    writers apart. A job that is not recorded was started by a person, which overrules a stop.
    """
    events = context.ledger.events()
    home = cluster_of(events)
    if home is not None and context.attempt.cluster not in (None, home):
        # No Slurm can tell from here whether the jobs of the other cluster run.
        progress = read_record(context.run_layout.progress, Progress)
        age_seconds = clock.now() - progress.time if progress is not None else math.inf
        if age_seconds <= context.config.stall_seconds:
            return (
                f"its jobs are on cluster {home}, where it made progress "
                f"{max(0.0, age_seconds):.0f} s ago: this job of cluster "
                f"{context.attempt.cluster} leaves the run to them"
            )
    if not set(job_ids(events)) - {context.job_id, context.attempt.submitted_id}:
        return None
    recorded = context.attempt.submitted_id in submitted_ids(events)
    stopped = stopped_before(events, context.job_id) if recorded else None
    if stopped is not None:
        end_succession(context)
        return f"job {stopped.job_id} has stopped this run ({stopped.reason})"
    patience_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    deadline, pauses = clock.monotonic() + patience_seconds, Backoff()
    while True:
        try:
            jobs = {job.job_id: job for job in _jobs_of_run(context, events).jobs}
        except SlurmError:
            return None
        cancelled = cancelled_job(jobs, events) if recorded else None
        if cancelled is not None:
            # Recorded, because Slurm forgets it; no other job is to start either.
            reason = (
                f"job {cancelled.job_id} of this run was cancelled: cancelled runs stay cancelled"
            )
            context.ledger.append(EventKind.CANCELLED, job_id=cancelled.job_id, reason=reason)
            end_succession(context)
            return reason
        leave_to = reason_to_leave(context.job_id, jobs)
        ending = [job for job in jobs.values() if job.state is JobState.COMPLETING]
        if leave_to or not ending or clock.monotonic() >= deadline or context.signals.final:
            break
        clock.sleep(pauses.next_seconds())
    return leave_to


def stopped_before(events: Sequence[Event], job_id: int) -> Event | None:
    """Find the event with which an earlier job of this generation has stopped the run.

    Its successors are cancelled with it, unless Slurm did not answer. A supervisor that has
    outlived its generation cannot stop this one.
    """
    recent = generation(events)
    others = {*submitted_ids(recent), *started_ids(recent)} - {job_id}
    for event in reversed(recent):
        if event.event is EventKind.ACTION and event.job_id in others:
            return event if event.action == ActionKind.STOP else None
    return None


def cancelled_job(jobs: dict[int, JobRecord], events: Sequence[Event]) -> JobRecord | None:
    """Find a job of this generation that was cancelled while it ran.

    A job that was cancelled while it was pending does not count: the supervisor itself does that.
    """
    begun = set(started_ids(generation(events)))
    for job in jobs.values():
        ran = job.job_id in begun and bool(job.node_list)  # a job that waits has no nodes
        if job.state is JobState.CANCELLED and ran:
            return job
    return None


def reason_to_leave(job_id: int, jobs: dict[int, JobRecord]) -> str | None:
    """Return why `job_id` must leave the run to another job; of two that run, the first stays."""
    mine = jobs.get(job_id) or JobRecord(job_id)
    for other in jobs.values():
        holds_nodes = other.state.is_active and other.state is not JobState.COMPLETING
        if other.job_id != job_id and holds_nodes and _order(other) < _order(mine):
            state = other.state.lower()
            return f"job {other.job_id} of this run is {state}: the run is left to it"
    return None


def _order(job: JobRecord) -> tuple[float, int]:
    """Order jobs by start time; an unknown start comes last."""
    return (float("inf") if job.start_time is None else job.start_time), job.job_id
