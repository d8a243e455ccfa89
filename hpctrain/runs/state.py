"""Decides the state of a run from its ledger, its records and the jobs in Slurm. Pure.

If Slurm does not answer, the state is *unknown*, never *gone*. Belongs here: the decision. Does not
belong here: any query.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.judge.attempts import (
    actions,
    ended_on_request,
    launch_ends,
    standing_action,
    starts,
)
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.judge.job_end import SETUP_EXIT_CODE
from hpctrain.records.jobs import (
    awaited_run,
    being_submitted,
    cancel_confirmed,
    cancel_requested,
    ever_submitting,
    generation,
    last_submission,
    refusals,
    started_ids,
    submitted_ids,
    was_put_back,
)
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_jobs import RunJobs
from hpctrain.slurm.reasons import JobHold
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
    """A state and the reason as a sentence (empty if the state needs none).

    `by_script`: the job failed without a supervisor that began, so its own log may tell more.
    """

    state: RunState
    reason: str = ""
    by_script: bool = False


def judge(events: Sequence[Event], jobs: RunJobs, *, done: bool) -> Judged:
    """Decide the state of one run; `jobs` as squeue or accounting knows them."""
    if done:
        return Judged(RunState.DONE)
    queued, answered = counted(jobs.jobs), jobs.answered
    if queued is not None and not queued.state.is_ended:
        return _in_queue(events, queued)
    # Without a recorded answer to the newest sbatch there may be a new job, and then the end of
    # earlier jobs does not count.
    last = last_submission(events)
    failed = last is not None and last.event is EventKind.SUBMIT_FAILED
    # Slurm has no job of it: sbatch was never called, or Slurm itself refused the newest one.
    jobless = last is None or (failed and last.answered)
    unknown = Judged(RunState.UNKNOWN, _why_unknown(events, jobs.elsewhere))
    if not answered and (being_submitted(events) or (failed and not jobless)):
        return unknown
    ended = ended_by_supervisor(events)
    if ended is not None:
        return ended
    if cancel_confirmed(events):
        return Judged(RunState.CANCELLED, "by its user")
    if last_job_id(events) is None and (answered or jobless):
        return _without_job(events)
    if not answered:
        return unknown
    if cancel_requested(events):
        return Judged(RunState.CANCELLED, "by its user")
    if cancelled_in_slurm(events, jobs.jobs) is not None:
        return Judged(RunState.CANCELLED, "cancelled in Slurm")
    return _after_the_queue(events, queued)


def judge_without_slurm(events: Sequence[Event], *, done: bool) -> Judged:
    """Decide the state of one run by its ledger alone; UNKNOWN where only Slurm could tell."""
    return judge(events, RunJobs(answered=False), done=done)


def _without_job(events: Sequence[Event]) -> Judged:
    if failures := refusals(events):
        return Judged(RunState.NOT_SUBMITTED, failures[-1].reason or "")
    if ever_submitting(events):
        reason = "the run directory was made, but sbatch did not finish"
        return Judged(RunState.NOT_SUBMITTED, reason)
    return Judged(RunState.PREPARED, "`hpctrain resume` submits it, or sbatch by hand")


def _why_unknown(events: Sequence[Event], elsewhere: str | None) -> str:
    """Explain the state UNKNOWN; without Slurm nothing is confirmed, not even a cancel."""
    reason = f"its jobs are on cluster {elsewhere}" if elsewhere else "Slurm does not answer"
    if cancel_requested(events):
        return f"{reason}, so nobody knows whether the cancel was done"
    return reason


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


def _in_queue(events: Sequence[Event], job: JobRecord) -> Judged:
    """Judge a run whose job waits or runs, with the cause that ended the attempt before."""
    if not job.state.is_pending:
        reason = "" if job.state is JobState.RUNNING else job.state.name.lower()
        return Judged(RunState.RUNNING, reason)
    reason = job.reason or "waiting"
    if job.hold is not None and job.hold in BY_SLURM:
        reason = f"{hold_text(job.hold).short} ({reason})"
    # The submission itself, which may be the start of a job, tells nothing about an attempt before.
    recent, awaited = generation(events)[1:], awaited_run(events)
    if awaited is not None and was_put_back(events):
        reason = f"run `{awaited}` has to be done first; {reason}"
    elif actions(recent):
        begun = starts(recent)
        same = not begun or job.belongs_to({begun[-1].job_id or 0})
        causes = [end.cause for end in launch_ends(events) if end.cause]
        cause = causes[-1].replace("_", " ") if causes else "cause unknown"
        reason = f"{'requeued' if same else 'next job'}: {cause}; {reason}"
    return Judged(RunState.PENDING, reason)


def waits_for_person(events: Sequence[Event], *, done: bool) -> bool:
    """Tell by the ledger alone whether nothing more happens by itself; a held run counts, too."""
    action = standing_action(events)
    held = action is not None and action.action == ActionKind.HOLD
    return held or judge_without_slurm(events, done=done).state.over


def ended_by_supervisor(events: Sequence[Event]) -> Judged | None:
    """Judge a run whose supervisor has ended it for good; None if it has not."""
    stop = standing_action(events)
    if stop is not None and stop.action == ActionKind.FINISH:
        return Judged(RunState.DONE)  # its marker reaches this host later than the ledger
    if stop is None or stop.action != ActionKind.STOP:
        return None
    ends = launch_ends(generation(events)[1:])
    cause = stop.cause or (ends[-1].cause if ends else None)
    if not ended_on_request(stop, cause):
        return Judged(RunState.FAILED, stop.reason or "")
    if stop.exit_code == 0:  # perhaps before any launch
        return Judged(RunState.STOPPED, stop.reason or "")
    state = RunState.CANCELLED if cause == Cause.CANCELLED else RunState.STOPPED
    return Judged(state, ends[-1].reason or "" if ends else "")


def cancelled_in_slurm(events: Sequence[Event], jobs: Collection[JobRecord]) -> JobRecord | None:
    """Return the job by whose cancelling a run without live jobs has ended; None if by none.

    It may be one that was to continue after those that ran. But a script that fails before its
    supervisor begins cancels the jobs behind it itself.
    """
    newest = counted(jobs)
    if newest is not None and newest.exit_code and not supervisor_began(events, newest):
        jobs = (newest,)
    return next((job for job in jobs if job.state is JobState.CANCELLED), None)


def supervisor_began(events: Sequence[Event], job: JobRecord) -> bool:
    """Whether the ledger has the newest start of the job by its supervisor."""
    by_supervisor = (EventKind.ATTEMPT_STARTED, EventKind.ACTION)
    written = [event for event in generation(events) if event.event in by_supervisor]
    begun = [event.restart_count or 0 for event in written if event.job_id == job.job_id]
    return bool(begun) and job.restart_count in (None, *begun)


def _after_the_queue(events: Sequence[Event], job: JobRecord | None) -> Judged:
    """Judge a run whose job has left the queue while its ledger contains no reason."""
    if job is None:
        return Judged(RunState.UNKNOWN, "Slurm does not know the job any more")
    if job.exit_signal == _NO_LOG_SIGNAL:
        reason = "Slurm could not write the job's log: is the run directory there on its nodes?"
        return Judged(RunState.FAILED, reason)
    if job.exit_signal:
        return Judged(
            RunState.FAILED,
            f"the supervisor was killed by signal {job.exit_signal}; "
            "`hpctrain resume` goes on from the newest checkpoint",
        )
    by_script = not supervisor_began(events, job)
    if job.exit_code == SETUP_EXIT_CODE:
        reason = (
            "a module, a limit or a file of the site could not be had: `hpctrain logs` names it"
        )
        return Judged(RunState.FAILED, reason, by_script)
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    reason = f"the job ended as {job.state.name}{code} without a word of its supervisor"
    return Judged(RunState.FAILED, reason, by_script)


def scattered_groups(events: Sequence[Event]) -> str | None:
    """Return which groups of the newest attempt leave their leaf or block; None when none does."""
    for event in reversed(events):
        if event.event is EventKind.PLACED:
            return event.reason if event.groups_outside else None
        if event.event is EventKind.ATTEMPT_STARTED:
            return None
    return None


# -- Texts about jobs that Slurm holds: the cause and the cure ----------------------------------


@dataclass(frozen=True)
class HoldText:
    """`short` for a table; `cause` and `cure` as sentences without a full stop."""

    short: str
    cause: str
    cure: str


# Nobody has requested these holds, so that a user does not expect them.
BY_SLURM = (JobHold.LAUNCH_FAILED, JobHold.USER_ENVIRONMENT, JobHold.REQUEUE_LIMIT)
_RELEASE = "`hpctrain resume` releases it"
_TEXTS = {
    JobHold.ADMIN: HoldText(
        "held by an administrator", "an administrator holds it", "only they can release it"
    ),
    JobHold.LAUNCH_FAILED: HoldText(
        "held: the launch failed",
        "a prolog or the launch of the script failed on a node, which Slurm has drained",
        _RELEASE,
    ),
    JobHold.USER_ENVIRONMENT: HoldText(
        "held: the login environment could not be read",
        "a login shell of yours failed or took too long on a node, which Slurm has drained: the "
        "site has SchedulerParameters=requeue_setup_env_fail or no_env_cache, and --export with a "
        "list or --get-user-env starts such a shell",
        "repair ~/.bash_profile and ~/.profile first, because each further try costs a node; then "
        + _RELEASE,
    ),
    JobHold.REQUEUE_LIMIT: HoldText(
        "held: launched too often",
        "Slurm has started it again as often as MaxBatchRequeue allows (5 by default): launches "
        "that failed, and from Slurm 24.05 on ends within a grace without `scontrol requeue`",
        f"{_RELEASE}, and the count begins anew; where it may not, an administrator does",
    ),
}
_OTHERS = HoldText("held", "it is held", _RELEASE)


def hold_text(hold: JobHold) -> HoldText:
    """Return the texts about a hold."""
    return _TEXTS.get(hold, _OTHERS)
