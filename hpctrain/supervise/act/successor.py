"""Which job goes on after this one, where Slurm does not requeue.

A chain grows while it runs: each job submits the one behind it. Singletons and the elements of an
array are all submitted at once, and here only ended. Belongs here: making, keeping apart and ending
the jobs of one run from inside one of them. Does not belong here: deciding to go on (`policy`), or
the first submission (`hpctrain.actions.submit`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hpctrain.errors import SlurmError
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.store.jobs import (
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
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.run_records import Progress, read_record
from hpctrain.supervise.act.requeue import exclude
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.judge.documents import ActionKind
from hpctrain.supervise.run_jobs import RunJobs, identity_of, select_jobs

_POLL_SECONDS = 2.0
_ENDS = (ActionKind.STOP, ActionKind.FINISH)
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
        *sbatch_options(run_layout.directory),
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
        _cancel_waiting(context)


def _submit(context: AttemptContext) -> int:
    script = context.run_layout.script
    options = successor_options(context.run_layout, context.job_id)
    job_id = context.slurm.submit(script, options).job_id
    context.ledger.append(
        EventKind.SUBMITTED,
        job_id=job_id,
        successor_of=context.job_id,
        reason="successor",
        cluster=context.attempt.cluster,
    )
    return job_id


def adopt_own_job(context: AttemptContext) -> None:
    """Record this job in the ledger unless its client has: it was started with sbatch by hand, or
    its client died before it could record it.

    A run that was over begins anew with it; otherwise it is one more job of those that go on.
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
    """No other job of this run is to start: cancel those of this generation that wait.

    Raises nothing: what Slurm does not hear now, the next job finds in the ledger.
    """
    if context.config.continuation not in ("chain", "singleton", "array"):
        return
    # Our own job may be among them (the last element of an array has the id of the whole), but it
    # runs, and so it is left alone.
    words = _cancel_waiting(context)
    if words:
        context.note(EventKind.OBSERVED, reason=words)
        say(words)


def exclude_from_successors(context: AttemptContext, nodes: Sequence[str]) -> str:
    """Keep the jobs of the run that wait in the queue away from `nodes`.

    Returns what came of it, in words; raises nothing.
    """
    try:
        waiting = _jobs_of_run(context, context.ledger.events()).waiting
    except SlurmError as error:
        return f"{', '.join(nodes)} could not be excluded: {error}"
    ids = dict.fromkeys(job.submitted_id for job in waiting)
    words = (f"job {job_id}: {exclude(context.slurm, job_id, nodes)}" for job_id in ids)
    return "; ".join(words) or "no job waits that could be kept away from them"


def _cancel_waiting(context: AttemptContext) -> str:
    """Cancel the jobs of the run that wait; returns what went wrong, in words.

    Slurm is asked first whose they are: an id of the ledger may be somebody else's job by now.
    """
    try:
        waiting = _jobs_of_run(context, context.ledger.events()).waiting
        context.slurm.cancel_all({job.submitted_id for job in waiting}, pending_only=True)
    except SlurmError as error:
        return f"jobs that wait could not be cancelled: {error}"
    return ""


def _jobs_of_run(context: AttemptContext, events: Sequence[Event]) -> RunJobs:
    """Raises SlurmError when Slurm does not answer."""
    records = context.slurm.jobs_of_users({os.getuid()})
    identity = identity_of(context.run_layout.directory)
    return select_jobs(identity, events, records.values(), context.attempt.cluster)


def must_leave(context: AttemptContext) -> str | None:
    """Why this attempt must leave at once, in words; None if it need not.

    It leaves to another job of the run that runs, and after one that has stopped the run or was
    cancelled: a user who ends the running job of a chain means the run. One that is just ending is
    waited for. Silence of Slurm keeps nobody from training: epochs keep two writers apart. A job
    that nobody has recorded was started by a person, whatever was said before.
    """
    events = context.ledger.events()
    lives_on = _lives_on(context, events)
    if lives_on is not None:
        return lives_on
    if not set(job_ids(events)) - {context.job_id, context.attempt.submitted_id}:
        return None
    recorded = context.attempt.submitted_id in submitted_ids(events)
    stopped = stopped_before(events, context.job_id) if recorded else None
    if stopped is not None:
        end_succession(context)
        return f"job {stopped.job_id} has stopped this run ({stopped.reason})"
    patience_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            jobs = {job.job_id: job for job in _jobs_of_run(context, events).jobs}
        except SlurmError:
            return None
        cancelled = cancelled_job(jobs, events) if recorded else None
        if cancelled is not None:
            return _leave_cancelled(context, cancelled)
        words = reason_to_leave(context.job_id, jobs)
        ending = [job for job in jobs.values() if job.state is JobState.COMPLETING]
        if words or not ending or time.monotonic() >= deadline or context.signals.final:
            break
        time.sleep(_POLL_SECONDS)
    return words


def _lives_on(context: AttemptContext, events: Sequence[Event]) -> str | None:
    """Words if the run has jobs on another cluster and shows signs of life: no Slurm can say from
    here whether they run."""
    home = cluster_of(events)
    if home is None or context.attempt.cluster in (None, home):
        return None
    progress = read_record(context.run_layout.progress, Progress)
    if progress is None or time.time() - progress.time > context.config.stall_seconds:
        return None
    age = max(0.0, time.time() - progress.time)
    return (
        f"its jobs are on cluster {home}, where it gave a sign of life {age:.0f} s ago: this job "
        f"of cluster {context.attempt.cluster} leaves the run to them"
    )


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
    context.ledger.append(EventKind.CANCELLED, job_id=cancelled.job_id, reason=words)
    end_succession(context)
    return words


def cancelled_job(jobs: dict[int, JobRecord], events: Sequence[Event]) -> JobRecord | None:
    """A job of this generation that was cancelled while it ran. One that was cancelled while it
    waited is no word about the run: the supervisor itself does so."""
    begun = set(started_ids(generation(events)))
    for job in jobs.values():
        ran = job.job_id in begun and bool(job.node_list)  # a job that waits has no nodes
        if job.state is JobState.CANCELLED and ran:
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
