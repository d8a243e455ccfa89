"""Steers a run: requests (`stop`, `save`, `hold`, `resume`), acceptances, cancelling, upgrades.

A run that trains gets a file (`records.requests`), so that no signal is lost and the trainer
chooses the step boundary. A job that waits in the queue is changed in Slurm. If Slurm does not
answer, the request is made all the same, because it stays pending until it is followed. A repeated
request is no error. Belongs here: which request applies, and the message. Does not belong here: the
files, following them (`hpctrain.supervise`), printing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import (
    HpctrainError,
    RunFailedError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.train_json import train_config_of
from hpctrain.engines.trainer import is_trainer, trainer_settings_of
from hpctrain.job.data_records import record_data
from hpctrain.job.job_queries import jobs_of, record_found, slurm_of
from hpctrain.job.job_submission import resubmit
from hpctrain.job.kept_code import keep_checkout_changes, keep_code
from hpctrain.judge.attempts import ENDS_RUN, launch_ends, standing_action
from hpctrain.judge.causes import CHECKPOINT_CAUSES
from hpctrain.judge.documents import ActionKind
from hpctrain.judge.launch_history import pending_rejections
from hpctrain.plan.documents import Plan
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.data_identity import compare, read_identity
from hpctrain.records.epochs import current_epoch
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import submitted_ids
from hpctrain.records.kept_code import current_archive, parse_archive_name
from hpctrain.records.known_steps import known_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import (
    TAKE_BACK,
    Request,
    RequestKind,
    is_requested,
    make_request,
    printable_reason,
    read_request,
    take_back,
    user_name,
)
from hpctrain.records.run_records import Progress, read_record
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.runs.run_documents import known_any_plan
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.slurm.client import Backoff, SlurmClient
from hpctrain.slurm.records import JobRecord
from hpctrain.spec.engines.registry import abilities_of

# A checkpoint takes seconds to minutes; squeue(1), PERFORMANCE: no queries in a tight loop.
_SLURM_QUERY_SECONDS = 30.0
# KillWait (slurm.conf(5), 30 s by default) and an epilog.
_SECONDS_TO_LEAVE = 60


# Levels of a trainer of its own: it saves on a signal and leaves, or whenever it is asked.
_SAVES_ON_SIGNAL, _SAVES_WHEN_ASKED = 2, 4
_LOST = "Its trainer saves on no signal: work since the newest checkpoint is lost"
_LEAVING = {
    "step": "saves at the next step boundary and leaves",
    "signal": "saves on a signal and leaves",
    "lost": "ends",
}


@dataclass(frozen=True)
class ControlResult:
    """What a request has done, as a message. `changed` is False if there was nothing to do."""

    run_id: str
    message: str
    changed: bool = True
    job_id: int | None = None


@dataclass(frozen=True)
class _Queue:
    """The run's jobs in Slurm that have not ended; `answered` is False if Slurm did not answer."""

    jobs: tuple[JobRecord, ...]
    answered: bool = True

    @property
    def active(self) -> JobRecord | None:
        """The job that holds nodes, or whose state is unknown."""
        return next((job for job in self.jobs if not job.state.is_pending), None)

    @property
    def waiting(self) -> tuple[JobRecord, ...]:
        return tuple(job for job in self.jobs if job.state.is_pending)

    @property
    def only_waits(self) -> bool:
        return bool(self.jobs) and self.active is None

    @property
    def unheld(self) -> bool:
        """There are jobs, and none of them is held."""
        return bool(self.jobs) and all(job.hold is None for job in self.jobs)

    @property
    def job_id(self) -> int | None:
        job = self.active or next(iter(self.jobs), None)
        return job.job_id if job else None


def note(run: RunFiles, action: str, reason: str, job_id: int | None = None) -> None:
    """Record in the ledger who requests what, and why.

    A member of the team may write into `control/` without owning the ledger. Then the supervisor
    records the request's own text and its owner when it follows the request.
    """
    fields = {"job_id": job_id, "user": user_name(), "action": action}
    with contextlib.suppress(PermissionError):
        run.ledger.append(EventKind.CONTROL, **fields, reason=printable_reason(reason) or None)


