"""`stop`, `save`, `hold`, `resume`: what a team asks of a run, and when that makes sense.

A run that trains is asked by a file (`requests`), so that no signal is lost and the trainer
chooses the step boundary. A job that waits in the queue has nobody to ask: Slurm is told. Without
an answer of Slurm the request is made all the same, because it stands until it is followed.
Asking twice is no error. Belongs here: which of these it is, and the answer in words. Does not
belong here: the files, following them (`hpctrain.supervise`), printing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.actions import requests
from hpctrain.actions.acceptances import Acceptance, accept
from hpctrain.actions.run_documents import known_plan
from hpctrain.actions.run_jobs import jobs_of, record_found
from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import RunState
from hpctrain.actions.status import statuses
from hpctrain.actions.submit import resubmit
from hpctrain.checkpoints.publish import published_steps
from hpctrain.errors import RunFailedError, SlurmError, SlurmUnreachableError, UsageError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import (
    Request,
    RequestKind,
    is_requested,
    read_request,
    take_back,
    user_name,
)
from hpctrain.store.run_records import Progress, read_record
from hpctrain.store.supervise_config import read_supervise_config
from hpctrain.supervise.judge.documents import ActionKind

# A checkpoint takes seconds to minutes; squeue(1), PERFORMANCE: do not ask in a loop.
_ASK_SLURM_SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    """What a verb has done, in words. `changed` is False when there was nothing to do."""

    run_id: str
    words: str
    changed: bool = True
    job_id: int | None = None


@dataclass(frozen=True)
class _Queue:
    """The run's jobs in Slurm that have not ended; `answered` is False if Slurm did not say."""

    jobs: tuple[JobRecord, ...]
    answered: bool = True

    @property
    def active(self) -> JobRecord | None:
        """The job that holds nodes, or of which nobody knows whether it does."""
        return next((job for job in self.jobs if not job.state.is_pending), None)

    @property
    def waiting(self) -> tuple[JobRecord, ...]:
        return tuple(job for job in self.jobs if job.state.is_pending)

    @property
    def only_waits(self) -> bool:
        return bool(self.jobs) and self.active is None

    @property
    def job_id(self) -> int | None:
        job = self.active or next(iter(self.jobs), None)
        return job.job_id if job else None


# -- the verbs ---------------------------------------------------------------------------------


def stop(run: RunFiles, slurm: SlurmClient, *, now: bool = False, reason: str = "") -> Answer:
    """Have the run stop: after a save at the next step boundary, or `now` without one.

    A job that waits is taken out of the queue. Raises UsageError when the run is over and was not
    stopped by such a request.
    """
    _refuse_if_done(run, "stop")
    kind: RequestKind = "stop-now" if now else "stop"
    queue = _queue(run, slurm)
    if queue.answered and not queue.jobs:
        return _stopped_already(run, slurm)
    standing = read_request(run.layout)
    if not queue.only_waits and standing is not None and standing.kind in (kind, "stop-now"):
        return _asked_already(run, standing, queue.job_id)
    requests.ask(run, kind, reason, queue.job_id)
    if queue.only_waits:
        queue = _take_out(run, slurm, queue)
        if not queue.jobs:
            return _said(run, f"took run {_name(run)} out of the queue", _HOW_TO_GO_ON)
    what = _WITHOUT_SAVE if now else "it saves at the next step boundary and leaves"
    return _said(run, f"asked run {_name(run)} to stop", what, _HOW_TO_GO_ON, queue=queue)


def hold(run: RunFiles, slurm: SlurmClient, *, reason: str = "") -> Answer:
    """Have the run save, leave its nodes and wait in the queue until `resume`.

    Where the site does not requeue, the run stops instead. Raises UsageError when it is over, or
    is about to end without a save.
    """
    _refuse_if_done(run, "hold")
    queue = _queue(run, slurm)
    if queue.answered and not queue.jobs:
        raise _over(run, slurm, "hold")
    if queue.only_waits:
        queue, answer = _hold_in_queue(run, slurm, queue, reason)
        if answer is not None:
            return answer
    standing = read_request(run.layout)
    if standing is not None and standing.kind == "hold":
        return _asked_already(run, standing, queue.job_id)
    if standing is not None and standing.kind == "stop-now":
        raise UsageError(
            f"run {_name(run)} was asked to stop at once by {standing.by}",
            hint=f"`hpctrain resume {run.run_id}` when it has stopped",
        )
    requeues = read_supervise_config(run.layout.supervise_config).continuation == "requeue"
    requests.ask(run, "hold", reason, queue.job_id)
    then = "it saves, leaves its nodes and waits in the queue, held"
    if not requeues:
        then = "it saves and stops, for its jobs are not requeued on this site"
    return _said(run, f"asked run {_name(run)} to hold", then, _HOW_TO_GO_ON, queue=queue)


