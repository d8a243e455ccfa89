"""How much time Slurm leaves this job: asked before each launch, and when a warning is overdue.

The script ignores the warning (USR1) until the supervisor is up, a signal can be lost, and a limit
can be changed while the job runs. So the limit itself is known here. Belongs here: asking, and what
follows for a launch. Does not belong here: what is done about it (see `policy`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hpctrain.errors import SlurmError
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import Verdict

# A warning that has not come so long after its time will not come: slurmctld looks every 30 s, and
# is early rather than late (sbatch(1), --signal).
_OVERDUE_SECONDS = 15.0
# A controller that did not answer is asked again after so long.
_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Outlook:
    """What Slurm says about the end of this job.

    `end_time` is in seconds since the epoch: infinite for no limit, None if nobody tells.
    """

    end_time: float | None
    preempted: bool = False

    def left_seconds(self, now: float) -> float:
        """Time until the limit; infinite where it is not known."""
        return math.inf if self.end_time is None else self.end_time - now


def look_ahead(context: AttemptContext) -> Outlook | None:
    """Ask Slurm; None without an answer, or when the job has been started anew since."""
    try:
        record = context.slurm.jobs([context.job_id]).get(context.job_id)
    except SlurmError:
        return None
    if record is None or record.restart_count != context.attempt.restart_count:
        return None
    if not record.state.is_running:
        return None
    return Outlook(record.end_time, preempted=record.preempt_time is not None)


def why_no_launch(context: AttemptContext, outlook: Outlook | None) -> Verdict | None:
    """Why a launch would not get anywhere now; None if it may.

    Where Slurm is silent (`outlook` None), the limit of the job's start counts (SLURM_JOB_END_TIME,
    24.05 and newer), which may have been moved since: it is believed only while it is in the
    future.
    """
    if "USR1" in context.signals.names:
        reason = "Slurm has warned that the job ends soon"
        return Verdict(Cause.TIME_LIMIT, reason, ("signal USR1 from Slurm",))
    now = time.time()
    if outlook is None:
        told = context.attempt.end_time
        outlook = Outlook(told if told is not None and told > now else None)
    if outlook.preempted:
        return Verdict(Cause.PREEMPTED, "the job is being preempted: no time for another launch")
    left_seconds, lead_seconds = outlook.left_seconds(now), context.config.warning_seconds
    if left_seconds > lead_seconds:
        return None
    return Verdict(
        Cause.TIME_LIMIT,
        f"the time limit is {left_seconds:.0f} s away, and a launch needs more than the "
        f"{lead_seconds:.0f} s that a stop may take",
    )


class OwnWarning:
    """Notices during a launch that Slurm's warning should have come and has not."""

    def __init__(self, context: AttemptContext, outlook: Outlook | None) -> None:
        self._context = context
        self._next_read: float | None = None
        self._learn(outlook)

    def is_due(self) -> bool:
        """Call often; asks Slurm only when the limit, as far as it is known, is near."""
        if self._next_read is None or time.time() < self._next_read:
            return False
        outlook = look_ahead(self._context)
        if outlook is None:
            self._next_read = time.time() + _RETRY_SECONDS
            return False
        self._learn(outlook)
        return self._next_read is not None and time.time() >= self._next_read

    def _learn(self, outlook: Outlook | None) -> None:
        """When to look next; the limit may have been moved by then."""
        end_time = outlook.end_time if outlook is not None else self._context.attempt.end_time
        lead_seconds = self._context.config.warning_seconds
        if end_time is None or math.isinf(end_time) or not lead_seconds:
            self._next_read = None
        else:
            self._next_read = end_time - lead_seconds + _OVERDUE_SECONDS