def ask(run: RunFiles, kind: RequestKind, reason: str = "", job_id: int | None = None) -> None:
    """Record and make a request. Raises UsageError for a user who may not steer the run."""
    run.refuse_unless_steerable(kind)
    note(run, kind, reason, job_id)
    make_request(run.layout, kind, reason)


def _owns_jobs(run: RunFiles) -> bool:
    """Whether Slurm lets this user hold, release and cancel the jobs of the run."""
    return os.getuid() in (0, run.owner_id)


def stop(
    run: RunFiles, slurm: SlurmClient, *, now: bool = False, reason: str = ""
) -> ControlResult:
    """Make the run stop: after a save at the next step boundary, or `now` without one.

    A job that waits is taken out of the queue. Raises UsageError when the run is over and was not
    stopped by such a request.
    """
    _refuse_if_done(run, "stop")
    slurm = slurm_of(run, slurm)
    kind: RequestKind = "stop-now" if now else "stop"
    queue = _queue(run, slurm)
    if queue.answered and not queue.jobs:
        row = statuses([run], slurm)[0]
        if row.state is not RunState.STOPPED:
            raise _over(run, slurm, "stop")
        message = f"Run {_name(run)} has stopped already: {row.reason}"
        return ControlResult(run.run_id, message, changed=False)
    standing = read_request(run.layout)
    if not queue.only_waits and standing is not None and standing.kind in (kind, "stop-now"):
        return _asked_already(run, standing, queue.job_id)
    ask(run, kind, reason, queue.job_id)
    if queue.only_waits and _owns_jobs(run):
        for job in queue.waiting:
            slurm.cancel_waiting(job.job_id)
        job_id, queue = queue.job_id, _queue(run, slurm)
        # A job that has just started stays: its supervisor finds the request.
        if queue.answered and not queue.jobs:
            run.ledger.append(
                EventKind.ACTION,
                job_id=job_id,
                action=ActionKind.STOP,
                exit_code=0,
                user=user_name(),
                reason="taken out of the queue on request",
            )
            take_back(run.layout)
        if not queue.jobs:
            return _result(run, f"took run {_name(run)} out of the queue", _HOW_TO_CONTINUE)
    way = _stop_of(run)
    what = f"it {_LEAVING[way]}" + (f". {_LOST}" if way == "lost" else "")
    if queue.only_waits and not _owns_jobs(run):
        what = f"it does so when its job starts; {_ONLY_OWNER} take it out of the queue"
    elif now:
        what = "it ends at once; steps since the newest checkpoint are lost"
    return _result(run, f"asked run {_name(run)} to stop", what, _HOW_TO_CONTINUE, queue=queue)


def _stop_of(run: RunFiles) -> str:
    """Return how a run leaves when it is asked to, as a key of `_LEAVING`."""
    plan = known_any_plan(run.layout)
    if not isinstance(plan, TrainerPlan) or plan.level >= _SAVES_WHEN_ASKED:
        return "step"
    return "signal" if plan.level >= _SAVES_ON_SIGNAL else "lost"


