"""Map Slurm's ends of jobs and steps to causes, with a text for each. Pure.

The one mapping for a supervisor that lives while its job ends, for the next attempt that finds the
end of the one before, and for `hpctrain watch`. Belongs here: that mapping, and the end of an
attempt without a last event. Does not belong here: how Slurm spells an end
(`hpctrain.slurm.reasons`), ends that Slurm had no part in (`rank_verdict`).
"""

from __future__ import annotations

from hpctrain.judge.causes import Cause
from hpctrain.slurm.reasons import JobEnd
from hpctrain.slurm.records import JobRecord

# Of a job script whose software or limits cannot be had at the site (sysexits.h, EX_CONFIG).
SETUP_EXIT_CODE = 78
CAUSES_OF_ENDS = {
    JobEnd.PREEMPTED: Cause.PREEMPTED,
    JobEnd.TIME_LIMIT: Cause.TIME_LIMIT,
    JobEnd.DEADLINE: Cause.DEADLINE,
    JobEnd.NODE_FAILED: Cause.NODE_FAILURE,
    JobEnd.PROLOG_FAILED: Cause.PROLOG_FAILURE,
    JobEnd.OUT_OF_MEMORY: Cause.HOST_OOM,
    JobEnd.REQUEUED: Cause.REQUEUED,
    JobEnd.CANCELLED: Cause.CANCELLED,
    JobEnd.REVOKED: Cause.SUPERSEDED,
}
_TEXTS = {
    Cause.PREEMPTED: "preempted by a job of higher priority",
    Cause.TIME_LIMIT: "it reached its time limit",
    Cause.DEADLINE: (
        "it reached the deadline given to sbatch, after which Slurm runs it no more: `hpctrain "
        "resume` submits it again once the deadline is later or gone"
    ),
    Cause.NODE_FAILURE: "one of its nodes failed",
    Cause.PROLOG_FAILURE: "the prolog failed on a node",
    Cause.HOST_OOM: "it was out of memory",
    Cause.REQUEUED: "requeued by its owner or an administrator",
    Cause.CANCELLED: "cancelled",
    Cause.SUPERSEDED: "another cluster of the federation has taken it",
}


def cause_of_end(end: JobEnd | None) -> Cause | None:
    """Map an end to its cause; None if Slurm names no end."""
    return None if end is None else CAUSES_OF_ENDS[end]


def text_of(cause: Cause) -> str:
    """Describe a cause of the scheduler as part of a sentence."""
    return _TEXTS.get(cause, str(cause))


# -- Judge an attempt without a last event of its supervisor by Slurm's record of its job. Pure -


def why_ended(job: JobRecord | None, *, begun: bool) -> tuple[Cause, str] | None:
    """Find cause and reason; None while the job has not ended, or if its end is unknown.

    `begun`: its supervisor had started. A script that fails before that (a missing module) is a
    launch failure; a supervisor that ends without a last event was killed.
    """
    if job is None or not job.state.is_ended:
        return None
    cause = cause_of_end(job.end)
    if cause is not None:
        return cause, f"the supervisor of job {job.job_id} recorded no end: {text_of(cause)}"
    how = f"signal {job.exit_signal}" if job.exit_signal else f"exit code {job.exit_code or 0}"
    if begun:
        return Cause.SUPERVISOR_LOST, f"the supervisor of job {job.job_id} was lost ({how})"
    if job.exit_code == SETUP_EXIT_CODE:
        reason = "a module, a limit or a file of the site could not be had: the log of job "
        return Cause.LAUNCH_FAILURE, f"{reason}{job.job_id} names it ({how})"
    reason = f"the script of job {job.job_id} ended before its supervisor began ({how})"
    return Cause.LAUNCH_FAILURE, reason
