"""Finds the problems of a run that its supervisor cannot handle, and their remedies. Pure.

A live supervisor handles its own run. What remains is a supervisor that was lost without a record,
and a job that waits for something that will not happen by itself. A pass never touches what a user
has cancelled, held or stopped, nor what an administrator holds. A job whose end is unknown may have
been cancelled, so it is only reported. Budgets are the supervisor's, counted in the run's ledger.
Belongs here: symptoms, one rule for each, what the policy allows. Does not belong here: querying
Slurm, reading files, acting (`watch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.judge.attempts import ENDS_RUN, launch_ends, signals, standing_action, starts
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind, History, Situation, Verdict
from hpctrain.judge.job_end import why_ended
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import decide
from hpctrain.records.jobs import cancel_requested, generation, started_ids, submitted_ids
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.runs.state import (
    BY_SLURM,
    RunState,
    cancelled_in_slurm,
    counted,
    ended_by_supervisor,
    hold_text,
    supervisor_began,
)
from hpctrain.slurm.reasons import JobHold, WaitReason
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

# slurmctld(8) sets the start of a requeued job to cred_expire + 1 s, 121 s by default; a person
# has requested a longer wait (job_mgr.c, batch_requeue_fini).
_LONGEST_REQUEUE_DELAY_SECONDS = 300.0
_SHORTEST_DELAY_SECONDS = 10.0
_TOO_FEW_SECONDS = 1800.0
# A checkpoint is written beside the newest one, and others write there, too.
_CHECKPOINTS_FREE = 2.0
_NO_NODE = (
    WaitReason.NODES_UNAVAILABLE,
    WaitReason.BAD_CONSTRAINTS,
    WaitReason.NODE_DOWN,
    WaitReason.PARTITION_CONFIG,
)
_MISSING = (
    WaitReason.RESOURCES,
    WaitReason.PRIORITY,
    WaitReason.NODES_UNAVAILABLE,
    WaitReason.NODES_REQUIRED,
    WaitReason.PARTITION_NODE_LIMIT,
)


def find_problems(run: WatchedRun) -> list[RunProblem]:
    """Find what is wrong with the run; empty if nothing is, or if a person has caused it."""
    if run.unrecorded:
        job_id = run.unrecorded[0].job_id
        message = f"job {job_id} is one of this run, and its ledger does not know the job"
        return [RunProblem(run.run_id, Symptom.UNRECORDED, WatchRemedy.ADOPT, message, job_id)]
    if not generation(run.events) or cancel_requested(run.events) or run.asked_by:
        return []
    if any(job.state is JobState.UNKNOWN for job in run.jobs):
        return []
    live = [job for job in run.jobs if not job.state.is_ended]
    active = [job for job in live if job.state.is_active]
    if active:
        return _running_problems(run, active[0])
    if live:
        return [found for job in live for rule in _PENDING if (found := rule(run, job))][:1]
    return problems_without_jobs(run)


def _running_problems(run: WatchedRun, job: JobRecord) -> list[RunProblem]:
    """Report a run whose supervisor is silent, or fails to stop a storm; nothing else is done.

    Silence can mean that the nodes hang, or that this host does not see new files. In the second
    case a remedy would kill all runs at once.
    """
    silent_seconds = run.now - max(run.signs_time or 0.0, job.start_time or run.now)
    limit_seconds = max(run.config.stall_seconds, run.config.setup_stall_seconds)
    if job.state.is_running and silent_seconds > limit_seconds + run.grace_seconds:
        message = (
            f"no sign of life of trainer and supervisor for {silent_seconds / 60:.0f} min: look at "
            f"{job.node_list or 'its nodes'}; `scontrol requeue {job.job_id}` restarts it"
        )
        return [report_only(run, Symptom.STALLED, message, job.job_id)]
    past = run.past
    recent = run.now - run.last_failure_time < run.config.storm_window_seconds
    if recent and past.recent_failures >= run.config.storm_failures:
        return [report_only(run, Symptom.STORM, storm_message(run, past), job.job_id)]
    disk = run.disk
    if disk is not None and disk.free_bytes < _CHECKPOINTS_FREE * disk.checkpoint_bytes:
        message = (
            f"{short_bytes(disk.free_bytes)} are left where the run is, and its newest checkpoint "
            f"takes {short_bytes(disk.checkpoint_bytes)}: a save may soon fail"
        )
        return [report_only(run, Symptom.DISK_LOW, message, job.job_id)]
    return []


# -- a job waits -------------------------------------------------------------------------------


def _launch_held(run: WatchedRun, job: JobRecord) -> RunProblem | None:
    """Release a job that Slurm holds because a prolog failed, or because it failed too often.

    Slurm drains the node itself, so the job gets another one. A login environment that cannot be
    read is the user's own, on every node: each release would drain one more.
    """
    if job.hold is None or job.hold not in BY_SLURM:
        return None
    text = hold_text(job.hold)
    if job.hold is JobHold.USER_ENVIRONMENT:
        message = f"{text.cause}; {text.cure}"
        return report_only(run, Symptom.ENVIRONMENT_HELD, message, job.job_id)
    cause, symptom = Cause.PROLOG_FAILURE, Symptom.LAUNCH_HELD
    reason = "a prolog or the launch of the script failed, and Slurm holds the job"
    if job.hold is JobHold.REQUEUE_LIMIT:
        symptom = Symptom.LIMIT_HELD
        reason = f"{text.cause}, and holds the job"
    lost, verdict = run.attempt_lost(job, cause, reason), Verdict(cause, reason)
    return allowed_by_policy(run, symptom, WatchRemedy.RELEASE, verdict, job.job_id, lost)


def _delayed(run: WatchedRun, job: JobRecord) -> RunProblem | None:
    """Start a requeued job that waits for old credentials to expire; its owner may do that."""
    if job.wait is not WaitReason.BEGIN_TIME or not job.restart_count or job.start_time is None:
        return None
    wait_seconds = job.start_time - (job.submit_time or 0.0)
    left_seconds = job.start_time - run.now
    if wait_seconds > _LONGEST_REQUEUE_DELAY_SECONDS or left_seconds < _SHORTEST_DELAY_SECONDS:
        return None
    if run.past.recent_failures >= run.config.storm_failures:
        return None  # in a storm the delay is useful
    message = f"it would wait {left_seconds:.0f} s more after its requeue"
    return RunProblem(run.run_id, Symptom.DELAYED, WatchRemedy.START_NOW, message, job.job_id)


def _no_node_left(run: WatchedRun, job: JobRecord) -> RunProblem | None:
    """Clear the excluded nodes of a job that cannot be scheduled without them."""
    excluded = _excluded(run.events)
    if job.wait not in _NO_NODE or not excluded:
        return None
    message = f"it cannot be scheduled ({job.reason}) while it avoids {', '.join(excluded)}"
    remedy = WatchRemedy.CLEAR_EXCLUDED
    return RunProblem(run.run_id, Symptom.EXCLUDED, remedy, message, job.job_id)


def _excluded(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the nodes that the newest requeue has excluded, unless they were cleared since."""
    for event in reversed(generation(events)):
        if event.event is EventKind.WATCH and event.action == WatchRemedy.CLEAR_EXCLUDED:
            return ()
        if event.event is EventKind.ACTION and event.action == ActionKind.REQUEUE:
            return event.excluded
    return ()