def hold(run: RunFiles, slurm: SlurmClient, *, reason: str = "") -> ControlResult:
    """Make the run save, release its nodes and wait in the queue until `resume`.

    Where the site does not requeue, the run stops instead. Raises UsageError when it is over, or
    is about to end without a save.
    """
    _refuse_if_done(run, "hold")
    slurm = slurm_of(run, slurm)
    queue = _queue(run, slurm)
    if queue.answered and not queue.jobs:
        raise _over(run, slurm, "hold")
    if queue.only_waits and _owns_jobs(run):
        free = [job for job in queue.waiting if job.hold is None]
        if not free:
            message = f"Run {_name(run)} is held already ({queue.waiting[0].reason})"
            return ControlResult(run.run_id, message, changed=False, job_id=queue.job_id)
        note(run, "hold", reason, queue.job_id)
        for job in free:
            slurm.hold(job.job_id)
        queue = _queue(run, slurm)
        if queue.active is None:
            # Followed, and newer than a request to stop: neither is for the next attempt.
            take_back(run.layout, ("hold", "stop"))
            message, hint = (
                f"run {_name(run)} is held in the queue",
                "`hpctrain resume` releases it",
            )
            return _result(run, message, hint, queue=queue)
        with contextlib.suppress(SlurmError):  # Slurm silently "holds" a job that has just started
            slurm.release(queue.active.job_id)
    standing = read_request(run.layout)
    if standing is not None and standing.kind == "hold":
        return _asked_already(run, standing, queue.job_id)
    if standing is not None and standing.kind == "stop-now":
        raise UsageError(
            f"run {_name(run)} was asked to stop at once by {standing.by}",
            hint=f"`{run.command('resume')}` when it has stopped",
        )
    config = read_supervise_config(run.layout.supervise_config)
    ask(run, "hold", reason, queue.job_id)
    saves = _stop_of(run) != "lost"
    then = f"it {'saves, ' * saves}leaves its nodes and waits in the queue, held"
    if config.continuation != "requeue":
        then = f"it {'saves and ' * saves}stops, because its jobs are not requeued on this site"
    then += "" if saves else f". {_LOST}"
    if queue.only_waits and not _owns_jobs(run):
        then = f"it does so when its job starts; {_ONLY_OWNER} hold it in the queue"
    return _result(run, f"asked run {_name(run)} to hold", then, _HOW_TO_CONTINUE, queue=queue)


def resume(
    run: RunFiles,
    slurm: SlurmClient,
    *,
    reason: str = "",
    acceptance: Acceptance | None = None,
) -> ControlResult:
    """Continue a held, stopped or failed run; pending requests are withdrawn.

    A held job is released, a run that is over is submitted again. If the run is just leaving its
    nodes, this waits until it has left, at most 60 s: until then Slurm lists the job as running,
    and it can be neither released nor submitted. `acceptance` is what a person accepts for the
    run, which goes into the ledger first. Raises UsageError when the run is done, does not leave
    in time or is held by Slurm's administrators, or when there is nothing to accept. Raises
    SlurmUnreachableError when Slurm does not answer.
    """
    acceptance = acceptance or Acceptance()
    _refuse_if_done(run, "resume")
    slurm = slurm_of(run, slurm)
    queue = _queue(run, slurm)
    for _ in range(_SECONDS_TO_LEAVE):
        runs = queue.unheld and queue.active is not None
        # How its supervisor has ended the attempt whose job still has nodes.
        action = standing_action(run.ledger.events()) if runs else None
        if action is None or action.action not in ENDS_RUN:
            break
        clock.sleep(1.0)
        queue = _queue(run, slurm)
    else:
        raise UsageError(
            f"run {_name(run)} is leaving its nodes, and has not left them within "
            f"{_SECONDS_TO_LEAVE} s",
            hint="resume it again when `hpctrain status` shows that it is held or has stopped",
        )
    if not queue.answered:
        raise SlurmUnreachableError(
            "Slurm does not answer, so it is unknown whether the run is held or has stopped"
        )
    if queue.unheld:
        if acceptance.anything:
            raise UsageError(
                f"run {_name(run)} has a job in the queue, which would continue as it is",
                hint=f"`{run.command('stop')}` first",
            )
        standing = read_request(run.layout)
        state = "running" if queue.active is not None else "waiting in the queue"
        if standing is None:
            message = f"Run {_name(run)} is {state} already"
            return ControlResult(run.run_id, message, changed=False, job_id=queue.job_id)
        note(run, TAKE_BACK, reason, queue.job_id)
        take_back(run.layout, ("stop", "stop-now", "hold"))
        message = f"withdrew what {standing.by} requested ({standing.kind})"
        then = f"the run is {state}"
        if queue.active is not None:
            then = "if it has begun to leave, resume it again when it has stopped"
        return _result(run, message, then, queue=queue)
    run.refuse_unless_writable("resume")
    accepted = accept(run, acceptance, reason)
    note(run, "resume", reason, queue.job_id)
    take_back(run.layout)
    if not queue.jobs:
        again = bool(submitted_ids(run.ledger.events()))
        submitted = resubmit(run, slurm)
        verb = "resubmitted" if again else "submitted"
        message = f"{verb} run {_name(run)} as job {submitted.job_id}"
        result = _result(run, message, *accepted, *submitted.answer.lines)
        return replace(result, job_id=submitted.job_id)
    for job in queue.jobs:
        if job.hold is not None:
            slurm.release(job.job_id)
    message = f"released run {_name(run)}: it waits for its turn"
    return _result(run, message, *accepted, queue=queue)


