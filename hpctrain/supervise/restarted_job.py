"""A job that has stopped its run and was started again all the same: by Slurm, or by a person?

From Slurm 24.05 on, a job that leaves within its grace period is requeued whatever its exit code.
The supervisor forbids that before it leaves (`execute`); where Slurm did not hear it, the next
start has to know that the run is over. A person who wants it to go on says so with `hpctrain
resume`, by submitting the script again (another job), or by a requeue later on. Belongs here:
telling one from the other. Does not belong here: a run that is done (its marker says so), other
jobs of a chain (`successor`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import SlurmError
from hpctrain.store.jobs import generation
from hpctrain.store.ledger import Event, EventKind
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.judge.documents import Action, ActionKind
from hpctrain.supervise.judge.policy import STOPPED_EXIT_CODE

# Slurm requeues a job when its last process is gone, and notes that time as its submission: epilog
# and messages take seconds, clocks of nodes and controller may differ (munge allows 300 s).
_ENDING_SECONDS = 120.0


def came_back(context: AttemptContext) -> Action | None:
    """The stop that still holds, if this attempt is one that nobody has asked for.

    A requeue long after the stop was a person's. Where Slurm does not tell when it was, the stop
    holds: it is in the ledger, and `hpctrain resume` takes it back.
    """
    stop = standing_stop(context.ledger.events(), context.job_id, context.attempt.restart_count)
    if stop is None:
        return None
    requeued_time = _requeued_time(context)
    limit_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    if requeued_time is not None and requeued_time - stop.time > limit_seconds:
        minutes = (requeued_time - stop.time) / 60
        words = f"requeued {minutes:.0f} min after it was stopped, so somebody wants it to go on"
        context.note(EventKind.OBSERVED, reason=words)
        say(words)
        return None
    words = f"stopped before ({stop.reason}), and nobody has asked for more"
    return Action(ActionKind.STOP, f"{words}: `hpctrain resume` goes on", STOPPED_EXIT_CODE)


def standing_stop(events: Sequence[Event], job_id: int, restart_count: int) -> Event | None:
    """The word of an earlier attempt of this job that the run is over, unless somebody has
    submitted or resumed the run since."""
    for event in reversed(generation(events) or list(events)):
        if event.event is EventKind.CONTROL and event.action == "resume":
            return None
        if event.event is EventKind.ATTEMPT_STARTED and not _is(event, job_id, restart_count):
            return None
        if event.event is EventKind.ACTION and event.job_id == job_id:
            return event if event.action == ActionKind.STOP else None
    return None


def _is(event: Event, job_id: int, restart_count: int) -> bool:
    return (event.job_id, event.restart_count) == (job_id, restart_count)


def _requeued_time(context: AttemptContext) -> float | None:
    """Seconds since the epoch; None if Slurm does not tell."""
    try:
        job = context.slurm.jobs([context.job_id]).get(context.job_id)
    except SlurmError:
        return None
    return job.submit_time if job is not None else None