def resume(
    run: RunFiles,
    slurm: SlurmClient,
    *,
    reason: str = "",
    acceptance: Acceptance | None = None,
) -> Answer:
    """Have a held, stopped or failed run go on; requests that nobody has followed are taken back.

    A held job is released, a run that is over is submitted again. `acceptance` is what a person
    accepts for it, which goes into the ledger first. Raises UsageError when the run is done or
    Slurm's administrators hold it, or when there is nothing to accept, SlurmUnreachableError
    without an answer of Slurm.
    """
    acceptance = acceptance or Acceptance()
    _refuse_if_done(run, "resume")
    queue = _queue(run, slurm)
    if not queue.answered:
        raise SlurmUnreachableError("Slurm does not say whether the run is held or has stopped")
    held = [job for job in queue.jobs if job.hold is not None]
    if queue.jobs and not held:
        _refuse_to_accept(run, acceptance)
        return _take_back(run, queue, reason)
    accepted = accept(run, acceptance, reason)
    requests.note(run, "resume", reason, queue.job_id)
    take_back(run.layout)
    if not queue.jobs:
        submitted = resubmit(run, slurm)
        words = f"resubmitted run {_name(run)} as job {submitted.job_id}"
        return Answer(run.run_id, _said(run, words, *accepted).words, job_id=submitted.job_id)
    for job in held:
        slurm.release(job.job_id)
    words = f"released run {_name(run)}: it waits for its turn"
    return _said(run, words, *accepted, queue=queue)


def save(run: RunFiles, slurm: SlurmClient, *, reason: str = "") -> Answer:
    """Have the run save a checkpoint at the next step boundary and go on.

    Raises UsageError when it does not run (then there is nothing newer to save), and when its
    engine cannot.
    """
    _refuse_if_done(run, "save")
    _refuse_if_only_by_steps(run)
    queue = _queue(run, slurm)
    if queue.answered and queue.active is None:
        newest = newest_checkpoint(run.layout)
        has = f"its newest checkpoint is step {newest:,}" if newest else "it has no checkpoint yet"
        where = "waits in the queue" if queue.jobs else "does not run"
        hint = "`hpctrain checkpoints` lists what there is"
        raise UsageError(f"run {_name(run)} {where}: {has}", hint=hint)
    if is_requested(run.layout, "save"):
        words = f"run {_name(run)} was asked to save already and has not begun to"
        return Answer(run.run_id, words, changed=False, job_id=queue.job_id)
    requests.ask(run, "save", reason, queue.job_id)
    asked = f"asked run {_name(run)} to save at the next step boundary"
    return _said(run, asked, queue=queue)


def _refuse_if_only_by_steps(run: RunFiles) -> None:
    """An external Megatron-LM knows its interval, and SIGTERM, after which it ends."""
    plan = known_plan(run.layout)
    if plan is not None and abilities_of(plan.engine).saves_by_steps_only:
        hint = "`hpctrain stop` has it save and leave, `hpctrain resume` goes on from there"
        raise UsageError(f"run {_name(run)} saves by steps: its engine is {plan.engine}", hint=hint)


def step_now(layout: RunLayout) -> int:
    """The newest step that anything says is done or saved: a save after it is a newer one."""
    progress = read_record(layout.progress, Progress)
    return max(newest_checkpoint(layout), progress.step if progress else 0)


def newest_checkpoint(layout: RunLayout) -> int:
    """The step of the newest published checkpoint, 0 if there is none."""
    return max(published_steps(layout.checkpoints), default=0)


