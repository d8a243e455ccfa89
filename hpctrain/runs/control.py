"""Makes requests to a run: `stop`, `save`, `hold`, `resume`, and checks that they make sense.

A run that trains gets a file (`records.requests`), so that no signal is lost and the trainer
chooses the step boundary. A job that waits in the queue is changed in Slurm. If Slurm does not
answer, the request is made all the same, because it stays pending until it is followed. A repeated
request is no error. Belongs here: which request applies, and the message. Does not belong here: the
files, following them (`hpctrain.supervise`), printing.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

from hpctrain.base import clock
from hpctrain.base.errors import RunFailedError, SlurmError, SlurmUnreachableError, UsageError
from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.job_queries import jobs_of, record_found
from hpctrain.job.job_submission import resubmit
from hpctrain.judge.documents import ActionKind
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import (
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
from hpctrain.runs.acceptances import Acceptance, accept
from hpctrain.runs.describe import TAKE_BACK
from hpctrain.runs.run_documents import known_plan
from hpctrain.runs.state import ENDS_RUN, RunState, standing_action
from hpctrain.runs.status import statuses
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord
from hpctrain.spec.engines.registry import abilities_of

# A checkpoint takes seconds to minutes; squeue(1), PERFORMANCE: no queries in a tight loop.
_SLURM_QUERY_SECONDS = 30.0
# KillWait (slurm.conf(5), 30 s by default) and an epilog.
_SECONDS_TO_LEAVE = 60


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
    what = "it saves at the next step boundary and leaves"
    if queue.only_waits and not _owns_jobs(run):
        what = f"it does so when its job starts; {_ONLY_OWNER} take it out of the queue"
    elif now:
        what = "it ends at once; steps since the newest checkpoint are lost"
    return _result(run, f"asked run {_name(run)} to stop", what, _HOW_TO_CONTINUE, queue=queue)


def hold(run: RunFiles, slurm: SlurmClient, *, reason: str = "") -> ControlResult:
    """Make the run save, release its nodes and wait in the queue until `resume`.

    Where the site does not requeue, the run stops instead. Raises UsageError when it is over, or
    is about to end without a save.
    """
    _refuse_if_done(run, "hold")
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
    then = "it saves, leaves its nodes and waits in the queue, held"
    if config.continuation != "requeue":
        then = "it saves and stops, because its jobs are not requeued on this site"
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
    queue = _queue(run, slurm)
    for _ in range(_SECONDS_TO_LEAVE):
        if not (queue.unheld and queue.active is not None and _is_leaving(run)):
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
        again = any(event.event is EventKind.SUBMITTED for event in run.ledger.events())
        submitted = resubmit(run, slurm)
        verb = "resubmitted" if again else "submitted"
        message = f"{verb} run {_name(run)} as job {submitted.job_id}"
        return replace(_result(run, message, *accepted), job_id=submitted.job_id)
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
    plan = known_plan(run.layout)
    if plan is not None and abilities_of(plan.engine).saves_by_steps_only:
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


def _is_leaving(run: RunFiles) -> bool:
    """Tell whether the supervisor has ended the run while its job still has nodes."""
    action = standing_action(run.ledger.events())
    return action is not None and action.action in ENDS_RUN


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
