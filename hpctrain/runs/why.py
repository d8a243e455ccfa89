"""Explains the state of a run: the last verdict and action, remaining budgets, and what comes next.

Belongs here: querying the ledger, the policy and Slurm. Does not belong here: deciding
(`hpctrain.judge.policy`), wording for terminals.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.base.units import short_duration
from hpctrain.checkpoints.discover import good_steps
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import limit_of_all
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import is_requested, read_request
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.runs.job_holds import hold_text
from hpctrain.runs.policy_preview import CauseBudget, PolicyPreview, budgets, preview_policy
from hpctrain.runs.state import RunState, scattered_groups
from hpctrain.runs.status import observe
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.reasons import WaitReason
from hpctrain.slurm.records import JobRecord

_ENDS = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
_CONTINUATION = {
    "requeue": "Slurm puts the same job back into the queue; it keeps its id and its age",
    "chain": "each job has a successor in the queue that starts when it ends",
    "singleton": "jobs of one name were submitted together and run one after the other",
    "array": "the elements of a job array run one after the other",
    "none": "nobody starts the run again after its job: `hpctrain resume` does",
}


class LastEnd(BaseModel):
    """The last launch that ended, or attempt that was lost; times in seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    end_time: float
    epoch: int | None
    cause: str
    reason: str
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    node: str | None = None
    hard: bool = False
    failed_step: int | None = None
    launches_alike: int = 0
    stop_time: str | None = None


class LastAction(BaseModel):
    """The last action of the supervisor, Slurm's answer, and what was only observed."""

    model_config = ConfigDict(frozen=True)

    action_time: float
    action: str
    reason: str
    result: str | None = None
    excluded: tuple[str, ...] = ()
    delay_seconds: float | None = None
    observed: tuple[str, ...] = ()


class Storm(BaseModel):
    """Failures within the window; from `threshold` on the supervisor waits between launches."""

    model_config = ConfigDict(frozen=True)

    failures: int
    threshold: int
    window_seconds: float


class Why(BaseModel):
    """The output of `hpctrain why`."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    state: RunState
    state_reason: str
    job_id: int | None
    attempts: int
    waiting: str | None
    placement: str | None
    requests: tuple[str, ...]
    continuation: str
    continuation_words: str
    ended: LastEnd | None
    action: LastAction | None
    checkpoint_step: int | None
    budgets: tuple[CauseBudget, ...]
    failures_without_progress: int
    failures_allowed: int
    storm: Storm
    foresight: tuple[PolicyPreview, ...]


def why(run: RunFiles, slurm: SlurmClient, now: float | None = None) -> Why:
    """Explain a run. Raises InvalidInputError when its supervise.json cannot be read."""
    now = clock.now() if now is None else now
    config = read_supervise_config(run.layout.supervise_config)
    observed = observe([run], slurm)[0]
    row, events = observed.row, observed.events
    past = history(events, config.storm_window_seconds)
    checkpoint_step = next(iter(good_steps(run.layout.checkpoints)), None)
    waiting = None
    if row.state is RunState.PENDING and row.job_id is not None:
        try:
            job = slurm.show_job(row.job_id)
            waiting = waiting_words(job, now) if job is not None else None
        except SlurmError:
            waiting = "Slurm does not answer"
    standing = read_request(run.layout)
    requests = [f"{standing.kind}, by {standing.by}"] if standing else []
    if is_requested(run.layout, "save"):
        requests.append("save")
    ahead: list[PolicyPreview] = []
    if row.state not in (RunState.DONE, RunState.CANCELLED):
        # `hpctrain resume` would write this event, which restores all budgets.
        resumed = Event(event=EventKind.CONTROL, time=now, action="resume")
        assumed = [*events, resumed] if row.state.over else events
        step = max(row.step or 0, checkpoint_step or 0)
        ahead = preview_policy(assumed, config, now, checkpoint_step or 0, step)
    window = config.storm_window_seconds
    # Counted back from now: a storm that has passed is none.
    recent = [event for event in events if event.event in _ENDS and event.time >= now - window]
    return Why(
        run_id=run.run_id,
        directory=str(run.layout.directory),
        state=row.state,
        state_reason=row.reason,
        job_id=row.job_id,
        attempts=row.attempts,
        waiting=waiting,
        placement=scattered_groups(events),
        requests=tuple(requests),
        continuation=config.continuation,
        continuation_words=_CONTINUATION[config.continuation],
        ended=_last_end(events, past.same_fingerprint),
        action=_last_action(_since_the_attempt_before(events)),
        checkpoint_step=checkpoint_step,
        budgets=tuple(budgets(past, config)),
        failures_without_progress=past.failures_without_progress,
        failures_allowed=limit_of_all(config) - 1,
        storm=Storm(
            failures=history(recent, window).recent_failures,
            threshold=config.storm_failures,
            window_seconds=window,
        ),
        foresight=tuple(ahead),
    )


def _since_the_attempt_before(events: Sequence[Event]) -> Sequence[Event]:
    """Leave out what was done about earlier attempts, if the last one was lost without a word."""
    lost = [number for number, event in enumerate(events) if event.event in _ENDS][-1:]
    if not lost or events[lost[0]].event is not EventKind.ATTEMPT_LOST:
        return events
    begun = [
        number
        for number, event in enumerate(events[: lost[0]])
        if event.event is EventKind.ATTEMPT_STARTED
    ]
    # the one that tells of the loss may have begun before it did
    own = [n for n in begun if _same_attempt(events[n], events[lost[0]])]
    return events[own[-1] :] if own else events


def _same_attempt(left: Event, right: Event) -> bool:
    return (left.job_id, left.restart_count) == (right.job_id, right.restart_count)


def _last_end(events: Sequence[Event], alike: int) -> LastEnd | None:
    ends = [event for event in events if event.event in _ENDS]
    if not ends:
        return None
    last = ends[-1]
    return LastEnd(
        end_time=last.time,
        epoch=last.epoch,
        cause=last.cause or "unknown",
        reason=last.reason or "",
        evidence=last.evidence,
        rank=last.rank,
        node=last.node,
        hard=last.hard,
        failed_step=last.failed_step,
        launches_alike=alike,
        stop_time=_stop_time(events, last),
    )


def _stop_time(events: Sequence[Event], ended: Event) -> str | None:
    """Find what the time of the stop of this launch was computed from; None by Slurm's warning."""
    own = (e for e in events if e.event is EventKind.STOP_TIMED and e.epoch == ended.epoch)
    return next((event.reason for event in own), None)


