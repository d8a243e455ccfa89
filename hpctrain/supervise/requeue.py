"""Putting our own job back into the queue, through controller outages and our own last seconds.

Belongs here: the sequence of Slurm calls. The calls are shielded: in the final stage Slurm
signals every process of the batch step, a child `scontrol` included.
"""

from __future__ import annotations

import time

from hpctrain.errors import SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import RequeueResult
from hpctrain.slurm.states import JobState

_PATIENCE_SECONDS = 600.0
_RETRY_SECONDS = 3.0


def requeue(slurm: SlurmClient, job_id: int) -> tuple[bool, str]:
    """Requeue the job; returns whether it is in the queue now, and Slurm's answer in words.

    Slurm then lets the job wait for cred_expire + 1 s (121 s by default). Nothing sent from
    inside the job shortens that: while it is COMPLETING, `StartTime=now` is accepted and lost.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        answer = slurm.requeue(job_id)
        if answer.result is not RequeueResult.UNREACHABLE or time.monotonic() >= deadline:
            return answer.will_run_again, answer.result.value
        time.sleep(_RETRY_SECONDS)
        if _cancelled_meanwhile(slurm, job_id):
            return False, "cancelled while the controller was away"


def _cancelled_meanwhile(slurm: SlurmClient, job_id: int) -> bool:
    """A requeue would bring a cancelled job back (Slurm 22.05.8 accepts it), so look first."""
    try:
        job = slurm.jobs([job_id]).get(job_id)
    except SlurmError:
        return False
    if job is None:
        return False
    by_slurm = job.reason in ("TimeLimit", "NodeDown") or job.preempt_time is not None
    ending = job.state is JobState.COMPLETING and not by_slurm
    return job.state is JobState.CANCELLED or ending
