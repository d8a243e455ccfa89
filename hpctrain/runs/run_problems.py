"""Defines the problems of runs that `watch` finds, and which remedies the policy allows. Pure.

Belongs here: the types that the rules share, and querying the policy. Does not belong here: the
rules (`watch_rules`, `watch_rules`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind, History, Situation, Verdict
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import decide
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.records import JobRecord

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
    None where nobody is to be told about it.
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
    closed = [
        (event.job_id, event.restart_count)
        for event in run.events
        if event.event is EventKind.ATTEMPT_LOST
    ]
    if lost is not None and (lost.job_id, lost.restart_count) in closed:
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
