"""Judge an attempt without a last event of its supervisor by Slurm's record of its job. Pure.

Belongs here: ended jobs of such attempts. Does not belong here: what states mean (`slurm.reasons`,
`job_end`), launches that have evidence of their own (`classify`), queries to Slurm.
"""

from __future__ import annotations

from hpctrain.judge.causes import Cause
from hpctrain.judge.job_end import SETUP_EXIT_CODE, cause_of_end, text_of
from hpctrain.slurm.records import JobRecord


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