def _last_action(events: Sequence[Event]) -> LastAction | None:
    numbers = [n for n, event in enumerate(events) if event.event is EventKind.ACTION]
    if not numbers:
        return None
    last, later = events[numbers[-1]], events[numbers[-1] + 1 :]
    results = [event.reason for event in later if event.event is EventKind.ACTION_RESULT]
    return LastAction(
        action_time=last.time,
        action=last.action or "",
        reason=last.reason or "",
        result=results[0] if results else None,
        excluded=last.excluded,
        delay_seconds=last.delay_seconds,
        observed=tuple(e.reason or "" for e in later if e.event is EventKind.OBSERVED),
    )


# -- why a job waits ---------------------------------------------------------------------------

_WAITS = {
    WaitReason.BEGIN_TIME: (
        "Slurm lets a requeued job wait until the credentials of the last start expire"
    ),
    WaitReason.PRIORITY: "jobs of higher priority come first",
    WaitReason.RESOURCES: "it is its turn as soon as enough nodes are free",
    WaitReason.DEPENDENCY: "it starts when the job before it has ended",
    WaitReason.NODES_UNAVAILABLE: "nodes that it needs are down, drained or reserved",
    WaitReason.BAD_CONSTRAINTS: "no nodes fit what it asks for",
    WaitReason.PARTITION_DOWN: "the partition is down",
    WaitReason.PARTITION_INACTIVE: "the partition does not start jobs now",
    WaitReason.PARTITION_TIME_LIMIT: "its time limit is above that of the partition",
    WaitReason.PARTITION_NODE_LIMIT: "it asks for more nodes than the partition gives",
    WaitReason.RESERVATION: "its reservation has not begun",
    WaitReason.ARRAY_TASK_LIMIT: "the element of the array before it still runs",
    WaitReason.LIMIT: "a limit of the account or the QOS is reached",
}


def waiting_words(job: JobRecord, now: float) -> str:
    """Explain why a job waits, with Slurm's reason and what a user can do."""
    reason = job.reason or "None"
    if job.hold is not None:
        held = hold_text(job.hold)
        words = f"{held.cause}; {held.cure}"
    else:
        words = _WAITS.get(job.wait, "") if job.wait is not None else ""
    parts = [f"{words} ({reason})" if words else reason]
    if job.start_time is not None and job.start_time > now and job.hold is None:
        parts.append(f"not before {short_duration(job.start_time - now)} from now")
    if job.exclude_nodes:
        parts.append(f"it must not run on {job.exclude_nodes}")
    return "; ".join(parts)
