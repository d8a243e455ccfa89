"""The state of a run in one word, from its ledger, its signs of life and what Slurm knows. Pure.

Silence of Slurm is *unknown*, never *gone*. Belongs here: the decision. Does not belong here:
asking anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.slurm.records import JobRecord
from hpctrain.store.ledger import Event, EventKind
from hpctrain.supervise.causes import Cause
from hpctrain.supervise.documents import (
    ActionKind,
)


class RunState(StrEnum):
    """What a run is doing."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    CANCELLED = "CANCELLED"
    NOT_SUBMITTED = "NOT SUBMITTED"
    UNKNOWN = "UNKNOWN"

    @property
    def over(self) -> bool:
        """True when nothing more will happen by itself."""
        return self not in (RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN)


@dataclass(frozen=True)
class Judged:
    """A state and the reason in words (empty when the state says it all)."""

    state: RunState
    reason: str = ""


def judge(
    events: Sequence[Event],
    *,
    done: bool,
    queued: JobRecord | None,
    asked: bool,
    past: JobRecord | None,
) -> Judged:
    """Decide the state of one run.

    `queued` is the job in squeue, `past` what accounting or the controller's memory says about a
    job that is not there any more; `asked` is False when Slurm could not be asked.
    """
    if done:
        return Judged(RunState.DONE)
    if queued is not None and not queued.state.is_ended:
        return _in_queue(events, queued)
    stopped = _stopped_by_supervisor(events)
    if stopped is not None:
        return stopped
    if any(event.event is EventKind.CANCEL_REQUESTED for event in _since_submission(events)):
        return Judged(RunState.CANCELLED, "by its user")
    if last_job_id(events) is None:
        return _never_submitted(events)
    if not asked:
        return Judged(RunState.UNKNOWN, "Slurm does not answer")
    return _after_the_queue(past or queued)


def last_job_id(events: Sequence[Event]) -> int | None:
    """The job id of the newest submission."""
    ids = [event.job_id for event in events if event.event is EventKind.SUBMITTED]
    return ids[-1] if ids else None


def _since_submission(events: Sequence[Event]) -> list[Event]:
    """Events after the newest submission: earlier ends do not count any more."""
    starts = [i for i, event in enumerate(events) if event.event is EventKind.SUBMITTED]
    return list(events[starts[-1] + 1 :]) if starts else []


def _in_queue(events: Sequence[Event], job: JobRecord) -> Judged:
    if job.state.is_pending:
        actions = [e for e in _since_submission(events) if e.event is EventKind.ACTION]
        why = f"requeued: {_last_cause(events)}; " if actions else ""
        return Judged(RunState.PENDING, f"{why}{job.reason or 'waiting'}")
    reason = "" if job.state.name == "RUNNING" else job.state.name.lower()
    return Judged(RunState.RUNNING, reason)


def _last_cause(events: Sequence[Event]) -> str:
    causes = [e.cause for e in events if e.event is EventKind.LAUNCH_ENDED and e.cause]
    return causes[-1].replace("_", " ") if causes else "cause unknown"


def _stopped_by_supervisor(events: Sequence[Event]) -> Judged | None:
    recent = _since_submission(events)
    stops = [e for e in recent if e.event is EventKind.ACTION and e.action == ActionKind.STOP]
    starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
    if not stops or (starts and recent.index(starts[-1]) > recent.index(stops[-1])):
        return None  # somebody has revived the job since
    ends = [event for event in recent if event.event is EventKind.LAUNCH_ENDED]
    cause = ends[-1].cause if ends else None
    if cause == Cause.CANCELLED:
        return Judged(RunState.CANCELLED, ends[-1].reason or "")
    if cause == Cause.YIELDED:
        return Judged(RunState.STOPPED, ends[-1].reason or "")
    return Judged(RunState.FAILED, stops[-1].reason or "")


def _never_submitted(events: Sequence[Event]) -> Judged:
    failed = [event for event in events if event.event is EventKind.SUBMIT_FAILED]
    if failed:
        return Judged(RunState.NOT_SUBMITTED, failed[-1].reason or "")
    return Judged(RunState.NOT_SUBMITTED, "the run directory was made, but sbatch did not finish")


def _after_the_queue(job: JobRecord | None) -> Judged:
    """The job has left the queue and its supervisor has not said why."""
    if job is None:
        return Judged(RunState.UNKNOWN, "Slurm does not know the job any more")
    name = job.state.name
    if name == "CANCELLED":
        return Judged(RunState.CANCELLED, "cancelled in Slurm")
    if job.exit_signal:
        return Judged(
            RunState.FAILED,
            f"the supervisor was killed by signal {job.exit_signal}; "
            "`hpctrain resubmit` goes on from the newest checkpoint",
        )
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return Judged(
        RunState.FAILED, f"the job ended as {name}{code} without a word of its supervisor"
    )
