"""`goodput`: the account of one run, from its directory only.

Belongs here: from ledger, metrics and saves to the plain data that `telemetry` adds up, and the
document that comes out. Does not belong here: what a moment went into (`telemetry.timeline`), text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.run_documents import known_plan
from hpctrain.actions.runs import RunFiles
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.run_records import DoneMarker, read_metrics, read_record, read_saves
from hpctrain.store.supervise_config import known_supervise_config
from hpctrain.supervise.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.supervise.judge.documents import ActionKind
from hpctrain.telemetry.goodput import Account, account
from hpctrain.telemetry.rolling_goodput import RollingGoodput
from hpctrain.telemetry.timeline import Mark, MarkKind, Save, TrainedStep, timeline

_KINDS = {
    EventKind.SUBMITTED: MarkKind.SUBMITTED,
    EventKind.ADOPTED: MarkKind.SUBMITTED,
    EventKind.ATTEMPT_STARTED: MarkKind.ATTEMPT_STARTED,
    EventKind.ATTEMPT_LOST: MarkKind.ATTEMPT_LOST,
    EventKind.LAUNCH_STARTED: MarkKind.LAUNCH_STARTED,
    EventKind.LAUNCH_ENDED: MarkKind.LAUNCH_ENDED,
    EventKind.CANCEL_REQUESTED: MarkKind.CANCELLED,
    EventKind.CANCELLED: MarkKind.CANCELLED,
}
# A job that leaves a chain is followed by the next job of the chain, which waits in the queue.
_ACTIONS = {
    ActionKind.RELAUNCH: MarkKind.RELAUNCHING,
    ActionKind.REQUEUE: MarkKind.QUEUED,
    ActionKind.LEAVE: MarkKind.QUEUED,
    ActionKind.STOP: MarkKind.STOPPED,
    ActionKind.HOLD: MarkKind.STOPPED,
    ActionKind.FINISH: MarkKind.FINISHED,
}
_FAILURES = FAILURE_CAUSES | {Cause.SUPERVISOR_LOST}
_QUIET_SECONDS = 1800.0


class Loss(BaseModel):
    """What one cause has cost, in seconds by category and in all."""

    model_config = ConfigDict(frozen=True)

    cause: str
    ends: int
    lost_seconds: float
    lost_gpu_hours: float
    lost_steps: int
    seconds: dict[str, float]


class Windows(BaseModel):
    """Productive share of the last and the worst hour or day; None: the run is shorter."""

    model_config = ConfigDict(frozen=True)

    last: float | None
    worst: float | None


class Goodput(BaseModel):
    """The account of a run; `seconds` adds up to `wall_seconds`. Fields as in `Account`."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    over: bool
    gpus: int | None
    start_time: float
    wall_seconds: float
    seconds: dict[str, float]
    gpu_hours: float | None
    ettr: float | None
    ettr_without_queue: float | None
    hour: Windows
    day: Windows
    attempts: int
    launches: int
    failures: int
    mttf_seconds: float | None
    recovery_median_seconds: float | None
    recovery_mean_seconds: float | None
    kept_steps: int
    unsaved_steps: int
    lost_steps: int
    causes: tuple[Loss, ...]


def goodput(run: RunFiles, now: float | None = None) -> Goodput:
    """Account for a run up to `now` (default: the present), or up to its end.

    Reads the run directory only; what cannot be read is left out. Asks nobody.
    """
    layout = run.layout
    rows, saves = read_metrics(layout), read_saves(layout)
    steps = [TrainedStep(row.step, row.epoch, row.time, row.step_seconds) for row in rows]
    events = run.ledger.events()
    told = timeline(
        [mark for event in events if (mark := _mark(event)) is not None],
        steps,
        [Save(save.step, save.epoch, save.stall_seconds) for save in saves],
        time.time() if now is None else now,
        _quiet_seconds(run),
    )
    done = read_record(layout.done, DoneMarker)
    saved = max([save.step for save in saves] + ([done.step] if done else []), default=0)
    newest = steps[-1].step if steps else 0
    gpus = _gpus(run)
    over = done is not None or _is_over(events)
    return _document(run.run_id, over, gpus, account(told, gpus or 0), max(0, newest - saved))


def _mark(event: Event) -> Mark | None:
    """What the event means for the account; None: nothing."""
    kind = _KINDS.get(event.event)
    if event.event is EventKind.ACTION and event.action in tuple(ActionKind):
        kind = _ACTIONS[ActionKind(event.action)]
    if kind is None:
        return None
    attempt = (event.job_id, event.restart_count)
    failure = event.cause in _FAILURES
    return Mark(kind, event.time, attempt, event.epoch, event.cause, failure)


def _is_over(events: Sequence[Event]) -> bool:
    """The last word of the supervisor was a stop, and nobody has submitted the run since."""
    for event in reversed(events):
        if event.event in (EventKind.SUBMITTED, EventKind.ADOPTED, EventKind.ATTEMPT_STARTED):
            return False
        if event.event is EventKind.ACTION:
            return event.action in (ActionKind.STOP, ActionKind.HOLD, ActionKind.FINISH)
    return False


def _quiet_seconds(run: RunFiles) -> float:
    """How long the supervisor itself would wait for a sign of life."""
    config = known_supervise_config(run.layout.supervise_config)
    if config is None:
        return _QUIET_SECONDS
    return max(config.stall_seconds, config.setup_stall_seconds)


def _gpus(run: RunFiles) -> int | None:
    """GPUs that the run holds, spare nodes included; None when the plan cannot be read."""
    plan, config = known_plan(run.layout), known_supervise_config(run.layout.supervise_config)
    if plan is None or config is None:
        return None
    return (plan.nodes.nodes + config.spare_nodes) * plan.nodes.gpus_per_node


def _document(
    run_id: str, over: bool, gpus: int | None, told: Account, unsaved_steps: int
) -> Goodput:
    losses = tuple(
        Loss(
            cause=loss.cause,
            ends=loss.ends,
            lost_seconds=loss.lost_seconds,
            lost_gpu_hours=loss.lost_gpu_hours,
            lost_steps=loss.lost_steps,
            seconds={str(category): seconds for category, seconds in loss.seconds},
        )
        for loss in told.causes
    )
    return Goodput(
        run_id=run_id,
        over=over,
        gpus=gpus,
        start_time=told.start_time,
        wall_seconds=told.wall_seconds,
        seconds={str(category): seconds for category, seconds in told.seconds},
        gpu_hours=told.gpu_hours if gpus else None,
        ettr=told.ettr,
        ettr_without_queue=told.ettr_without_queue,
        hour=_windows(told.hour),
        day=_windows(told.day),
        attempts=told.attempts,
        launches=told.launches,
        failures=told.failures,
        mttf_seconds=told.mttf_seconds,
        recovery_median_seconds=told.recovery_median_seconds,
        recovery_mean_seconds=told.recovery_mean_seconds,
        kept_steps=told.kept_steps,
        unsaved_steps=unsaved_steps,
        lost_steps=told.lost_steps,
        causes=losses,
    )


def _windows(told: RollingGoodput) -> Windows:
    return Windows(last=told.last, worst=told.worst)
