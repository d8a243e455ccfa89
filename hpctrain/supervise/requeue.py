"""Putting our own job back into the queue, through controller outages and our own last seconds.

Belongs here: the sequence of Slurm calls. The calls are shielded: in the final stage Slurm
signals every process of the batch step, a child `scontrol` included.
"""

from __future__ import annotations

import time

from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import RequeueResult

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
