"""Keep a run that waits for another one (`after`) from beginning before that is done.

Slurm starts its job when the job of the other has ended well (`afterok`). A job ends well, too,
when a person has stopped its run, or when it leaves the run to a newer launch. Only the marker of
the other run tells whether that is done. Belongs here: what to do instead of the first launch. Does
not belong here: the dependency, and renewing it (`hpctrain.job.job_submission`).
"""

from __future__ import annotations

from hpctrain.judge.documents import Action, ActionKind
from hpctrain.judge.policy import STOPPED_EXIT_CODE
from hpctrain.records.jobs import awaited_run
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.supervise.context import AttemptContext, log_message


def wait_for_unfinished_run(context: AttemptContext) -> Action | None:
    """Return the action that puts this run back, if the run that it waits for is not done.

    The job is held in the queue: the next submission of the other run makes it wait for that, and
    releases it. Where jobs are not requeued, the run stops. Raises OSError.
    """
    name = awaited_run(context.ledger.events())
    if name is None:
        return None
    awaited = RunLayout(context.run_layout.directory.with_name(name))
    if awaited.done.exists():
        return None
    if not awaited.directory.exists():
        reason = f"run `{name}`, for which this one has waited, was removed: Slurm's word counts"
        context.note(EventKind.OBSERVED, reason=reason)
        log_message(reason)
        return None
    own = context.config.run_id
    context.note(EventKind.OBSERVED, after_run=name, reason=f"began before run `{name}` was done")
    without = f"`hpctrain resume {own}` begins this one without it"
    if context.config.continuation != "requeue":
        reason = f"run `{name}`, for which this one waits, is not done; {without}"
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
    reason = (
        f"run `{name}`, for which this one waits, is not done: `hpctrain resume {name}` goes on "
        f"with it, and this one begins when that is done; {without}"
    )
    return Action(ActionKind.HOLD, reason)
