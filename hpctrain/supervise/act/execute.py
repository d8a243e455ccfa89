"""Doing what the policy has decided. The ledger says it before it is done.

Belongs here: one way to act for each `ActionKind`. Does not belong here: choosing one.
"""

from __future__ import annotations

import contextlib

from hpctrain.errors import SlurmError, SlurmRefusedError
from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import clear_followed_requests
from hpctrain.supervise.act.requeue import exclude, hold, requeue
from hpctrain.supervise.act.rollback import leave_out
from hpctrain.supervise.act.successor import end_succession, exclude_from_successors
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.judge.documents import Action, ActionKind, Verdict
from hpctrain.supervise.judge.policy import STOPPED_EXIT_CODE

_ENDS_THE_RUN = (ActionKind.FINISH, ActionKind.STOP, ActionKind.HOLD)


def act(context: AttemptContext, action: Action, verdict: Verdict | None = None) -> int:
    """Do it and return the exit code of the job, should it end now."""
    context.note(
        EventKind.ACTION,
        action=action.kind,
        cause=verdict.cause if verdict is not None else None,
        reason=action.reason,
        excluded=action.exclude,
        delay_seconds=action.delay_seconds or None,
        exit_code=action.exit_code,
    )
    say(f"{action.kind}: {action.reason}")
    for words in action.observed:
        context.note(EventKind.OBSERVED, action=action.kind, reason=words)
        say(f"observed only: {words}")
    if action.rejected_step is not None:
        _reject(context, action.rejected_step, action.reason, verdict)
    if action.rollback_to is not None:
        _go_back(context, action, verdict)
    if action.kind in _ENDS_THE_RUN:
        _end(context, action, verdict)
    if action.kind is ActionKind.STOP:
        say(f"run {context.config.run_id} is over: {action.reason}")
    if action.kind is ActionKind.REQUEUE:
        return _answered(context, action, *requeue(context.slurm, context.job_id))
    if action.kind is ActionKind.LEAVE and action.exclude:
        words = exclude_from_successors(context, action.exclude)
        context.note(EventKind.ACTION_RESULT, action=action.kind, reason=words)
        say(f"{action.kind}: {words}")
    if action.kind is ActionKind.HOLD:
        return _answered(context, action, *hold(context.slurm, context.job_id))
    return action.exit_code


def _answered(context: AttemptContext, action: Action, done: bool, answer: str) -> int:
    if done and action.exclude:
        answer = f"{answer}; {exclude(context.slurm, context.job_id, action.exclude)}"
    context.note(EventKind.ACTION_RESULT, action=action.kind, reason=answer)
    say(f"{action.kind}: {answer}")
    if not done and action.kind is ActionKind.HOLD:
        reason = f"Slurm did not {action.kind} the job: {answer}; go on with `hpctrain resume`"
        context.note(
            EventKind.ACTION, action=ActionKind.STOP, reason=reason, exit_code=STOPPED_EXIT_CODE
        )
    return 0 if done else STOPPED_EXIT_CODE


def _end(context: AttemptContext, action: Action, verdict: Verdict | None) -> None:
    """No successor may start; a job that Slurm has requeued, or will, must not come back."""
    clear_followed_requests(context.run_layout)
    end_succession(context)
    if action.kind is not ActionKind.HOLD and context.config.continuation == "requeue":
        _forbid_requeue(context, action)
    if action.kind is ActionKind.STOP and verdict is not None and verdict.already_requeued:
        with contextlib.suppress(SlurmError):
            context.slurm.cancel(context.job_id)


def _forbid_requeue(context: AttemptContext, action: Action) -> None:
    """From Slurm 24.05 on a job that leaves in a grace period is requeued whatever its exit code.

    scontrol(1), Requeue: its owner may switch that off while it runs. What Slurm does not hear now
    the next start finds in the ledger (`comeback`).
    """
    try:
        context.slurm.update_job(context.job_id, requeue=False)
    except SlurmRefusedError:
        return  # Slurm has ended the job already
    except SlurmError as error:
        words = f"Slurm may start the job again: {error}"
        context.note(EventKind.ACTION_RESULT, action=action.kind, reason=words)
        say(words)


def _reject(context: AttemptContext, step: int, reason: str, verdict: Verdict | None) -> None:
    """Say that no launch may use it; the next one, which owns the run then, puts it aside."""
    context.note(
        EventKind.CHECKPOINT_REJECTED,
        checkpoint_step=step,
        cause=verdict.cause if verdict else None,
        reason=verdict.reason if verdict else reason,
    )
    say(f"checkpoint of step {step} rejected: {reason}")


def _go_back(context: AttemptContext, action: Action, verdict: Verdict | None) -> None:
    """Leave out the batches before the anomaly from now on; the launch chooses the checkpoint."""
    step = verdict.step if verdict else None
    skipped = None
    if verdict is not None and step is not None:
        skipped = leave_out(context.run_layout, step, action.skip_steps, verdict.reason)
    words = "no data is left out"
    if skipped is not None:
        words = f"samples {skipped.from_samples} to {skipped.to_samples} are left out"
    context.note(
        EventKind.ROLLED_BACK,
        checkpoint_step=action.rollback_to,
        failed_step=step,
        reason=words,
    )
    say(f"going back to step {action.rollback_to}: {words}")
