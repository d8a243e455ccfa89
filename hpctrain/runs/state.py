"""Decides the state of a run from its ledger, its records and the jobs in Slurm. Pure.

If Slurm does not answer, the state is *unknown*, never *gone*. Belongs here: the decision. Does not
belong here: any query.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.judge.job_end import SETUP_EXIT_CODE
from hpctrain.records.jobs import (
    awaited_run,
    being_submitted,
    cancel_confirmed,
    cancel_requested,
    generation,
    last_submission,
    started_ids,
    submitted_ids,
    was_put_back,
)
from hpctrain.records.ledger import Event, EventKind
from hpctrain.runs.job_holds import BY_SLURM, hold_text
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

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
    PREPARED = "PREPARED"
    NOT_SUBMITTED = "NOT SUBMITTED"
    UNKNOWN = "UNKNOWN"

    @property
    def over(self) -> bool:
        """True when nothing more will happen by itself."""
        return self not in (RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN)

    @property
    def without_job(self) -> bool:
        """True when Slurm never had a job of it: nobody has asked it to, or it refused."""
        return self in (RunState.PREPARED, RunState.NOT_SUBMITTED)


@dataclass(frozen=True)
class Judged:
    """A state and the reason as a sentence (empty if the state needs none)."""

    state: RunState
    reason: str = ""


def judge(
    events: Sequence[Event],
    *,
    done: bool,
    queued: JobRecord | None,
    answered: bool,
    elsewhere: str | None = None,
) -> Judged:
    """Decide the state of one run.

    `queued` is the job that counts (see `counted`), as squeue or accounting knows it; `answered`
    is False if Slurm did not answer, `elsewhere` names another cluster with the run's jobs.
    """
    if done:
        return Judged(RunState.DONE)
    if queued is not None and not queued.state.is_ended:
        return _in_queue(events, queued)
    # Without a recorded answer to the newest sbatch there may be a new job, and then the end of
    # earlier jobs does not count.
    last = last_submission(events)
    failed = last is not None and last.event is EventKind.SUBMIT_FAILED
    if not answered and (being_submitted(events) or (failed and not _has_no_job(events))):
        return Judged(RunState.UNKNOWN, _why_unknown(events, elsewhere))
    stopped = stopped_by_supervisor(events)
    if stopped is not None:
        return stopped
    if cancel_confirmed(events):
        return Judged(RunState.CANCELLED, "by its user")
    if last_job_id(events) is None and (answered or _has_no_job(events)):
        return _without_job(events)
    if not answered:
        return Judged(RunState.UNKNOWN, _why_unknown(events, elsewhere))
    if cancel_requested(events):
        return Judged(RunState.CANCELLED, "by its user")
    return _after_the_queue(queued)


def _without_job(events: Sequence[Event]) -> Judged:
    failures = [event for event in events if event.event is EventKind.SUBMIT_FAILED]
    if failures:
        return Judged(RunState.NOT_SUBMITTED, failures[-1].reason or "")
    if any(event.event is EventKind.SUBMITTING for event in events):
        reason = "the run directory was made, but sbatch did not finish"
        return Judged(RunState.NOT_SUBMITTED, reason)
    return Judged(RunState.PREPARED, "`hpctrain resume` submits it, or sbatch by hand")


def _why_unknown(events: Sequence[Event], elsewhere: str | None) -> str:
    """Explain the state UNKNOWN; without Slurm nothing is confirmed, not even a cancel."""
    reason = f"its jobs are on cluster {elsewhere}" if elsewhere else "Slurm does not answer"
    if cancel_requested(events):
        return f"{reason}, so nobody knows whether the cancel was done"
    return reason


def _has_no_job(events: Sequence[Event]) -> bool:
    """Return True if sbatch was never called, or Slurm itself refused the newest submission."""
    last = last_submission(events)
    return last is None or (last.event is EventKind.SUBMIT_FAILED and last.answered)


def counted(jobs: Collection[JobRecord]) -> JobRecord | None:
    """Select the job that determines the state of its run.

    It is the one that holds nodes, else the first that waits, else the last that ran, else the last
    that was cancelled while it waited.
    """
    active = [job for job in jobs if job.state.is_active]
    waiting = active or [job for job in jobs if job.state.is_pending]
    if waiting:
        return min(waiting, key=lambda job: (job.start_time or float("inf"), job.job_id))
    return max(
        jobs,
        key=lambda job: (bool(job.node_list), job.start_time or 0.0, job.job_id),
        default=None,
    )


def last_job_id(events: Sequence[Event]) -> int | None:
    """Return the job id of the newest submission, which may be a successor's."""
    return next(reversed(submitted_ids(events) or started_ids(events)), None)