def _too_few_nodes(run: WatchedRun, job: JobRecord) -> RunProblem | None:
    """Let a job that has waited long start on fewer nodes, if the spec has `min_nodes`."""
    shapes = run.config.shapes
    if len(shapes) < 2 or job.wait not in _MISSING:
        return None
    least, most = shapes[-1].nodes, shapes[0].nodes + run.config.spare_nodes
    waited_seconds = run.now - (job.submit_time or run.now)
    if job.node_count is None or job.node_count <= least or waited_seconds < _TOO_FEW_SECONDS:
        return None
    waited = f"it has waited {waited_seconds / 60:.0f} min for {job.node_count} nodes"
    message, remedy = f"{waited} and may begin with {least}", WatchRemedy.TAKE_FEWER
    return RunProblem(
        run.run_id, Symptom.TOO_FEW_NODES, remedy, message, job.job_id, nodes=(least, most)
    )


def _waits_long(run: WatchedRun, job: JobRecord) -> RunProblem | None:
    """Report a job that has waited longer than its user wants to wait without a word."""
    notify = run.config.notify
    limit_seconds = notify.queue_limit_seconds if notify is not None else None
    waited_seconds = run.now - (job.submit_time or run.now)
    if limit_seconds is None or waited_seconds < limit_seconds or job.hold is not None:
        return None
    reason = f" ({job.reason})" if job.reason else ""
    message = (
        f"it has waited {short_duration(waited_seconds)}, more than {short_duration(limit_seconds)}"
        f"{reason}"
    )
    return report_only(run, Symptom.WAITS_LONG, message, job.job_id)


# None of these applies to a job that its user or an administrator holds.
_PENDING = (_launch_held, _no_node_left, _delayed, _too_few_nodes, _waits_long)


# -- Finds runs that have no job left: finished, failed or orphaned. Pure -----------------------


# A failed run is reported for this long, and only once.
_FAILED_SECONDS = 7 * 86400.0
_CHAINS = ("chain", "singleton", "array")


