"""Finds the status of runs: one Slurm query for all of them, then the run directories.

Belongs here: querying, and combining the results. Does not belong here: tables.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError, UsageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.base.units import short_duration
from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.job_queries import find_jobs, with_past_jobs
from hpctrain.judge.attempts import marks_of, own_time, starts
from hpctrain.judge.causes import Cause
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.run_records import Progress, read_record, tail_metrics
from hpctrain.records.supervise_config import (
    DEFAULT_POLL_SECONDS,
    SuperviseConfig,
    known_supervise_config,
)
from hpctrain.runs.state import (
    Judged,
    RunState,
    counted,
    judge,
    judge_without_slurm,
    last_job_id,
    scattered_groups,
    supervisor_began,
)
from hpctrain.slurm.client import SlurmClient
from hpctrain.telemetry.goodput import OCCUPYING
from hpctrain.telemetry.rates import recent_rates
from hpctrain.telemetry.timeline import Category, seconds, timeline

# The steps of `recent_rates`, and the first step of a launch, which it leaves out.
_RECENT_STEPS = 21


class RunStatus(BaseModel):
    """One row of `hpctrain status`; times in seconds, None when unknown.

    `step`: None, too, while a trainer of its own neither reports nor saves one; `target_step`: of a
    run that ends with a file. `at_risk_seconds`: training since the newest checkpoint, which a
    failure now would lose. `eta_seconds`: of the steps alone; `queue_ahead_seconds`: waits in the
    queue until the last of them. `readable` is False for a run that this user may not read or whose
    ledger is damaged. `owner` is the user whose jobs the run has.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    run_id: str
    state: RunState
    reason: str
    job_id: int | None = None
    attempts: int = 0
    step: int | None = None
    target_step: int | None = None
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    checkpoint_step: int | None = None
    updated_seconds_ago: float | None = None
    eta_seconds: float | None = None
    queue_ahead_seconds: float | None = None
    at_risk_seconds: float | None = None
    stale: bool = False
    readable: bool = True
    owner: str | None = None


@dataclass(frozen=True)
class ObservedRun:
    """One run at one moment: its ledger, its jobs as Slurm knows them, and what follows from both.

    Whoever needs the state of a run has one of these. `jobs` is None for a run that is done,
    because no query was made. `unreadable`: why the run cannot be read; then `events` is empty.
    What files contain is read when it is first asked for, and then kept.
    """

    run: RunFiles
    events: Sequence[Event] = ()
    jobs: RunJobs | None = None
    unreadable: str | None = None

    @cached_property
    def judged(self) -> Judged:
        """The state of the run and its reason."""
        if self.unreadable is not None:
            return Judged(RunState.UNKNOWN, self.unreadable)
        judged = judge(self.events, self.jobs or RunJobs(), done=self.jobs is None)
        if judged.by_script and (end := self.script_end) is not None:
            return replace(judged, reason=end[1])
        return judged

    @cached_property
    def script_end(self) -> tuple[Cause, str] | None:
        """Why the script of the newest job ended before a supervisor began; None if unknown."""
        job = counted(self.jobs.jobs) if self.jobs is not None else None
        if job is None or not job.state.is_ended or supervisor_began(self.events, job):
            return None
        if not job.exit_code:
            return None
        from hpctrain.runs.logs import script_end  # it knows plans, which a line needs not

        return script_end(self.run.layout, job)

    @property
    def is_over_by_ledger(self) -> bool:
        """True if the run is over, whatever Slurm knows about its jobs."""
        if self.unreadable is not None:
            return False
        return judge_without_slurm(self.events, done=self.jobs is None).state.over

    @cached_property
    def progress(self) -> Progress | None:
        """The trainer's newest record. Raises NewerFormatError."""
        return read_record(self.run.layout.progress, Progress)

    @property
    def newest_sign_time(self) -> float | None:
        """The newest sign of life of trainer or supervisor. Raises NewerFormatError."""
        signs = [own_time(self.events), self.progress.time if self.progress else None]
        return max((one for one in signs if one is not None), default=None)

    @cached_property
    def config(self) -> SuperviseConfig | None:
        """The settings of the supervisor. Raises NewerFormatError."""
        return known_supervise_config(self.run.layout.supervise_config)

    @cached_property
    def row(self) -> RunStatus:
        """The row of `hpctrain status`. Raises NewerFormatError."""
        return _status_row(self)