def save(run: RunFiles, slurm: SlurmClient, *, reason: str = "") -> ControlResult:
    """Make the run save a checkpoint at the next step boundary and continue.

    Raises UsageError when it does not run (then there is nothing newer to save), and when its
    engine cannot.
    """
    _refuse_if_done(run, "save")
    plan = known_any_plan(run.layout)
    if isinstance(plan, TrainerPlan) and plan.level < _SAVES_WHEN_ASKED:
        hint = "a trainer saves when it is asked if it calls `hpctrain.trainer` (level 4)"
        if plan.level >= _SAVES_ON_SIGNAL:
            hint = "`hpctrain stop` makes it save and leave, `hpctrain resume` continues from there"
        raise UsageError(f"run {_name(run)} saves when its trainer does: {plan.title}", hint=hint)
    if isinstance(plan, Plan) and abilities_of(plan.engine).saves_by_steps_only:
        # An external Megatron-LM only saves at its interval, and before it ends by SIGTERM.
        hint = "`hpctrain stop` makes it save and leave, `hpctrain resume` continues from there"
        raise UsageError(f"run {_name(run)} saves by steps: its engine is {plan.engine}", hint=hint)
    queue = _queue(run, slurm)
    if queue.answered and queue.active is None:
        newest = newest_checkpoint(run.layout)
        has = f"its newest checkpoint is step {newest:,}" if newest else "it has no checkpoint yet"
        where = "waits in the queue" if queue.jobs else "does not run"
        hint = "`hpctrain checkpoints` lists what there is"
        raise UsageError(f"run {_name(run)} {where}: {has}", hint=hint)
    if is_requested(run.layout, "save"):
        message = f"run {_name(run)} was asked to save already and has not begun to"
        return ControlResult(run.run_id, message, changed=False, job_id=queue.job_id)
    ask(run, "save", reason, queue.job_id)
    asked = f"asked run {_name(run)} to save at the next step boundary"
    return _result(run, asked, queue=queue)


def step_now(layout: RunLayout) -> int:
    """Return the newest step that is recorded as done or saved."""
    progress = read_record(layout.progress, Progress)
    return max(newest_checkpoint(layout), progress.step if progress else 0)


def newest_checkpoint(layout: RunLayout) -> int:
    """Return the step of the newest published checkpoint, 0 if there is none."""
    return max(published_steps(layout.checkpoints), default=0)


def wait_for_save(
    run: RunFiles,
    slurm: SlurmClient,
    after_step: int,
    timeout_seconds: float | None = None,
) -> int:
    """Wait for a checkpoint newer than `after_step` (see `step_now`); returns its step.

    Raises RunFailedError when the run ends or is requeued without one, TimeoutError after
    `timeout_seconds`.
    """
    begun_at = queried_at = clock.monotonic()
    while True:
        newest = newest_checkpoint(run.layout)
        if newest > after_step and not is_requested(run.layout, "save"):
            return newest
        now = clock.monotonic()
        if timeout_seconds is not None and now - begun_at >= timeout_seconds:
            raise TimeoutError(f"run {run.run_id} has not saved within {timeout_seconds:.0f} s")
        if now - queried_at >= _SLURM_QUERY_SECONDS:
            queried_at = now
            queue = _queue(run, slurm)
            if queue.answered and queue.active is None and newest <= after_step:
                raise RunFailedError(f"run {_name(run)} does not run any more and has not saved")
        clock.sleep(0.5)


_ONLY_OWNER = "only the owner of the job can"
_HOW_TO_CONTINUE = "`hpctrain resume` continues it"


def _refuse_if_done(run: RunFiles, verb: str) -> None:
    if run.layout.done.exists():
        raise UsageError(f"run {_name(run)} is done: there is nothing to {verb}")


