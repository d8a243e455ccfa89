"""Query the time left for this job, before each launch and when Slurm's warning is overdue.

The script ignores the warning (USR1) until the supervisor is up, a signal can be lost, and a limit
can be changed while the job runs. So the supervisor checks the limit itself. Belongs here: the
query, and whether a launch is possible. Does not belong here: what is done about it (`policy`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hpctrain.errors import SlurmError
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import Verdict

# A warning this late will not come: slurmctld checks every 30 s, and is early rather than late
# (sbatch(1), --signal).
_OVERDUE_SECONDS = 15.0
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
    now = time.time()
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


class OverdueWarning:
    """Detects during a launch that Slurm's warning is overdue."""

    def __init__(self, context: AttemptContext, limit: JobTimeLimit | None) -> None:
        self._context = context
        self._next_query: float | None = None
        self._schedule(limit)

    def is_due(self) -> bool:
        """Call often; queries Slurm only when the known limit is near."""
        if self._next_query is None or time.time() < self._next_query:
            return False
        limit = query_time_limit(self._context)
        if limit is None:
            self._next_query = time.time() + _RETRY_SECONDS
            return False
        self._schedule(limit)
        return self._next_query is not None and time.time() >= self._next_query

    def _schedule(self, limit: JobTimeLimit | None) -> None:
        """Set the time of the next query; the limit may have been changed by then."""
        end_time = limit.end_time if limit is not None else self._context.attempt.end_time
        lead_seconds = self._context.config.warning_seconds
        if end_time is None or math.isinf(end_time) or not lead_seconds:
            self._next_query = None
        else:
            self._next_query = end_time - lead_seconds + _OVERDUE_SECONDS