def _since_submission(events: Sequence[Event]) -> list[Event]:
    """Return the events after the newest submission; earlier ends do not count any more."""
    return generation(events)[1:]


def _in_queue(events: Sequence[Event], job: JobRecord) -> Judged:
    """Judge a run whose job waits or runs, with the cause that ended the attempt before."""
    if not job.state.is_pending:
        reason = "" if job.state is JobState.RUNNING else job.state.name.lower()
        return Judged(RunState.RUNNING, reason)
    reason = job.reason or "waiting"
    if job.hold is not None and job.hold in BY_SLURM:
        reason = f"{hold_text(job.hold).short} ({reason})"
    recent, awaited = _since_submission(events), awaited_run(events)
    if awaited is not None and was_put_back(events):
        reason = f"run `{awaited}` has to be done first; {reason}"
    elif any(event.event is EventKind.ACTION for event in recent):
        starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
        same = not starts or job.belongs_to({starts[-1].job_id or 0})
        causes = [e.cause for e in events if e.event is EventKind.LAUNCH_ENDED and e.cause]
        cause = causes[-1].replace("_", " ") if causes else "cause unknown"
        reason = f"{'requeued' if same else 'next job'}: {cause}; {reason}"
    return Judged(RunState.PENDING, reason)


def stopped_by_supervisor(events: Sequence[Event]) -> Judged | None:
    """Judge a run whose supervisor has stopped it for good; None if it has not."""
    recent = _since_submission(events)
    stops = [e for e in recent if e.event is EventKind.ACTION and e.action == ActionKind.STOP]
    starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
    if not stops or (starts and recent.index(starts[-1]) > recent.index(stops[-1])):
        return None  # the job has been started again since
    if stops[-1].exit_code == 0:  # on request, perhaps before any launch
        return Judged(RunState.STOPPED, stops[-1].reason or "")
    ends = [event for event in recent if event.event is EventKind.LAUNCH_ENDED]
    cause = stops[-1].cause or (ends[-1].cause if ends else None)
    if cause == Cause.CANCELLED:
        return Judged(RunState.CANCELLED, ends[-1].reason or "" if ends else "")
    if cause == Cause.YIELDED:
        return Judged(RunState.STOPPED, ends[-1].reason or "" if ends else "")
    return Judged(RunState.FAILED, stops[-1].reason or "")


def _after_the_queue(job: JobRecord | None) -> Judged:
    """Judge a run whose job has left the queue while its ledger contains no reason."""
    if job is None:
        return Judged(RunState.UNKNOWN, "Slurm does not know the job any more")
    name = job.state.name
    if job.state is JobState.CANCELLED:
        return Judged(RunState.CANCELLED, "cancelled in Slurm")
    if job.exit_signal == _NO_LOG_SIGNAL:
        reason = "Slurm could not write the job's log: is the run directory there on its nodes?"
        return Judged(RunState.FAILED, reason)
    if job.exit_signal:
        return Judged(
            RunState.FAILED,
            f"the supervisor was killed by signal {job.exit_signal}; "
            "`hpctrain resume` goes on from the newest checkpoint",
        )
    if job.exit_code == SETUP_EXIT_CODE:
        reason = (
            "a module, a limit or a file of the site could not be had: `hpctrain logs` names it"
        )
        return Judged(RunState.FAILED, reason)
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return Judged(
        RunState.FAILED, f"the job ended as {name}{code} without a word of its supervisor"
    )


def scattered_groups(events: Sequence[Event]) -> str | None:
    """Return which groups of the newest attempt leave their leaf or block; None when none does."""
    for event in reversed(events):
        if event.event is EventKind.PLACED:
            return event.reason if event.groups_outside else None
        if event.event is EventKind.ATTEMPT_STARTED:
            return None
    return None
