"""What Slurm's last word about a job says of an attempt whose supervisor left none. Pure.

Belongs here: states of ended jobs, as causes. Does not belong here: launches that have evidence of
their own (`classify`), asking Slurm.
"""

from __future__ import annotations

from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.supervise.causes import Cause

# squeue(1), JOB STATE CODES.
_CAUSES = {
    JobState.PREEMPTED: (Cause.PREEMPTED, "preempted"),
    JobState.NODE_FAIL: (Cause.NODE_FAILURE, "one of its nodes failed"),
    JobState.BOOT_FAIL: (Cause.NODE_FAILURE, "its nodes did not boot"),
    JobState.TIMEOUT: (Cause.TIME_LIMIT, "it reached its time limit"),
    JobState.OUT_OF_MEMORY: (Cause.HOST_OOM, "it was out of memory"),
    JobState.CANCELLED: (Cause.CANCELLED, "it was cancelled"),
    JobState.DEADLINE: (Cause.CANCELLED, "it reached the deadline that its user had set"),
    JobState.REVOKED: (Cause.CANCELLED, "another cluster has taken it"),
}


def why_ended(job: JobRecord | None, *, begun: bool) -> tuple[Cause, str] | None:
    """The cause and the reason of the attempt; None while the job has not ended or nobody knows.

    `begun`: its supervisor had started. A script that fails before (a module that is missing)
    is a launch that failed; a supervisor that ends without a word was killed.
    """
    if job is None or not job.state.is_ended:
        return None
    if job.state in _CAUSES:
        cause, words = _CAUSES[job.state]
        return cause, f"job {job.job_id} left no word: {words}"
    how = f"signal {job.exit_signal}" if job.exit_signal else f"exit code {job.exit_code or 0}"
    if begun:
        return Cause.SUPERVISOR_LOST, f"the supervisor of job {job.job_id} was lost ({how})"
    words = f"the script of job {job.job_id} ended before its supervisor began ({how})"
    return Cause.LAUNCH_FAILURE, words
