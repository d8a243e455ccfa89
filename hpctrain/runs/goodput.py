"""Account for the time of one run (`goodput`), from its directory only.

Belongs here: converting ledger, metrics and saves into the input of `telemetry`. Does not belong
here: assigning time to categories (`telemetry.timeline`), sums (`telemetry.goodput`), text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.plan.documents import Plan
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import (
    DoneMarker,
    SaveRecord,
    StepMetrics,
    read_record,
    read_saves,
)
from hpctrain.records.step_times import read_step_times
from hpctrain.records.supervise_config import SuperviseConfig, known_supervise_config
from hpctrain.runs.run_documents import known_plan
from hpctrain.runs.state import waits_for_person
from hpctrain.telemetry.goodput import Goodput, account
from hpctrain.telemetry.timeline import Mark, MarkKind, Timeline, TrainedStep, timeline

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


@dataclass(frozen=True)
class History:
    """What a run has recorded about its time, and how it was spent.

    `newest_step` is that of the last row of metrics, 0 before there is one.
    """

    newest_step: int
    saves: list[SaveRecord]
    timeline: Timeline
    over: bool


def read_history(
    run: RunFiles,
    now: float | None = None,
    rows: Sequence[StepMetrics] | None = None,
    events: Sequence[Event] | None = None,
) -> History:
    """Read a run's records and cut its time up to `now` (default: the present) or to its end.

    `rows`, `events`: its metrics and its ledger, where they have been read already.
    """
    layout, events = run.layout, run.ledger.events() if events is None else events
    saves = read_saves(layout)
    steps: Sequence[TrainedStep] = read_step_times(layout) if rows is None else rows
    cut = timeline(
        marks_of(events),
        steps,
        saves,
        clock.now() if now is None else now,
        quiet_seconds_of(known_supervise_config(layout.supervise_config)),
    )
    over = waits_for_person(events, done=layout.done.exists())
    return History(steps[-1].step if steps else 0, saves, cut, over)


def marks_of(events: Sequence[Event]) -> list[Mark]:
    """List the events of a ledger that change the category of time."""
    marks = []
    for event in events:
        kind = _KINDS.get(event.event)
        if event.event is EventKind.ACTION and event.action in tuple(ActionKind):
            kind = _ACTIONS[ActionKind(event.action)]
        if kind is not None:
            attempt, failure = (event.job_id, event.restart_count), event.cause in _FAILURES
            marks.append(Mark(kind, event.time, attempt, event.epoch, event.cause, failure))
    return marks


def quiet_seconds_of(config: SuperviseConfig | None) -> float:
    """Return how long the supervisor itself waits for a sign of life."""
    if config is None:
        return _QUIET_SECONDS
    return max(config.stall_seconds, config.setup_stall_seconds)


def gpus_held(plan: Plan | None, config: SuperviseConfig | None) -> int | None:
    """Return the GPUs that a run has while it has nodes, spare nodes included; None: unknown."""
    if plan is None or config is None:
        return None
    return (plan.nodes.nodes + config.spare_nodes) * plan.nodes.gpus_per_node


def goodput(run: RunFiles, now: float | None = None, history: History | None = None) -> Goodput:
    """Account for a run up to `now` (default: the present), or up to its end.

    Reads the run directory only; what cannot be read is left out. `history`: what was read of it
    already.
    """
    layout = run.layout
    known = read_history(run, now) if history is None else history
    plan, config = known_plan(layout), known_supervise_config(layout.supervise_config)
    done = read_record(layout.done, DoneMarker)
    saved = max([save.step for save in known.saves] + ([done.step] if done else []), default=0)
    return account(
        known.timeline,
        gpus_held(plan, config),
        run_id=run.run_id,
        over=known.over,
        unsaved_steps=max(0, known.newest_step - saved),
    )