def statuses(runs: Sequence[RunFiles], slurm: SlurmClient | None) -> list[RunStatus]:
    """Find the status of each run, in the given order; at most one squeue and one sacct.

    Without `slurm` nothing is asked, and what only Slurm knows is unknown.

    A run that cannot be read has a row with the reason.
    """
    return [observed.row for observed in observe(runs, slurm)]


def observe(runs: Sequence[RunFiles], slurm: SlurmClient | None) -> list[ObservedRun]:
    """Find the status of each run with what it was judged by; at most one squeue and one sacct.

    Without `slurm` nothing is asked, and what only Slurm knows is unknown. The rows of all runs are
    read.
    """
    events: dict[str, list[Event]] = {}
    unreadable = {run.run_id: run.unreadable for run in runs if run.unreadable}
    for run in runs:
        if run.run_id not in unreadable:
            try:
                events[run.run_id] = run.ledger.events()
            except OSError as error:
                unreadable[run.run_id] = f"cannot be read: {error.strerror}"
            except NewerFormatError as error:
                unreadable[run.run_id] = str(error)
    open_runs = [run for run in runs if run.run_id in events and not run.layout.done.exists()]
    jobs = {run.run_id: RunJobs(answered=False) for run in open_runs}
    if slurm is not None:
        jobs = find_jobs(open_runs, slurm, events)
    with contextlib.suppress(SlurmError):
        jobs = with_past_jobs(open_runs, jobs, slurm, events) if slurm is not None else jobs
    observed = []
    for run in runs:
        reason = unreadable.get(run.run_id)
        one = ObservedRun(run, events.get(run.run_id, ()), jobs.get(run.run_id), reason)
        try:
            _ = one.row
        except NewerFormatError as error:
            one = ObservedRun(run, unreadable=str(error))
        observed.append(one)
    return observed


def _status_row(one: ObservedRun) -> RunStatus:
    run, events, state, reason = one.run, one.events, one.judged.state, one.judged.reason
    if one.unreadable is not None:
        return RunStatus(
            run_id=run.run_id, state=state, reason=reason, readable=False, owner=run.owner_name
        )
    queued = counted(one.jobs.jobs) if one.jobs is not None else None
    progress, config = one.progress, one.config
    rates = recent_rates(tail_metrics(run.layout, _RECENT_STEPS))
    age = None if progress is None else max(0.0, clock.now() - progress.time)
    step = progress.step if progress else None
    if step == 0:
        # Plans are large, and most rows need none.
        from hpctrain.runs.run_documents import known_any_plan, reports_steps

        step = step if reports_steps(known_any_plan(run.layout)) else None
    target = config.target_step if config else progress.target_step if progress else None
    left = None if target is None or step is None else max(0, target - step)
    running = state is RunState.RUNNING
    if running and scattered_groups(events) is not None:
        reason = "; ".join(filter(None, (reason, "spread too far, see why")))
    checkpoint_step = progress.checkpoint_step if progress else None
    if checkpoint_step is not None:
        # The supervisor may have moved it to quarantine since.
        with contextlib.suppress(OSError):
            steps = published_steps(run.layout.checkpoints)
            checkpoint_step = max((n for n in steps if n <= checkpoint_step), default=None)
    eta_seconds = left * rates.step_seconds if running and left and rates.step_seconds else None
    if eta_seconds is not None and config is not None and config.ramp and step and left:
        eta_seconds *= growth_of_steps(config.ramp, step, left)
    ahead = at_risk = None
    if eta_seconds is not None:
        limit = queued.time_limit_seconds if queued else None
        ahead = queue_ahead_seconds(events, eta_seconds, limit)
    if running and step is not None and rates.step_seconds is not None:
        at_risk = (step - (checkpoint_step or 0)) * rates.step_seconds
    return RunStatus(
        run_id=run.run_id,
        state=state,
        reason=reason,
        job_id=queued.job_id if queued else last_job_id(events),
        attempts=len(starts(events)),
        step=step,
        target_step=target,
        loss=rates.loss,
        step_seconds=rates.step_seconds,
        tokens_per_second=rates.tokens_per_second,
        mfu=rates.mfu,
        checkpoint_step=checkpoint_step,
        updated_seconds_ago=age,
        eta_seconds=eta_seconds,
        queue_ahead_seconds=ahead,
        at_risk_seconds=at_risk,
        stale=running and age is not None and config is not None and age > config.stall_seconds,
        owner=run.owner_name,
    )


