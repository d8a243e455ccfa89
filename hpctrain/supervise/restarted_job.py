"""Distinguish a restart by Slurm from one by a person, for a job that has stopped its run.

From Slurm 24.05 on, a job that exits within its grace period is requeued whatever its exit code.
The supervisor forbids that before it exits (`act.execute`). If Slurm did not get that, the next
start must not continue the run. A person continues a run with `hpctrain resume`, by submitting
the script again (another job), or by a later requeue. Does not belong here: a run that is done (it
has a marker), other jobs of a chain (`act.successor`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from hpctrain.base.errors import SlurmError
from hpctrain.judge.documents import Action, ActionKind
from hpctrain.judge.policy import STOPPED_EXIT_CODE
from hpctrain.records.jobs import generation
from hpctrain.records.ledger import Event, EventKind
from hpctrain.supervise.context import AttemptContext, log_message

# Slurm requeues a job when its last process is gone, and notes that time as its submission: epilog
# and messages take seconds, clocks of nodes and controller may differ (munge allows 300 s).
_ENDING_SECONDS = 120.0


def stop_of_restarted_job(context: AttemptContext) -> Action | None:
    """Return the stop that still holds, if no person has requested this attempt.

    A requeue long after the stop was a person's. If its time is unknown, the stop holds: it is in
    the ledger, and `hpctrain resume` overrides it.
    """
    stop = standing_stop(context.ledger.events(), context.job_id, context.attempt.restart_count)
    if stop is None:
        return None
    requeued_time = None  # seconds since the epoch
    with contextlib.suppress(SlurmError):
        job = context.slurm.jobs([context.job_id]).get(context.job_id)
        requeued_time = job.submit_time if job is not None else None
    limit_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    if requeued_time is not None and requeued_time - stop.time > limit_seconds:
        minutes = (requeued_time - stop.time) / 60
        reason = f"requeued {minutes:.0f} min after it was stopped, so a person has continued it"
        context.note(EventKind.OBSERVED, reason=reason)
        log_message(reason)
        return None
    reason = f"stopped before ({stop.reason}), and nobody has resumed it: `hpctrain resume` does"
    return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)


def standing_stop(events: Sequence[Event], job_id: int, restart_count: int) -> Event | None:
    """Find the stop that an earlier attempt of this job has recorded.

    None if a person has submitted or resumed the run since.
    """
    for event in reversed(generation(events) or list(events)):
        if event.event is EventKind.CONTROL and event.action == "resume":
            return None
        this_attempt = (event.job_id, event.restart_count) == (job_id, restart_count)
        if event.event is EventKind.ATTEMPT_STARTED and not this_attempt:
            return None
        if event.event is EventKind.ACTION and event.job_id == job_id:
            return event if event.action == ActionKind.STOP else None
    return None
