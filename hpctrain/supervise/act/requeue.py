"""Requeue our own job, even during controller outages and in our own last seconds.

Belongs here: the sequence of Slurm calls. The calls are shielded: in the final stage Slurm signals
every process of the batch step, a child `scontrol` included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.slurm.client import Backoff, SlurmClient
from hpctrain.slurm.reasons import JobEnd
from hpctrain.slurm.records import RequeueAnswer, RequeueResult
from hpctrain.slurm.states import JobState

_PATIENCE_SECONDS = 600.0
# Of a job that is completing: the attempt ends and not the run, so it is requeued all the same.
_ENDS_BY_SLURM = (JobEnd.TIME_LIMIT, JobEnd.NODE_FAILED)


def requeue(
    slurm: SlurmClient, job_id: int, before_retry: Callable[[], None] = lambda: None
) -> tuple[bool, str]:
    """Requeue the job; return whether it is in the queue now, and Slurm's answer as text.

    `before_retry` is called when Slurm did not answer at once, so that there is time for more.

    Slurm then delays the job for cred_expire + 1 s (121 s by default). Nothing sent from inside the
    job shortens that: while it is COMPLETING, `StartTime=now` is accepted and lost.
    """
    return _until_answered(slurm, job_id, slurm.requeue, before_retry)


def hold(slurm: SlurmClient, job_id: int) -> tuple[bool, str]:
    """Requeue the job in held state, until its owner releases it (scontrol(1), requeuehold)."""
    return _until_answered(slurm, job_id, slurm.requeue_hold)


def exclude(slurm: SlurmClient, job_id: int, nodes: Sequence[str]) -> str:
    """Exclude `nodes` from the requeued job; return the result as text.

    The owner may set ExcNodeList once the job is requeued, while it is still completing, but not
    while it runs (slurmctld: "Job is no longer pending execution").
    """
    try:
        slurm.update_job(job_id, exclude_nodes=nodes)
    except SlurmError as error:
        return f"{', '.join(nodes)} could not be excluded: {error}"
    return f"without {', '.join(nodes)}"


def _until_answered(
    slurm: SlurmClient,
    job_id: int,
    call: Callable[[int], RequeueAnswer],
    before_retry: Callable[[], None] = lambda: None,
) -> tuple[bool, str]:
    deadline, pauses = clock.monotonic() + _PATIENCE_SECONDS, Backoff()
    while True:
        answer = call(job_id)
        if answer.result is not RequeueResult.UNREACHABLE or clock.monotonic() >= deadline:
            return answer.will_run_again, answer.result.value
        before_retry()
        clock.sleep(pauses.next_seconds())
        # Slurm 22.05.8 accepts the requeue of a cancelled job, which would bring it back.
        with contextlib.suppress(SlurmError):
            job = slurm.jobs([job_id]).get(job_id)
            if job is None:
                continue
            by_slurm = job.end in _ENDS_BY_SLURM or job.preempt_time is not None
            ending = job.state is JobState.COMPLETING and not by_slurm
            if job.state is JobState.CANCELLED or ending:
                return False, "cancelled while the controller was away"