def wait_for_save(
    run: RunFiles,
    slurm: SlurmClient,
    after_step: int,
    timeout_seconds: float | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait for a checkpoint newer than `after_step` (see `step_now`); returns its step.

    Raises RunFailedError when the run ends or is requeued without one, TimeoutError after
    `timeout_seconds`.
    """
    begun_at = asked_at = time.monotonic()
    while True:
        newest = newest_checkpoint(run.layout)
        if newest > after_step and not is_requested(run.layout, "save"):
            return newest
        now = time.monotonic()
        if timeout_seconds is not None and now - begun_at >= timeout_seconds:
            raise TimeoutError(f"run {run.run_id} has not saved within {timeout_seconds:.0f} s")
        if now - asked_at >= _ASK_SLURM_SECONDS:
            asked_at = now
            queue = _queue(run, slurm)
            if queue.answered and queue.active is None and newest <= after_step:
                raise RunFailedError(f"run {_name(run)} does not run any more and has not saved")
        sleep(0.5)


# -- parts of them -----------------------------------------------------------------------------

_HOW_TO_GO_ON = "`hpctrain resume` goes on"
_WITHOUT_SAVE = "it ends at once; steps since the newest checkpoint are lost"


def _refuse_if_done(run: RunFiles, verb: str) -> None:
    if run.layout.done.exists():
        raise UsageError(f"run {_name(run)} is done: there is nothing to {verb}")


def _refuse_to_accept(run: RunFiles, acceptance: Acceptance) -> None:
    if acceptance.anything:
        raise UsageError(
            f"run {_name(run)} has a job in the queue, which would go on as it is",
            hint=f"`hpctrain stop {run.run_id}` first",
        )


def _queue(run: RunFiles, slurm: SlurmClient) -> _Queue:
    """The run's jobs that have not ended, in one query; those that nobody has recorded are.

    Raises UsageError if they are on another cluster.
    """
    found = jobs_of(run, slurm)
    if found.unrecorded:
        with contextlib.suppress(PermissionError):  # a colleague's ledger: status finds them, too
            record_found(run, found)
    return _Queue(found.live, answered=found.answered)


def _name(run: RunFiles) -> str:
    return f"`{run.run_id}`"


def _said(run: RunFiles, *parts: str, queue: _Queue | None = None) -> Answer:
    if queue is not None and not queue.answered:
        parts = (*parts, "Slurm does not answer, so the request waits until the run sees it")
    words = "; ".join(parts)
    return Answer(run.run_id, words[0].upper() + words[1:], job_id=queue.job_id if queue else None)


def _asked_already(run: RunFiles, standing: Request, job_id: int | None) -> Answer:
    words = f"Run {_name(run)} was asked to {standing.kind} already by {standing.by}"
    return Answer(run.run_id, words, changed=False, job_id=job_id)


def _stopped_already(run: RunFiles, slurm: SlurmClient) -> Answer:
    row = statuses([run], slurm)[0]
    if row.state is not RunState.STOPPED:
        raise _over(run, slurm, "stop")
    return Answer(run.run_id, f"Run {_name(run)} has stopped already: {row.reason}", changed=False)


def _over(run: RunFiles, slurm: SlurmClient, verb: str) -> UsageError:
    row = statuses([run], slurm)[0]
    reason = f": {row.reason}" if row.reason else ""
    return UsageError(
        f"run {_name(run)} is {row.state}, so there is nothing to {verb}{reason}",
        hint=f"`hpctrain resume {run.run_id}` submits it again",
    )


def _take_out(run: RunFiles, slurm: SlurmClient, queue: _Queue) -> _Queue:
    """End the jobs that wait. A job that starts just now is left to its supervisor, which finds
    the request; so what is left in the queue is returned."""
    for job in queue.waiting:
        slurm.cancel_waiting(job.job_id)
    left = _queue(run, slurm)
    if left.answered and not left.jobs:
        words = "taken out of the queue on request"
        run.ledger.append(
            EventKind.ACTION,
            job_id=queue.job_id,
            action=ActionKind.STOP,
            exit_code=0,
            user=user_name(),
            reason=words,
        )
        take_back(run.layout)
    return left


def _hold_in_queue(
    run: RunFiles, slurm: SlurmClient, queue: _Queue, reason: str
) -> tuple[_Queue, Answer | None]:
    """Hold the jobs that wait. Slurm also "holds" one that has just started, without a word: that
    is undone, and the queue is returned without an answer."""
    free = [job for job in queue.waiting if job.hold is None]
    if not free:
        words = f"Run {_name(run)} is held already ({queue.waiting[0].reason})"
        return queue, Answer(run.run_id, words, changed=False, job_id=queue.job_id)
    requests.note(run, "hold", reason, queue.job_id)
    for job in free:
        slurm.hold(job.job_id)
    left = _queue(run, slurm)
    if left.active is not None:
        with contextlib.suppress(SlurmError):
            slurm.release(left.active.job_id)
        return left, None
    # Followed, and newer than a request to stop: neither is for the next attempt.
    take_back(run.layout, ("hold", "stop"))
    return left, _said(
        run, f"run {_name(run)} is held in the queue", "`hpctrain resume` releases it", queue=left
    )


def _take_back(run: RunFiles, queue: _Queue, reason: str) -> Answer:
    """The run is in the queue and not held: all there may be to do is to forget requests."""
    standing = read_request(run.layout)
    state = "running" if queue.active is not None else "waiting in the queue"
    if standing is None:
        words = f"Run {_name(run)} is {state} already"
        return Answer(run.run_id, words, changed=False, job_id=queue.job_id)
    requests.note(run, requests.TAKE_BACK, reason, queue.job_id)
    take_back(run.layout, ("stop", "stop-now", "hold"))
    again = "if it has begun to leave, resume it again when it has stopped"
    words = f"took back what {standing.by} asked for ({standing.kind})"
    return _said(run, words, again if queue.active is not None else f"the run is {state}")