def problems_without_jobs(run: WatchedRun) -> list[RunProblem]:
    """Find the problem of a run without a job in the queue; empty for one that is over."""
    recent = generation(run.events)
    begun = starts(recent)
    last = standing_action(run.events)
    if last is not None and last.action in ENDS_RUN:
        judged = ended_by_supervisor(run.events)
        failed = judged is not None and judged.state is RunState.FAILED
        if not failed or run.now - last.time > _FAILED_SECONDS:
            return []
        message = f"it has stopped and is not done: {last.reason}"
        return [report_only(run, Symptom.FAILED, message, last.job_id)]
    if (job := cancelled_in_slurm(run.events, run.jobs)) is not None:
        message = f"job {job.job_id} ended as CANCELLED: cancelled runs stay cancelled"
        remedy = WatchRemedy.NOTE
        return [RunProblem(run.run_id, Symptom.CANCELLED, remedy, message, job.job_id)]
    if run.now < run.alive_until:
        return []  # it trains, whatever this Slurm knows
    newest = counted(run.jobs)
    ended_time = (newest.end_time if newest else None) or recent[-1].time
    if run.now - ended_time < run.grace_seconds:
        return []
    if newest is not None and not supervisor_began(run.events, newest):
        ended = why_ended(newest, begun=False)
        if ended is not None and ended[0] is Cause.LAUNCH_FAILURE:
            ended = run.ended_by_script or ended
        return [_orphan(run, newest, ended)]
    if last is not None:
        return [_unfollowed(run, last) if _all_known(run, last) else _orphan(run, None, None)]
    ended = why_ended(newest, begun=True)
    # Where Slurm has forgotten the job: its time limit or a cancel would have sent a signal first,
    # and the ledger would contain it.
    if ended is None and begun and not signals(recent[recent.index(begun[-1]) :]):
        reason = f"job {begun[-1].job_id} is gone, and its supervisor left no record"
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
    ends = launch_ends(run.events)
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


# -- What the rules share: symptoms, remedies, the policy ---------------------------------------


# A storm is over this long after its last failure: the first delay of a relaunch in `policy`.
_STORM_PAUSE_SECONDS = 300.0
_TOLD_AGAIN_SECONDS = 86400.0


class Symptom(StrEnum):
    """What is wrong with a run."""

    ORPHANED = "orphaned"
    CHAIN_EXHAUSTED = "chain exhausted"
    PREEMPTED = "preempted"
    VANISHED = "vanished"
    LAUNCH_HELD = "launch failed, held"
    ENVIRONMENT_HELD = "no login environment, held"
    LIMIT_HELD = "launched too often, held"
    DELAYED = "requeue delay"
    EXCLUDED = "no node left"
    TOO_FEW_NODES = "too few nodes"
    WAITS_LONG = "waits long"
    DISK_LOW = "little disk left"
    STALLED = "stalled"
    STORM = "storm"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNRECORDED = "unrecorded job"


class WatchRemedy(StrEnum):
    """What a pass does about a problem.

    TELL only reports it. NOTE records what a person has done, because Slurm forgets it
    (MinJobAge). ADOPT records a job that the ledger does not contain.
    """

    RESUBMIT = "resubmit"
    RELEASE = "release"
    START_NOW = "start now"
    CLEAR_EXCLUDED = "clear excluded nodes"
    TAKE_FEWER = "take fewer nodes"
    ADOPT = "record it"
    TELL = "tell"
    NOTE = "note"


@dataclass(frozen=True)
class DiskSpace:
    """What the file system of a run has left, and what its newest checkpoint takes, in bytes."""

    free_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class WatchedRun:
    """Snapshot of one run at the time `now`; times in seconds since the epoch.

    `events` reach back at least to the newest submission. `jobs` are the jobs of that generation
    that Slurm knows, ended ones included; `unrecorded` are those missing in the ledger.
    `signs_time` is the newest sign of life of trainer or supervisor, `alive_until` the latest time
    at which the trainer's next one is due. `asked_by` is the author of a pending request. `disk`:
    None where nobody is to be told about it. `ended_by_script`: why the script of the newest job
    ended before a supervisor began, as its own log tells.
    """

    run_id: str
    events: Sequence[Event]
    config: SuperviseConfig
    jobs: tuple[JobRecord, ...]
    now: float
    grace_seconds: float
    signs_time: float | None = None
    asked_by: str | None = None
    unrecorded: tuple[JobRecord, ...] = ()
    alive_until: float = 0.0
    disk: DiskSpace | None = None
    ended_by_script: tuple[Cause, str] | None = None

    @property
    def past(self) -> History:
        return history(self.events, self.config.storm_window_seconds)

    @property
    def last_failure_time(self) -> float:
        return max((event.time for event in self.events if event.cause), default=0.0)

    def attempt_lost(self, job: JobRecord, cause: Cause, reason: str) -> Event:
        """Build the event that closes an attempt whose supervisor can no longer do so."""
        return Event(
            event=EventKind.ATTEMPT_LOST,
            time=self.now,
            job_id=job.job_id,
            restart_count=job.restart_count or 0,
            cause=cause,
            reason=reason,
        )