def _queue(run: RunFiles, slurm: SlurmClient) -> _Queue:
    """Find the run's jobs that have not ended, in one query; records unrecorded ones.

    Raises UsageError if they are on another cluster.
    """
    found = jobs_of(run, slurm)
    if found.unrecorded:
        with contextlib.suppress(PermissionError):  # in a colleague's ledger
            record_found(run, found)
    return _Queue(found.live, answered=found.answered)


def _name(run: RunFiles) -> str:
    return f"`{run.run_id}`"


def _result(run: RunFiles, *parts: str, queue: _Queue | None = None) -> ControlResult:
    if queue is not None and not queue.answered:
        parts = (
            *parts,
            "Slurm does not answer, so the request stays pending until the run reads it",
        )
    message = "; ".join(parts)
    return ControlResult(
        run.run_id, message[0].upper() + message[1:], job_id=queue.job_id if queue else None
    )


def _asked_already(run: RunFiles, standing: Request, job_id: int | None) -> ControlResult:
    message = f"Run {_name(run)} was asked to {standing.kind} already by {standing.by}"
    return ControlResult(run.run_id, message, changed=False, job_id=job_id)


def _over(run: RunFiles, slurm: SlurmClient, verb: str) -> UsageError:
    row = statuses([run], slurm)[0]
    reason = f": {row.reason}" if row.reason and row.state is not RunState.PREPARED else ""
    again = "" if row.state.without_job else " again"
    return UsageError(
        f"run {_name(run)} is {row.state}, so there is nothing to {verb}{reason}",
        hint=f"`{run.command('resume')}` submits it{again}",
    )


# -- Records what a person accepts when a run resumes: a start at step 0, or changed data -------


@dataclass(frozen=True)
class Acceptance:
    """What a person accepts with `hpctrain resume`."""

    from_scratch: bool = False
    data: bool = False

    @property
    def anything(self) -> bool:
        return self.from_scratch or self.data


def accept(run: RunFiles, acceptance: Acceptance, reason: str) -> list[str]:
    """Write what is accepted into the ledger, and apply it; returns a sentence for each part.

    The run must not be running. Raises UsageError where there is nothing to accept, so that nobody
    gives up steps out of habit, InvalidInputError when the data cannot be read.
    """
    accepted = []
    if acceptance.data:
        accepted.append(_accept_data(run, reason))
    if acceptance.from_scratch:
        accepted.append(_accept_fresh_start(run, reason))
    return accepted


def _accept_fresh_start(run: RunFiles, reason: str) -> str:
    events, root = run.ledger.events(), run.layout.checkpoints
    if not root.is_dir():
        if root.is_symlink():
            message = f"{root} leads to {root.readlink()}, which is not there"
            raise UsageError(message, hint="mount its file system; nothing is given up meanwhile")
        root.mkdir(mode=0o700)
    given_up = pending_rejections(events)
    good = [one.step for one in checkpoints(root) if one.good and one.step not in given_up]
    ended = launch_ends(events)
    if good and not (ended and ended[-1].cause in CHECKPOINT_CAUSES):
        raise UsageError(
            f"run `{run.run_id}` has a good checkpoint of step {good[0]:,}",
            hint=f"`{run.command('resume')}` continues from it; a new run starts at step 0",
        )
    known = known_steps(run.layout, events)
    lost = max(known.saved_step, known.trained)
    if not lost and not good:
        raise UsageError(
            f"run `{run.run_id}` has not trained a step: there is nothing to give up",
            hint=f"`{run.command('resume')}`",
        )
    run.ledger.append(
        EventKind.FRESH_START_ACCEPTED,
        epoch=current_epoch(run.layout.epochs),
        user=user_name(),
        reason=printable_reason(reason) or None,
        last_step=lost or None,
        checkpoint_step=known.saved_step or None,
    )
    return f"it starts at step 0: {lost:,} steps are given up, their remaining files are kept"


