"""Account for the time of one run (`goodput`), from its directory only.

Belongs here: converting ledger, metrics and saves into the input of `telemetry`, and the text. Does
not belong here: assigning time to categories (`telemetry.timeline`), sums (`telemetry.goodput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.units import short_duration
from hpctrain.judge.attempts import marks_of
from hpctrain.page.text import columns_text, facts
from hpctrain.page.words import counted, words_of
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import (
    DoneMarker,
    SaveRecord,
    StepMetrics,
    read_record,
    read_saves,
)
from hpctrain.records.step_times import read_step_times
from hpctrain.records.supervise_config import SuperviseConfig, known_supervise_config
from hpctrain.runs.run_documents import AnyPlan, known_any_plan, reports_steps
from hpctrain.runs.state import waits_for_person
from hpctrain.telemetry.goodput import OF_STEPS, Goodput, account
from hpctrain.telemetry.timeline import Timeline, TrainedStep, timeline

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
        reports_steps=reports_steps(known_any_plan(layout)),
    )
    over = waits_for_person(events, done=layout.done.exists())
    return History(steps[-1].step if steps else 0, saves, cut, over)


def quiet_seconds_of(config: SuperviseConfig | None) -> float:
    """Return how long the supervisor itself waits for a sign of life."""
    if config is None:
        return _QUIET_SECONDS
    return max(config.stall_seconds, config.setup_stall_seconds)


def gpus_held(plan: AnyPlan | None, config: SuperviseConfig | None) -> int | None:
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
    plan, config = known_any_plan(layout), known_supervise_config(layout.supervise_config)
    done = read_record(layout.done, DoneMarker)
    saved = max([save.step for save in known.saves] + ([done.step] if done else []), default=0)
    return account(
        known.timeline,
        gpus_held(plan, config),
        run_id=run.run_id,
        over=known.over,
        unsaved_steps=max(0, known.newest_step - saved),
    )


# -- Formats where the time of a run went, in lines of at most 80 columns -----------------------


_BAR = 30
# In the order in which a run goes through them.
_LABELS = {
    "productive": "productive",
    "redone": "redone steps",
    "saving": "saving",
    "between": "between steps",
    "unreported": "not reported",
    "starting": "starting",
    "queueing": "queueing",
    "detecting": "detecting",
    "restarting": "restarting",
    "down": "down",
    "held": "held",
}

_UNREPORTED = "unreported"
_COLUMNS = ("CAUSE", "ENDS", "LOST", "GPU-HOURS", "STEPS", "MOSTLY")


def goodput_lines(goodput: Goodput) -> list[str]:
    """Format a heading, one bar for each category, ratios, and the cost of each cause."""
    wall = goodput.wall_seconds
    if wall <= 0:
        return [f"Run {goodput.run_id} has not been submitted: there is nothing to account for"]
    until = "to its end" if goodput.over else "so far"
    hours = "" if goodput.gpu_hours is None else f", {goodput.gpu_hours:,.1f} GPU-hours"
    gpus = "" if goodput.gpus is None else f" on {goodput.gpus:,} GPUs"
    steps = "its trainer does not report steps"
    if goodput.kept_steps is not None:
        steps = f"{goodput.kept_steps:,} steps kept, {goodput.lost_steps:,} lost and redone"
    unsaved = f", {goodput.unsaved_steps:,} not saved yet" if goodput.unsaved_steps else ""
    lines = [
        f"{goodput.run_id}: {short_duration(wall)} {until}{gpus}{hours}",
        f"{steps}{unsaved}; {counted(goodput.attempts, 'attempt')}, "
        f"{counted(goodput.launches, 'launch', 'launches')}",
        "",
    ]
    for name, label in _LABELS.items():
        spent = goodput.seconds[name]
        if not spent and (name in OF_STEPS if goodput.kept_steps is None else name == _UNREPORTED):
            continue
        visible = f"{spent / wall:.2%}" != f"{0:.2%}"  # as the column beside it
        filled = max(round(spent / wall * _BAR), 1) if visible else 0
        bar = f"{'#' * filled:<{_BAR}}"
        lines.append(f"{label:<14} {bar} {spent / wall:>7.2%}  {_time(spent):>10}".rstrip())
    lines += ["", *_ratios(goodput)]
    rows = [  # the most expensive first, with the largest category of each
        (
            words_of(loss.cause),
            f"{loss.ends:,}",
            _time(loss.lost_seconds),
            f"{loss.lost_gpu_hours:,.1f}",
            "-" if loss.lost_steps is None else f"{loss.lost_steps:,}",
            _LABELS[max(loss.seconds, key=loss.seconds.__getitem__)] if loss.seconds else "-",
        )
        for loss in goodput.causes
    ]
    if rows:
        lines += ["", *columns_text(_COLUMNS, rows, [False, True, True, True, True, False])]
    return lines


def _ratios(goodput: Goodput) -> list[str]:
    queue = (
        f"{_percent(goodput.ettr)} with the queue, {_percent(goodput.ettr_without_queue)} without"
    )
    windows = ", ".join(
        f"last {name} {_percent(window.last)} (worst {_percent(window.worst)})"
        for name, window in (("hour", goodput.hour), ("day", goodput.day))
        if window.last is not None
    )
    failures = counted(goodput.failures, "failure") if goodput.failures else "none"
    mttf = f", one per {short_duration(goodput.mttf_seconds)}" if goodput.mttf_seconds else ""
    recovery = None
    if goodput.recovery_median_seconds is not None and goodput.recovery_mean_seconds is not None:
        median = short_duration(goodput.recovery_median_seconds)
        mean = short_duration(goodput.recovery_mean_seconds)
        recovery = f"median {median}, mean {mean}, from the last sign to a new step"
    return facts(
        ("ETTR", queue),
        ("Windows", windows),
        ("Failures", f"{failures}{mttf}"),
        ("Recovery", recovery),
    )


def _time(seconds: float) -> str:
    return short_duration(seconds) if seconds > 0 else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
