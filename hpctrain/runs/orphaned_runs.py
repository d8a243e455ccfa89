"""Finds runs that have no job left: finished, failed or orphaned. Pure.

Belongs here: distinguishing them by the last action in the ledger and the jobs that Slurm still
knows. Does not belong here: jobs that are in the queue (`watch_rules`).
"""

from __future__ import annotations

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind, Verdict
from hpctrain.judge.lost_attempts import why_ended
from hpctrain.records.jobs import generation, started_ids, submitted_ids
from hpctrain.records.ledger import Event, EventKind
from hpctrain.runs.run_problems import (
    RunProblem,
    Symptom,
    WatchedRun,
    WatchRemedy,
    allowed_by_policy,
    report_only,
)
from hpctrain.runs.state import RunState, counted, stopped_by_supervisor
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

_BY_SUPERVISOR = (EventKind.ATTEMPT_STARTED, EventKind.ACTION)
_OVER = (ActionKind.FINISH, ActionKind.STOP, ActionKind.HOLD)
# A failed run is reported for this long, and only once.
_FAILED_SECONDS = 7 * 86400.0
_CHAINS = ("chain", "singleton", "array")


def problems_without_jobs(run: WatchedRun) -> list[RunProblem]:
    """Find the problem of a run without a job in the queue; empty for one that is over."""
    recent = generation(run.events)
    starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
    written = [event for event in recent if event.event in _BY_SUPERVISOR]
    decided = [event for event in written if event.action != ActionKind.RELAUNCH]
    last = decided[-1] if decided and decided[-1].event is EventKind.ACTION else None
    if last is not None and last.action in _OVER:
        stopped = stopped_by_supervisor(run.events)
        failed = stopped is not None and stopped.state is RunState.FAILED
        if not failed or run.now - last.time > _FAILED_SECONDS:
            return []
        message = f"it has stopped and is not done: {last.reason}"
        return [report_only(run, Symptom.FAILED, message, last.job_id)]
    for job in run.jobs:
        if job.state is JobState.CANCELLED:
            message = f"job {job.job_id} ended as CANCELLED: cancelled runs stay cancelled"
            remedy = WatchRemedy.NOTE
            return [RunProblem(run.run_id, Symptom.CANCELLED, remedy, message, job.job_id)]
    if run.now < run.alive_until:
        return []  # it trains, whatever this Slurm knows
    newest = counted(run.jobs)
    ended_time = (newest.end_time if newest else None) or recent[-1].time
    if run.now - ended_time < run.grace_seconds:
        return []
    if newest is not None:
        begun = [e.restart_count or 0 for e in written if e.job_id == newest.job_id]
        if not begun or newest.restart_count not in (None, *begun):  # no supervisor has started
            return [_orphan(run, newest, why_ended(newest, begun=False))]
    if last is not None:
        return [_unfollowed(run, last) if _all_known(run, last) else _orphan(run, None, None)]
    ended = why_ended(newest, begun=True)
    if ended is None and starts:
        # Slurm has forgotten the job. Its time limit or a cancel would have sent a signal first,
        # and the ledger would contain it.
        later = recent[recent.index(starts[-1]) :]
        if not any(event.event is EventKind.SIGNAL for event in later):
            reason = f"job {starts[-1].job_id} is gone, and its supervisor left no record"
            ended = Cause.SUPERVISOR_LOST, reason
    return [_orphan(run, newest, ended)]


def _all_known(run: WatchedRun, last: Event) -> bool:
    """Return True if Slurm knows the ends of all jobs that were to follow.

    A job that Slurm has forgotten may have been cancelled.
    """
    recent = generation(run.events)
    begun, known = set(started_ids(recent)), {job.submitted_id for job in run.jobs}
    if run.config.continuation not in _CHAINS:
        return last.job_id in known
    if run.config.continuation == "array" and len(begun) < run.config.continuation_jobs:
        return bool(known)
    return all(job_id in begun or job_id in known for job_id in submitted_ids(recent))


def _orphan(run: WatchedRun, job: JobRecord | None, ended: tuple[Cause, str] | None) -> RunProblem:
    """Resubmit a run with an attempt that nobody has closed; only report it if the end is unknown.

    `job` is None if Slurm has forgotten the job.
    """
    recent = generation(run.events)
    newest_id = next(reversed(started_ids(recent) or submitted_ids(recent)))
    if ended is None:
        message = f"job {newest_id} is gone, and how it ended is unknown"
        hint = f"`hpctrain resume {run.run_id}` continues"
        return report_only(run, Symptom.VANISHED, f"{message}: {hint}", newest_id)
    if job is None:
        counts = [event.restart_count or 0 for event in recent if event.job_id == newest_id]
        job = JobRecord(newest_id, restart_count=max(counts, default=0))
    lost = run.attempt_lost(job, *ended)
    symptom = Symptom.PREEMPTED if ended[0] is Cause.PREEMPTED else Symptom.ORPHANED
    remedy = WatchRemedy.RESUBMIT
    return allowed_by_policy(run, symptom, remedy, Verdict(*ended), lost.job_id, lost)


def _unfollowed(run: WatchedRun, last: Event) -> RunProblem:
    """Resubmit a run that was to continue after the action `last`, but has no job for that."""
    ends = [event for event in run.events if event.event is EventKind.LAUNCH_ENDED]
    cause = Cause(ends[-1].cause) if ends and ends[-1].cause else Cause.UNKNOWN
    symptom = Symptom.ORPHANED
    reason = f"its last attempt ended ({last.reason}) and nothing followed"
    if last.action == ActionKind.LEAVE and run.config.continuation in _CHAINS:
        symptom = Symptom.CHAIN_EXHAUSTED
        reason = f"no job of the {run.config.continuation} is left ({last.reason})"
    elif cause is Cause.PREEMPTED:
        symptom = Symptom.PREEMPTED
    verdict = Verdict(cause, reason)
    return allowed_by_policy(run, symptom, WatchRemedy.RESUBMIT, verdict, last.job_id)