def _accept_data(run: RunFiles, reason: str) -> str:
    try:
        identity = read_identity(run.layout.data_identity)
    except HpctrainError as error:
        changed: tuple[str, ...] = (str(error),)
    else:
        if identity is None:  # a run of an older version
            changed = ("nothing was recorded about the data before",)
        else:
            changed = compare(identity).changed
    if not changed:
        raise UsageError(
            f"the data of run `{run.run_id}` are as they were recorded",
            hint=f"`{run.command('resume')}`",
        )
    run.ledger.append(
        EventKind.DATA_ACCEPTED,
        epoch=current_epoch(run.layout.epochs),
        user=user_name(),
        reason=printable_reason(reason) or None,
        evidence=changed,
    )
    record_data(run.layout)
    # The engine would use indexes of the old data for the new data.
    shutil.rmtree(run.layout.data_cache, ignore_errors=True)
    return f"it continues with changed data ({changed[0]})"


# -- Cancels a run so that it stays cancelled, and reports exactly which jobs have ended --------
# The first query finds the run's jobs, because an id alone may be somebody else's job. Then the
# ledger announces the cancel, so that a supervisor that is terminated can find the reason. Then
# comes `Requeue=0`: otherwise a supervisor that is just requeueing its job could revive it. The
# last step is scancel, for waiting jobs before the running one, because they would start after it.
# If Slurm refuses, the announcement is withdrawn, or it would be followed at the next crash.


# A controller that has accepted scancel shows COMPLETING or CANCELLED within one pass.
_CONFIRM_SECONDS = 5.0


@dataclass(frozen=True)
class Cancelled:
    """The cancelled jobs; `job_id` is the one that counts, None if there was none.

    `already`: the run was cancelled before, so nothing was done. `still` are jobs that Slurm still
    shows as running or waiting.
    """

    run_id: str
    job_id: int | None = None
    job_ids: tuple[int, ...] = ()
    already: bool = False
    still: tuple[int, ...] = ()


def cancel(run: RunFiles, slurm: SlurmClient) -> Cancelled:
    """Cancel the run's jobs.

    Raises UsageError for a run that has nothing to cancel or whose jobs are on another cluster,
    SlurmUnreachableError or SlurmRefusedError when nothing, or not everything, was cancelled.
    """
    if run.layout.done.exists():
        raise UsageError(f"run `{run.run_id}` is done: there is nothing to cancel")
    run.refuse_unless_writable("cancel")
    slurm = slurm_of(run, slurm)
    live = _live(run, slurm)
    if not live:
        row = statuses([run], slurm)[0]
        if row.state is RunState.CANCELLED:
            return Cancelled(run.run_id, already=True)
        if row.state is RunState.RUNNING:  # it is just ending, and will not be requeued
            return Cancelled(run.run_id, row.job_id, already=True)
        reason = f": {row.reason}" if row.reason else ""
        raise UsageError(
            f"run `{run.run_id}` is {row.state}, so there is nothing to cancel{reason}",
            hint=f"`{run.command('resume')}` would continue it",
        )
    # One line for each job, because every supervisor looks for a cancel of its own job.
    active = [job for job in live if job.state.is_active]
    ordered = [*(job for job in live if job not in active), *active]
    for job in ordered:
        run.ledger.append(EventKind.CANCEL_REQUESTED, job_id=job.job_id, user=user_name())
    cancelled: list[int] = []  # the jobs that Slurm has accepted to end
    try:
        # A job may have submitted its successor while we cancelled the others.
        while more := [job for job in live if job.submitted_id not in cancelled]:
            for job in more:
                with contextlib.suppress(SlurmRefusedError):  # a job that has just ended
                    slurm.update_job(job.job_id, requeue=False)
            ids = list(dict.fromkeys(job.submitted_id for job in more))
            slurm.cancel_all(ids, pending_only=True)
            slurm.cancel_all(ids)
            cancelled += ids
            live = _live(run, slurm)
    except SlurmError as error:
        raise _withdraw(run, slurm, live, cancelled, error) from error
    still = _wait_for_end(run, slurm, tuple(cancelled))
    job_id = ordered[-1].job_id
    if not still:
        run.ledger.append(EventKind.CANCELLED, job_id=job_id, user=user_name())
    return Cancelled(run.run_id, job_id, tuple(cancelled), still=still)


