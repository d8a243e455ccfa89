"""What Slurm says about our own job at this moment.

Belongs here: asking, and for how long. Does not belong here: what follows (`scheduler_verdict`).
"""

from __future__ import annotations

import time

from hpctrain.errors import SlurmError
from hpctrain.slurm.states import JobState
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.judge.documents import JobFacts

# A controller that restarts is away for seconds to minutes; the job loses nothing by waiting,
# because without an answer it could not requeue either.
_PATIENCE_SECONDS = 600.0
_RETRY_SECONDS = 3.0


def job_facts(context: AttemptContext, *, patient: bool) -> JobFacts | None:
    """What Slurm says about this job; None when it does not answer.

    With `patient` (the answer decides what is done) the controller is asked until it answers:
    only it can tell a preemption, a cancel or a lost node from a crash.
    """
    deadline = time.monotonic() + (_PATIENCE_SECONDS if patient else 0.0)
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
        if time.monotonic() >= deadline or context.signals.final:
            return None
        time.sleep(_RETRY_SECONDS)


def still_ours(context: AttemptContext, facts: JobFacts | None) -> bool:
    """Slurm runs this attempt and does not think of ending it: a signal that came was not its."""
    return (
        facts is not None
        and facts.state is JobState.RUNNING
        and facts.restart_count == context.attempt.restart_count
        and not facts.preempt_time
    )
