"""Requeue our own job; submit, cancel and adopt the other jobs where Slurm does not requeue.

A chain grows while it runs: each job submits the next one. Singletons and the elements of an array
are all submitted at once, and here only cancelled. Belongs here: requeueing, submitting, telling
apart and cancelling the jobs of one run from inside one of them. Does not belong here: deciding to
continue (`policy`), the first submission (`hpctrain.job.job_submission`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence

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
from hpctrain.slurm.client import Backoff, SlurmClient
from hpctrain.slurm.reasons import JobEnd
from hpctrain.slurm.records import JobRecord, RequeueAnswer, RequeueResult
from hpctrain.slurm.states import JobState
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
        slurm = context.slurm.at(submit_command=context.config.submission.words)
        submitted = slurm.submit(script, options, variables=variables)
        job_id = submitted.job_id
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
        site_messages=submitted.messages,
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
        slurm_cluster=context.config.submission.cluster,
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
    recent = generation(events) if recorded else []
    # An earlier job of this generation that has stopped the run: its successors are cancelled with
    # it, unless Slurm did not answer. A supervisor that outlived its generation cannot stop this.
    others = {*submitted_ids(recent), *started_ids(recent)} - {context.job_id}
    acted = (e for e in reversed(recent) if e.event is EventKind.ACTION and e.job_id in others)
    last = next(acted, None)
    if last is not None and last.action == ActionKind.STOP:
        end_succession(context)
        return f"job {last.job_id} has stopped this run ({last.reason})"
    begun = set(started_ids(recent))
    patience_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    deadline, pauses = clock.monotonic() + patience_seconds, Backoff()
    while True:
        try:
            jobs = {job.job_id: job for job in _jobs_of_run(context, events).jobs}
        except SlurmError:
            return None
        for job in jobs.values():
            # Not one that was cancelled while it waited and had no nodes: supervisors do that.
            ran = job.job_id in begun and bool(job.node_list)
            if job.state is JobState.CANCELLED and ran:
                # Recorded, because Slurm forgets it; no other job is to start either.
                reason = (
                    f"job {job.job_id} of this run was cancelled: cancelled runs stay cancelled"
                )
                context.ledger.append(EventKind.CANCELLED, job_id=job.job_id, reason=reason)
                end_succession(context)
                return reason
        leave_to = reason_to_leave(context.job_id, jobs)
        ending = [job for job in jobs.values() if job.state is JobState.COMPLETING]
        if leave_to or not ending or clock.monotonic() >= deadline or context.signals.final:
            break
        clock.sleep(pauses.next_seconds())
    return leave_to


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


# -- Requeue our own job, even during controller outages and in our own last seconds ------------


_PATIENCE_SECONDS = 600.0
# Of a job that is completing: the attempt ends and not the run, so it is requeued all the same.
_ENDS_BY_SLURM = (JobEnd.TIME_LIMIT, JobEnd.NODE_FAILED)


def requeue(
    slurm: SlurmClient, job_id: int, before_retry: Callable[[], None] = lambda: None
) -> tuple[bool, str]:
    """Requeue the job; return whether it is in the queue now, and Slurm's answer as text.

    `before_retry` is called when Slurm did not answer at once, so that there is time for more.

    Slurm then delays the job for cred_expire + 1 s (121 s by default). Nothing sent from inside the
    job shortens that: while it is COMPLETING, `StartTime=now` is accepted and lost.
    """
    return _until_answered(slurm, job_id, slurm.requeue, before_retry)


def hold(slurm: SlurmClient, job_id: int) -> tuple[bool, str]:
    """Requeue the job in held state, until its owner releases it (scontrol(1), requeuehold)."""
    return _until_answered(slurm, job_id, slurm.requeue_hold)


def exclude(slurm: SlurmClient, job_id: int, nodes: Sequence[str]) -> str:
    """Exclude `nodes` from the requeued job; return the result as text.

    The owner may set ExcNodeList once the job is requeued, while it is still completing, but not
    while it runs (slurmctld: "Job is no longer pending execution").
    """
    try:
        slurm.update_job(job_id, exclude_nodes=nodes)
    except SlurmError as error:
        return f"{', '.join(nodes)} could not be excluded: {error}"
    return f"without {', '.join(nodes)}"


def _until_answered(
    slurm: SlurmClient,
    job_id: int,
    call: Callable[[int], RequeueAnswer],
    before_retry: Callable[[], None] = lambda: None,
) -> tuple[bool, str]:
    deadline, pauses = clock.monotonic() + _PATIENCE_SECONDS, Backoff()
    while True:
        answer = call(job_id)
        if answer.result is not RequeueResult.UNREACHABLE or clock.monotonic() >= deadline:
            return answer.will_run_again, answer.result.value
        before_retry()
        clock.sleep(pauses.next_seconds())
        # Slurm 22.05.8 accepts the requeue of a cancelled job, which would bring it back.
        with contextlib.suppress(SlurmError):
            job = slurm.jobs([job_id]).get(job_id)
            if job is None:
                continue
            by_slurm = job.end in _ENDS_BY_SLURM or job.preempt_time is not None
            ending = job.state is JobState.COMPLETING and not by_slurm
            if job.state is JobState.CANCELLED or ending:
                return False, "cancelled while the controller was away"
