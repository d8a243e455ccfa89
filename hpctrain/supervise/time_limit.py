"""Query the time left for this job, before each launch and when it may be time to stop.

The script ignores the warning (USR1) until the supervisor is up, a signal can be lost, and a limit
can be changed while the job runs. So the supervisor checks the limit itself. Belongs here: the
query, how long a stop takes, and whether a launch is possible. Does not belong here: what is done
about it (`policy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Verdict
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import read_saves
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.run_dir_snapshot import past_step_seconds
from hpctrain.supervise.timeouts import run_with_timeout

# A warning this late will not come: slurmctld checks every 30 s, and is early rather than late
# (sbatch(1), --signal).
_OVERDUE_SECONDS = 15.0
# sbatch(1), --signal: it may come up to 60 s early, and a supervisor may notice it late.
_EARLIEST_WARNING_SECONDS = 75.0
# The file of saves grows with the run; older ones are of other nodes and other sizes.
_LAST_SAVES = 50
_READ_SECONDS = 1.0
# Pause before a controller that did not answer is queried again.
_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class JobTimeLimit:
    """Slurm's record of when this job ends.

    `end_time` is in seconds since the epoch: infinite for no limit, None if not known.
    """

    end_time: float | None
    preempted: bool = False

    def left_seconds(self, now: float) -> float:
        """Seconds until the limit; infinite if it is not known."""
        return math.inf if self.end_time is None else self.end_time - now


def query_time_limit(context: AttemptContext) -> JobTimeLimit | None:
    """Query Slurm; None without an answer, or if the job has been restarted since."""
    try:
        record = context.slurm.jobs([context.job_id]).get(context.job_id)
    except SlurmError:
        return None
    if record is None or record.restart_count != context.attempt.restart_count:
        return None
    if not record.state.is_running:
        return None
    return JobTimeLimit(record.end_time, preempted=record.preempt_time is not None)


def too_late_for_launch(context: AttemptContext, limit: JobTimeLimit | None) -> Verdict | None:
    """Judge whether too little time is left for a launch; None if there is enough.

    Without an answer of Slurm (`limit` None), the limit at the start of the job counts
    (SLURM_JOB_END_TIME, 24.05 and newer). It may have been changed since, so it counts only while
    it is in the future.
    """
    if "USR1" in context.signals.names:
        reason = "Slurm has warned that the job ends soon"
        return Verdict(Cause.TIME_LIMIT, reason, ("signal USR1 from Slurm",))
    now = clock.now()
    if limit is None:
        at_start = context.attempt.end_time
        limit = JobTimeLimit(at_start if at_start is not None and at_start > now else None)
    if limit.preempted:
        return Verdict(Cause.PREEMPTED, "the job is being preempted: no time for another launch")
    left_seconds, lead_seconds = limit.left_seconds(now), context.config.warning_seconds
    if left_seconds > lead_seconds:
        return None
    return Verdict(
        Cause.TIME_LIMIT,
        f"the time limit is {left_seconds:.0f} s away, and a launch needs more than the "
        f"{lead_seconds:.0f} s that a stop may take",
    )


def measured_lead(run: RunLayout) -> StopLead | None:
    """Read how long a stop of this run takes, from all of its attempts; None if it is not known.

    None, too, if the run directory does not answer within a second.
    """
    found: list[StopLead | None] = []

    def read() -> None:
        saves = [(save.stall_seconds or 0.0) + save.publish_seconds for save in read_saves(run)]
        found.append(stop_lead(past_step_seconds(run), saves[-_LAST_SAVES:]))

    run_with_timeout(read, _READ_SECONDS)
    return found[0] if found else None


class StopTime:
    """Detects during a launch that its last save has to begin, for the time limit is near.

    By what the run has measured of its steps and saves, where it has; that may be before Slurm's
    warning or after it. Else when the warning is overdue. `lead` is what the run has measured,
    None if nothing is known.
    """

    def __init__(
        self,
        context: AttemptContext,
        limit: JobTimeLimit | None,
        learn: Callable[[RunLayout], StopLead | None] = measured_lead,
    ) -> None:
        self._context = context
        self._learn = learn
        self.lead: StopLead | None = None
        self._next_query: float | None = None
        self._due = math.inf
        # A launch trains for half of what is left to it, however long a stop takes.
        end_time = self._end_time(limit)
        self._longest_seconds = math.inf if end_time is None else (end_time - clock.now()) / 2
        self._schedule(limit)

    @property
    def planned_seconds(self) -> float:
        """How long before the limit Slurm warns."""
        return self._context.config.warning_seconds

    def is_due(self) -> bool:
        """Call often; queries Slurm twice a launch, when half of the time is over and at the end.

        The limit may have been changed by then, and the run has measured more.
        """
        if self._next_query is None or clock.now() < self._next_query:
            return False
        limit = query_time_limit(self._context)
        if limit is None:
            self._next_query = clock.now() + _RETRY_SECONDS
            return False
        self._schedule(limit)
        return self._next_query is not None and clock.now() >= self._due

    def outlasts_warning(self) -> bool:
        """Whether Slurm's warning, which has come, leaves time to train on (see `is_due`).

        Not when Slurm preempts the job or does not answer, and not if the limit is further away
        than the warning is sent ahead: then a person has sent the signal.
        """
        if self.lead is None or not self.planned_seconds:
            return False
        limit = query_time_limit(self._context)
        if limit is None or limit.preempted or limit.end_time is None:
            return False
        left_seconds = limit.left_seconds(clock.now())
        if left_seconds > self.planned_seconds + _EARLIEST_WARNING_SECONDS:
            return False
        self._schedule(limit)
        return clock.now() < self._due and not math.isinf(self._due)

    def _end_time(self, limit: JobTimeLimit | None) -> float | None:
        end_time = limit.end_time if limit is not None else self._context.attempt.end_time
        return None if end_time is None or math.isinf(end_time) else end_time

    def _schedule(self, limit: JobTimeLimit | None) -> None:
        """Set the time of the stop, and of the next query, at which the limit may be another."""
        end_time = self._end_time(limit)
        if end_time is None or not self.planned_seconds:
            self._next_query, self._due = None, math.inf
            return
        self.lead = self._learn(self._context.run_layout)
        lead_seconds = self.planned_seconds - _OVERDUE_SECONDS
        if self.lead is not None:
            lead_seconds = min(self.lead.seconds, self._longest_seconds)
        self._due = end_time - lead_seconds
        earlier = end_time - 2 * max(lead_seconds, self.planned_seconds)
        self._next_query = earlier if clock.now() < earlier else self._due


# ----------------------------------------------------------------------------------------------
# Compute how long a stop of this run takes, from what its own steps and saves have taken. Pure.
# The script asks Slurm for a warning (USR1) by the plan's figures, and the directive is fixed for
# the life of the run. A run that has trained knows better.


# Fewer measurements say nothing about the slow ones among them.
_LEAST_STEPS, _LEAST_SAVES = 20, 3
_SHARE = 0.95
# The ranks leave, the verdict is written, Slurm takes the requeue: seconds, and a busy controller
# answers within 8 (`hpctrain.supervise.loop`).
_SLURM_SECONDS = 30.0
# One save may have just begun, and the last one follows.
_SAVES = 2


@dataclass(frozen=True)
class StopLead:
    """Seconds that a stop takes, and its parts.

    `step_seconds` and `save_seconds` are not exceeded by 95 % of the last `steps` steps and `saves`
    saves. A batch of an evaluation is a forward pass, a third of a step.
    """

    step_seconds: float
    steps: int
    save_seconds: float
    saves: int

    @property
    def seconds(self) -> float:
        return _SLURM_SECONDS + self.step_seconds + _SAVES * self.save_seconds

    @property
    def sentence(self) -> str:
        """Describe the sum, for the ledger and people."""
        return (
            f"a stop takes {self.seconds:.0f} s as measured: {_SLURM_SECONDS:.0f} s for Slurm, "
            f"{self.step_seconds:.1f} s for a step (of {self.steps}), {_SAVES} saves of "
            f"{self.save_seconds:.1f} s (of {self.saves}), each as 95 % of them"
        )


def stop_lead(step_seconds: Sequence[float], save_seconds: Sequence[float]) -> StopLead | None:
    """Compute the lead from durations of steps and saves; None if there are too few of them."""
    if len(step_seconds) < _LEAST_STEPS or len(save_seconds) < _LEAST_SAVES:
        return None
    return StopLead(
        step_seconds=_percentile(step_seconds),
        steps=len(step_seconds),
        save_seconds=_percentile(save_seconds),
        saves=len(save_seconds),
    )


def _percentile(values: Sequence[float]) -> float:
    """The smallest value that 95 % do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(_SHARE * len(values)) - 1]
