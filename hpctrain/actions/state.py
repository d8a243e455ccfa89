"""The state of a run in one word, from its ledger, its signs of life and what Slurm knows. Pure.

Silence of Slurm is *unknown*, never *gone*. Belongs here: the decision. Does not belong here:
asking anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.store.jobs import (
    being_submitted,
    cancel_confirmed,
    cancel_requested,
    generation,
    last_submission,
    started_ids,
    submitted_ids,
)
from hpctrain.store.ledger import Event, EventKind
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import ActionKind

# slurmd's error 4021 (it could not open the log of the batch script) is kept as if it were a wait
# status, where it reads as signal 53; seen with 22.05.8 and 24.11.5.
_NO_LOG_SIGNAL = 53


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
    elsewhere: str | None = None,
) -> Judged:
    """Decide the state of one run.

    `queued` is the job that counts (see `counted`), as squeue or accounting knows it; `asked` is
    False when Slurm could not be asked, `elsewhere` the cluster that would have to be asked.
    """
    if done:
        return Judged(RunState.DONE)
    if queued is not None and not queued.state.is_ended:
        return _in_queue(events, queued)
    if not asked and _may_be_submitted(events):
        return Judged(RunState.UNKNOWN, _why_not_asked(events, elsewhere))
    stopped = _stopped_by_supervisor(events)
    if stopped is not None:
        return stopped
    if cancel_confirmed(events):
        return Judged(RunState.CANCELLED, "by its user")
    if last_job_id(events) is None and (asked or _has_no_job(events)):
        return _never_submitted(events)
    if not asked:
        return Judged(RunState.UNKNOWN, _why_not_asked(events, elsewhere))
    if cancel_requested(events):
        return Judged(RunState.CANCELLED, "by its user")
    return _after_the_queue(queued)


def _why_not_asked(events: Sequence[Event], elsewhere: str | None) -> str:
    """Silence of Slurm confirms nothing, a cancel that was announced included."""
    words = f"its jobs are on cluster {elsewhere}" if elsewhere else "Slurm does not answer"
    if cancel_requested(events):
        return f"{words}, so nobody knows whether the cancel was done"
    return words


def _has_no_job(events: Sequence[Event]) -> bool:
    """Nobody has called sbatch, or Slurm itself has said no to the newest submission."""
    last = last_submission(events)
    return last is None or (last.event is EventKind.SUBMIT_FAILED and last.answered)


def _may_be_submitted(events: Sequence[Event]) -> bool:
    """Somebody has called sbatch since, and has not recorded what Slurm said: what the jobs before
    ended as does not count if there is a new one."""
    last = last_submission(events)
    failed = last is not None and last.event is EventKind.SUBMIT_FAILED
    return being_submitted(events) or (failed and not _has_no_job(events))


def counted(jobs: Collection[JobRecord]) -> JobRecord | None:
    """The one of a run's jobs that says what the run is doing: the one that holds nodes, else the
    first of those that wait, else the last that ran, else the last that was cancelled waiting."""
    active = [job for job in jobs if job.state.is_active]
    waiting = active or [job for job in jobs if job.state.is_pending]
    if waiting:
        return min(waiting, key=lambda job: (job.start_time or float("inf"), job.job_id))
    return max(jobs, key=_last_to_run, default=None)


def _last_to_run(job: JobRecord) -> tuple[bool, float, int]:
    return bool(job.node_list), job.start_time or 0.0, job.job_id


def last_job_id(events: Sequence[Event]) -> int | None:
    """The job id of the newest submission, a successor's included."""
    return next(reversed(submitted_ids(events) or started_ids(events)), None)


def _since_submission(events: Sequence[Event]) -> list[Event]:
    """Events after the newest submission: earlier ends do not count any more."""
    return generation(events)[1:]


def _in_queue(events: Sequence[Event], job: JobRecord) -> Judged:
    if job.state.is_pending:
        return Judged(RunState.PENDING, f"{_why_again(events, job)}{job.reason or 'waiting'}")
    reason = "" if job.state is JobState.RUNNING else job.state.name.lower()
    return Judged(RunState.RUNNING, reason)


def _why_again(events: Sequence[Event], job: JobRecord) -> str:
    """What ended the attempt before: of the same job, or of the one that `job` follows."""
    recent = _since_submission(events)
    if not any(event.event is EventKind.ACTION for event in recent):
        return ""
    starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
    same = not starts or job.belongs_to({starts[-1].job_id or 0})
    return f"{'requeued' if same else 'next job'}: {_last_cause(events)}; "


def _last_cause(events: Sequence[Event]) -> str:
    causes = [e.cause for e in events if e.event is EventKind.LAUNCH_ENDED and e.cause]
    return causes[-1].replace("_", " ") if causes else "cause unknown"


def _stopped_by_supervisor(events: Sequence[Event]) -> Judged | None:
    recent = _since_submission(events)
    stops = [e for e in recent if e.event is EventKind.ACTION and e.action == ActionKind.STOP]
    starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
    if not stops or (starts and recent.index(starts[-1]) > recent.index(stops[-1])):
        return None  # somebody has revived the job since
    if stops[-1].exit_code == 0:  # as somebody asked, perhaps before any launch
        return Judged(RunState.STOPPED, stops[-1].reason or "")
    ends = [event for event in recent if event.event is EventKind.LAUNCH_ENDED]
    cause = stops[-1].cause or (ends[-1].cause if ends else None)
    if cause == Cause.CANCELLED:
        return Judged(RunState.CANCELLED, ends[-1].reason or "" if ends else "")
    if cause == Cause.YIELDED:
        return Judged(RunState.STOPPED, ends[-1].reason or "" if ends else "")
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
    if job.state is JobState.CANCELLED:
        return Judged(RunState.CANCELLED, "cancelled in Slurm")
    if job.exit_signal == _NO_LOG_SIGNAL:
        words = "Slurm could not write the job's log: is the run directory there on its nodes?"
        return Judged(RunState.FAILED, words)
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