@dataclass(frozen=True)
class RunProblem:
    """One symptom of a run, its remedy, and a message about both.

    `lost` is the event that must close an attempt in the ledger before the remedy.
    """

    run_id: str
    symptom: Symptom
    remedy: WatchRemedy
    message: str
    job_id: int | None = None
    lost: Event | None = None
    nodes: tuple[int, int] | None = None


def is_reported(run: WatchedRun, problem: RunProblem) -> bool:
    """Whether the newest report of this problem and job still stands: then it is not told again.

    What else happens in the run does not end a problem. A problem whose end no event shows, such as
    a full disk, is told again after a day, if the run has gone on meanwhile. A remedy is never a
    repetition: what was only told before may be possible now.
    """
    if problem.remedy is not WatchRemedy.TELL:
        return False
    report, later = None, list[Event]()
    for event in reversed(run.events):
        if event.event is not EventKind.WATCH:
            later.append(event)
        elif (
            event.symptom == problem.symptom
            and event.action == WatchRemedy.TELL
            and event.job_id == problem.job_id
        ):
            report = event
            break
    if report is None:
        return False
    if later and run.now - report.time >= _TOLD_AGAIN_SECONDS:
        return False
    return not _has_ended(run, problem, report, later)


def _has_ended(run: WatchedRun, problem: RunProblem, report: Event, later: Sequence[Event]) -> bool:
    """Whether a problem was over between its report and now, so that this is another one."""
    if problem.symptom is Symptom.STALLED:
        return bool(later) or (run.signs_time or 0.0) > report.time
    if problem.symptom is Symptom.STORM:
        return any(
            event.cause
            and history(
                [one for one in run.events if one.time <= event.time],
                run.config.storm_window_seconds,
            ).recent_failures
            < run.config.storm_failures
            for event in later
        )
    if problem.symptom is Symptom.DISK_LOW:
        return False
    # The job waits, or it has ended.
    return any(
        (event.event is EventKind.ATTEMPT_STARTED and event.job_id == problem.job_id)
        or (event.event is EventKind.CONTROL and event.action == "resume")
        for event in later
    )


def report_only(
    run: WatchedRun, symptom: Symptom, message: str, job_id: int | None = None
) -> RunProblem:
    """Build a problem that is only reported."""
    return RunProblem(run.run_id, symptom, WatchRemedy.TELL, message, job_id)


def storm_message(run: WatchedRun, past: History) -> str:
    """Describe how many failures were in the window of a storm."""
    minutes = run.config.storm_window_seconds / 60
    return f"{past.recent_failures} failures within {minutes:.0f} min"


def allowed_by_policy(
    run: WatchedRun,
    symptom: Symptom,
    remedy: WatchRemedy,
    verdict: Verdict,
    job_id: int | None,
    lost: Event | None = None,
) -> RunProblem:
    """Build a problem with its remedy if the run's policy would continue, else only report it.

    The policy decides as on a site that requeues, because the pass can submit the run again.
    """
    closed = {one.attempt for one in run.events if one.event is EventKind.ATTEMPT_LOST}
    if lost is not None and lost.attempt in closed:
        lost = None
    events = [*run.events, lost] if lost else run.events
    past = history(events, run.config.storm_window_seconds)
    config = run.config.model_copy(update={"continuation": "requeue"})
    action = decide(verdict, past, Situation(keeps_nodes=False), config)
    lost_in_a_row = past.of(verdict.cause) if verdict.cause is Cause.SUPERVISOR_LOST else 0
    recent = run.now - run.last_failure_time < _STORM_PAUSE_SECONDS
    # The policy leaves these two limits to the queue.
    if lost_in_a_row >= run.config.failures_without_progress:
        refusal = f"{lost_in_a_row} supervisors lost in a row without a new checkpoint"
    elif past.recent_failures >= run.config.storm_failures and recent:
        refusal = f"{storm_message(run, past)}, so it waits"
    elif action.kind is not ActionKind.REQUEUE:
        refusal = action.reason
    else:
        return RunProblem(run.run_id, symptom, remedy, verdict.reason, job_id, lost)
    return report_only(run, symptom, f"{verdict.reason}; left alone: {refusal}", job_id)
