"""Query Slurm's record of the supervisor's own job.

Belongs here: the query and its retries. Does not belong here: judging (`external_verdict`).
"""

from __future__ import annotations

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.documents import JobFacts
from hpctrain.slurm.client import Backoff
from hpctrain.slurm.states import JobState
from hpctrain.supervise.context import AttemptContext

# A controller that restarts is away for seconds to minutes; the job loses nothing by waiting,
# because without an answer it could not requeue either.
_PATIENCE_SECONDS = 600.0


def job_facts(context: AttemptContext, *, patient: bool) -> JobFacts | None:
    """Return Slurm's record of this job; None when it does not answer.

    `patient`: retry for minutes, because only the controller can tell a preemption, a cancel or a
    lost node from a crash.
    """
    deadline = clock.monotonic() + (_PATIENCE_SECONDS if patient else 0.0)
    pauses = Backoff()
    while True:
        try:
            record = context.slurm.show_job(context.job_id)
        except SlurmError:
            record = None
        if record is not None:
            return JobFacts(
                state=JobState.RUNNING if record.state.is_running else record.state,
                reason=record.reason or "None",
                restart_count=record.restart_count or 0,
                preempt_time=record.preempt_time is not None,
            )
        if clock.monotonic() >= deadline or context.signals.final:
            return None
        clock.sleep(pauses.next_seconds())


def still_ours(context: AttemptContext, facts: JobFacts | None) -> bool:
    """True if Slurm runs this attempt and is not ending it, so it did not send a final signal."""
    return (
        facts is not None
        and facts.state is JobState.RUNNING
        and facts.restart_count == context.attempt.restart_count
        and not facts.preempt_time
    )