def _live(run: RunFiles, slurm: SlurmClient) -> list[JobRecord]:
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError(
            f"Slurm does not answer, so nothing of run `{run.run_id}` was cancelled",
            hint=f"try again, or `{run.command('stop')}`: the run itself follows that",
        )
    record_found(run, found)
    return [job for job in found.live if not job.state.is_ending or job.requeue]


def _withdraw(
    run: RunFiles,
    slurm: SlurmClient,
    live: list[JobRecord],
    cancelled: list[int],
    error: SlurmError,
) -> SlurmError:
    """Withdraw the announcement if Slurm has followed none of it; returns the error to raise."""
    if not cancelled:
        for job in live:
            with contextlib.suppress(SlurmError):
                slurm.update_job(job.job_id, requeue=job.requeue)
            run.ledger.append(
                EventKind.CANCEL_FAILED, job_id=job.job_id, user=user_name(), reason=str(error)
            )
        message = f"nothing of run `{run.run_id}` was cancelled: {error}"
    else:
        ids = ", ".join(map(str, cancelled))
        message = f"run `{run.run_id}`: job {ids} was cancelled, others perhaps not: {error}"
    kind = SlurmRefusedError if isinstance(error, SlurmRefusedError) else SlurmUnreachableError
    return kind(message, hint=f"`{run.command('cancel')}` again")


def _wait_for_end(run: RunFiles, slurm: SlurmClient, asked_for: tuple[int, ...]) -> tuple[int, ...]:
    """Wait a few seconds for jobs to end; returns those that Slurm has not begun to end."""
    deadline, pauses = clock.monotonic() + _CONFIRM_SECONDS, Backoff()
    while True:
        found = jobs_of(run, slurm)
        going = [job for job in found.live if not job.state.is_ending]
        if (found.answered and not going) or clock.monotonic() >= deadline:
            return tuple(job.job_id for job in going) if found.answered else asked_for
        clock.sleep(pauses.next_seconds())


# -- Moving a run to the hpctrain that is installed, and to the software it then finds ----------


@dataclass(frozen=True)
class Upgrade:
    """What the next attempt of a run imports, and what it has imported before."""

    run_id: str
    before: str
    after: str

    @property
    def moved(self) -> bool:
        return self.before != self.after


def upgrade(run: RunFiles, reason: str = "") -> Upgrade:
    """Make the next attempt of a run import the installed hpctrain, and write a new software lock.

    The attempt that runs goes on with what it has begun with. The script stays as it is.

    Raises UsageError for a run that is done or keeps no code, InvalidInputError
    (NewerFormatError) where this hpctrain cannot read the run's settings, OSError.
    """
    layout = run.layout
    before = current_archive(layout)
    if before is None:
        raise UsageError(
            f"run `{run.run_id}` keeps no code of hpctrain",
            hint="its script is of an hpctrain that kept none: each of its attempts imports the "
            "installed one",
        )
    if layout.done.exists():
        raise UsageError(f"run `{run.run_id}` is done: it has no next attempt")
    # What the next attempt will read with the new code.
    read_supervise_config(layout.supervise_config)
    run.ledger.events()
    checkout = None
    for path in (layout.train_config, *sorted(layout.directory.glob("train-n*.json"))):
        text = path.read_bytes()
        if is_trainer(text):
            trainer_settings_of(path, text)
        else:
            checkout = train_config_of(path, text).checkout_directory
    after = keep_code(layout)
    if checkout is not None:
        keep_checkout_changes(layout, Path(checkout))
    layout.software_lock.unlink(missing_ok=True)
    found = Upgrade(run.run_id, _code_words(before), _code_words(after))
    run.ledger.append(
        EventKind.UPGRADED,
        user=user_name(),
        reason=printable_reason(reason) or None,
        evidence=(f"{found.before} -> {found.after}",),
    )
    return found


def _code_words(archive: str) -> str:
    """Describe an archive of code as people read it: version and digest."""
    parsed = parse_archive_name(archive)
    return archive if parsed is None else f"hpctrain {parsed[0]} ({parsed[1]})"