def growth_of_steps(ramp: Sequence[tuple[int, float]], step: int, left: int) -> float:
    """Return how much longer than step `step` the mean of the next `left` ones will be.

    `ramp`: (number of steps, share of a whole step) of the smaller ones that begin the run.
    """
    now, ahead, begin = 1.0, float(left), 0
    for steps, share in ramp:
        end = begin + steps
        now = share if begin < step <= end else now
        ahead -= (1 - share) * max(0, min(end, step + left) - max(begin, step))
        begin = end
    return ahead / (now * left)


def queue_ahead_seconds(
    events: Sequence[Event], left_seconds: float, time_limit_seconds: float | None
) -> float | None:
    """Estimate the time in the queue before `left_seconds` more of training are done.

    The mean wait of the starts so far, times the further starts: one for each length of an attempt
    that is left. An attempt is as long as those that have ended were on the average, and before one
    has ended, as its job may be. None where the run has never started or that is not known.
    """
    cut = timeline(marks_of(events), ()).segments
    spans = [
        (kind, seconds(sum(one.end - one.start for one in group)))
        for kind, group in groupby(cut, lambda one: one.category in OCCUPYING or one.category)
    ]
    waits = [
        wait
        for (kind, wait), (follows, _) in pairwise(spans)
        if kind is Category.QUEUEING and follows is True
    ]
    # Of a lost attempt nobody knows how long it could have been.
    lengths = [
        length
        for (kind, length), (follows, _) in pairwise(spans)
        if kind is True and follows in (Category.QUEUEING, Category.HELD)
    ]
    if not waits:
        return None
    length = statistics.mean(lengths) if lengths else time_limit_seconds
    if not length:
        return None
    return statistics.mean(waits) * (left_seconds // length)


# -- Choose how often a command that waits asks Slurm: not more often than the site allows ------
# Everybody's queries are served by one process, so a site sets the least time between two queries
# of one command (`limits.poll` of the profile). Each query is one squeue for all runs of the
# command.


def poll_interval(runs: Iterable[RunFiles], wanted_seconds: float | None = None) -> float:
    """Return the seconds between two queries about `runs`: as wanted, or as the site sets.

    Raises UsageError if less is wanted than the site of one of the runs allows.
    """
    configs = [known_supervise_config(run.layout.supervise_config) for run in runs]
    floors = [config.poll_seconds for config in configs if config is not None]
    floor_seconds = max(floors, default=DEFAULT_POLL_SECONDS)
    if wanted_seconds is None:
        return floor_seconds
    if wanted_seconds < floor_seconds:
        raise UsageError(
            f"asking Slurm every {short_duration(wanted_seconds)} is too often for this site",
            hint=f"the profile allows {short_duration(floor_seconds)} or more (`limits.poll`)",
        )
    return wanted_seconds
