"""Carry out what the policy has decided; the ledger records it first.

Except for a requeue while Slurm ends the job: within KillWait the requeue comes first, and what the
ledger has to record waits in memory (`BufferedLedger.defer`).

Belongs here: one way to act for each `ActionKind`, and the list of skipped data. Does not belong
here: choosing one.
"""

from __future__ import annotations

import contextlib

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError, SlurmError, SlurmRefusedError, StorageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.engines.train_json import train_config_of
from hpctrain.judge.documents import Action, ActionKind, Verdict
from hpctrain.judge.policy import STOPPED_EXIT_CODE
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import clear_followed_requests
from hpctrain.records.run_records import (
    SkipList,
    SkippedData,
    parse_record,
    read_metrics,
    write_record,
)
from hpctrain.supervise.act.successor import (
    end_succession,
    exclude,
    exclude_from_successors,
    hold,
    requeue,
)
from hpctrain.supervise.context import AttemptContext, log_message

_ENDS_THE_RUN = (ActionKind.FINISH, ActionKind.STOP, ActionKind.HOLD)


def act(context: AttemptContext, action: Action, verdict: Verdict | None = None) -> int:
    """Record and carry out `action`; return the exit code of the job, should it end now."""
    context.note(
        EventKind.ACTION,
        action=action.kind,
        cause=verdict.cause if verdict is not None else None,
        reason=action.reason,
        excluded=action.exclude,
        delay_seconds=action.delay_seconds or None,
        exit_code=action.exit_code,
    )
    log_message(f"{action.kind}: {action.reason}")
    for reason in action.observed:
        context.note(EventKind.OBSERVED, action=action.kind, reason=reason)
        log_message(f"observed only: {reason}")
    if action.rejected_step is not None:
        # No launch may use it; the next one, which then owns the run, puts it aside.
        context.note(
            EventKind.CHECKPOINT_REJECTED,
            checkpoint_step=action.rejected_step,
            cause=verdict.cause if verdict else None,
            reason=verdict.reason if verdict else action.reason,
        )
        log_message(f"checkpoint of step {action.rejected_step} rejected: {action.reason}")
    if action.rollback_to is not None:
        # The next launch goes back to that checkpoint and skips the batches before the anomaly.
        step = verdict.step if verdict else None
        skipped, reason = None, "no data is left out"
        if verdict is not None and step is not None:
            skipped = skip_batches(context.run_layout, step, action.skip_steps, verdict.reason)
        if skipped is not None:
            reason = f"samples {skipped.from_samples} to {skipped.to_samples} are left out"
        context.note(
            EventKind.ROLLED_BACK,
            checkpoint_step=action.rollback_to,
            failed_step=step,
            reason=reason,
        )
        log_message(f"going back to step {action.rollback_to}: {reason}")
    if action.kind is not ActionKind.REQUEUE:
        context.ledger.write_on()
    if action.kind in _ENDS_THE_RUN:
        _end_run(context, action, verdict)
    if action.kind is ActionKind.STOP:
        log_message(f"run {context.config.run_id} is over: {action.reason}")
    if action.kind is ActionKind.REQUEUE:
        write_on = context.ledger.write_on
        done, answer = requeue(context.slurm, context.job_id, before_retry=write_on)
        write_on()
        return _record_answer(context, action, done, answer)
    if action.kind is ActionKind.LEAVE and action.exclude:
        result = exclude_from_successors(context, action.exclude)
        context.note(EventKind.ACTION_RESULT, action=action.kind, reason=result)
        log_message(f"{action.kind}: {result}")
    if action.kind is ActionKind.HOLD:
        return _record_answer(context, action, *hold(context.slurm, context.job_id))
    return action.exit_code


def _record_answer(context: AttemptContext, action: Action, done: bool, answer: str) -> int:
    """Record Slurm's answer to a requeue or a hold; return the exit code of the job."""
    if done and action.exclude:
        answer = f"{answer}; {exclude(context.slurm, context.job_id, action.exclude)}"
    context.note(EventKind.ACTION_RESULT, action=action.kind, reason=answer)
    log_message(f"{action.kind}: {answer}")
    if not done and action.kind is ActionKind.HOLD:
        reason = f"Slurm did not {action.kind} the job: {answer}; go on with `hpctrain resume`"
        context.note(
            EventKind.ACTION, action=ActionKind.STOP, reason=reason, exit_code=STOPPED_EXIT_CODE
        )
    return 0 if done else STOPPED_EXIT_CODE


def _end_run(context: AttemptContext, action: Action, verdict: Verdict | None) -> None:
    """Let no successor start, and no job come back that Slurm has requeued or will requeue.

    From Slurm 24.05 on, a job that exits in a grace period is requeued whatever its exit code. Its
    owner may switch that off while it runs (scontrol(1), Requeue). If Slurm does not get this, the
    next start finds the stop in the ledger (`loop`).
    """
    clear_followed_requests(context.run_layout)
    end_succession(context)
    if action.kind is not ActionKind.HOLD and context.config.continuation == "requeue":
        try:
            context.slurm.update_job(context.job_id, requeue=False)
        except SlurmRefusedError:
            pass  # Slurm has ended the job already
        except SlurmError as error:
            reason = f"Slurm may start the job again: {error}"
            context.note(EventKind.ACTION_RESULT, action=action.kind, reason=reason)
            log_message(reason)
    if action.kind is ActionKind.STOP and verdict is not None and verdict.already_requeued:
        with contextlib.suppress(SlurmError):
            context.slurm.cancel(context.job_id)


# -- Choose the samples to skip after a rollback, and extend the list of skipped data -----------


def skip_batches(run: RunLayout, step: int, skip_steps: int, reason: str) -> SkippedData | None:
    """Have the trainer skip the batches of the last `skip_steps` steps up to and with `step`.

    Returns the skipped samples. Returns None and changes nothing if there is nothing to skip, or if
    the samples are unknown (no row of the step before, no readable train.json). Raises OSError if
    the list cannot be extended; see `read_skip_list`.
    """
    first_step = step - skip_steps + 1
    first: int | None = 0
    if first_step > 1:
        # Consumed before the first skipped step, by the newest row of the step before it.
        rows = [row for row in read_metrics(run) if row.step == first_step - 1]
        first = rows[-1].consumed_samples if rows else None
    try:
        config = train_config_of(run.train_config, run.train_config.read_bytes())
    except (OSError, InvalidInputError):
        return None
    if skip_steps < 1 or first is None:
        return None
    count = config.batch_sizes.samples_after
    skipped = SkippedData(
        from_samples=first,
        to_samples=first + count(step) - count(first_step - 1),
        reason=reason,
        time=clock.now(),
    )
    known = read_skip_list(run)
    write_record(run.skips, SkipList(skips=(*known.skips, skipped)))
    return skipped


def read_skip_list(run: RunLayout) -> SkipList:
    """Read the data skipped so far; empty if there is no file.

    Raises OSError if the file cannot be read, StorageError if its content is no such list. Writing
    a new list over either would train on data that was left out.
    """
    try:
        text = run.skips.read_bytes()
    except FileNotFoundError:
        return SkipList()
    try:
        skips = parse_record(run.skips, text, SkipList)
    except NewerFormatError as error:
        raise StorageError(str(error)) from error
    if skips is None:
        raise StorageError(f"{run.skips} is not a list of skipped data")
    return skips
