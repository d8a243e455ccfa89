"""What to do about a verdict. One pure function, so that the same answer can be tested, shown and
simulated.

Principles: a user's cancel and a user's mistake stop at once; what the scheduler does costs
nothing; failures may repeat only while checkpoints advance; "unknown" never does anything that
could lose work.
"""

from __future__ import annotations

from hpctrain.supervise.causes import Cause
from hpctrain.supervise.documents import (
    Action,
    ActionKind,
    History,
    SuperviseConfig,
    Verdict,
)

SCHEDULER_CAUSES = frozenset(
    {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_FAILURE, Cause.REQUEUED}
)
FAILURE_CAUSES = frozenset({Cause.CRASH, Cause.HANG, Cause.LAUNCH_FAILURE, Cause.UNKNOWN})
STOPPED_EXIT_CODE = 1
_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 300.0


def decide(verdict: Verdict, history: History, config: SuperviseConfig) -> Action:
    """The action for one verdict."""
    if verdict.cause is Cause.DONE:
        return Action(ActionKind.FINISH, "the run is done")
    if verdict.cause is Cause.SUPERSEDED:
        return Action(ActionKind.LEAVE, "leave the run to the newer launch")
    if verdict.cause is Cause.YIELDED:
        return Action(ActionKind.STOP, f"{verdict.reason}; go on with `hpctrain resubmit`")
    if verdict.cause is Cause.CANCELLED:
        return Action(ActionKind.STOP, "cancelled runs stay cancelled", STOPPED_EXIT_CODE)
    if verdict.cause in SCHEDULER_CAUSES:
        return _continue(verdict, history, config)
    if verdict.cause in FAILURE_CAUSES:
        return _retry(verdict, history, config)
    return Action(ActionKind.STOP, f"{verdict.reason}: a retry cannot help", STOPPED_EXIT_CODE)


def _continue(verdict: Verdict, history: History, config: SuperviseConfig) -> Action:
    limit = config.failures_without_progress
    if verdict.cause is Cause.TIME_LIMIT and history.time_limits_without_progress >= limit:
        reason = (
            f"{history.time_limits_without_progress} time limits in a row without a new "
            "checkpoint: raise `resources.walltime` or save more often"
        )
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
    if verdict.already_requeued:
        return Action(ActionKind.LEAVE, "Slurm has requeued the job already")
    if config.continuation == "none":
        reason = f"{verdict.reason}; this site does not requeue: `hpctrain resubmit` goes on"
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
    return Action(ActionKind.REQUEUE, f"{verdict.cause}: the next attempt resumes")


def _retry(verdict: Verdict, history: History, config: SuperviseConfig) -> Action:
    failures, limit = history.failures_without_progress, config.failures_without_progress
    if failures >= limit:
        reason = f"{failures} failed launches in a row without a new checkpoint: {verdict.reason}"
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
    delay = min(_FIRST_DELAY_SECONDS * 2 ** max(failures - 1, 0), _LONGEST_DELAY_SECONDS)
    count = f"failure {failures} of {limit} without a new checkpoint"
    reason = f"start again on the same nodes ({count if failures else 'it had made progress'})"
    return Action(ActionKind.RELAUNCH, reason, delay_seconds=delay)
