"""Formats where the time of a run went, in lines of at most 80 columns.

Belongs here: bars and labels. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpctrain.base.units import short_duration
from hpctrain.page.words import counted
from hpctrain.telemetry.goodput import Goodput, LossByCause

_BAR = 30
# In the order in which a run goes through them.
_LABELS = {
    "productive": "productive",
    "redone": "redone steps",
    "saving": "saving",
    "between": "between steps",
    "starting": "starting",
    "queueing": "queueing",
    "detecting": "detecting",
    "restarting": "restarting",
    "down": "down",
    "held": "held",
}

# Heading, width and cell of the columns about a cause.
_COLUMNS: tuple[tuple[str, int, Callable[[LossByCause], str]], ...] = (
    ("ENDS", 6, lambda loss: f"{loss.ends:,}"),
    ("LOST", 10, lambda loss: _time(loss.lost_seconds)),
    ("GPU-HOURS", 12, lambda loss: f"{loss.lost_gpu_hours:,.1f}"),
    ("STEPS", 8, lambda loss: f"{loss.lost_steps:,}"),
)


def goodput_lines(goodput: Goodput) -> list[str]:
    """Format a heading, one bar for each category, ratios, and the cost of each cause."""
    wall = goodput.wall_seconds
    if wall <= 0:
        return [f"Run {goodput.run_id} has not been submitted: there is nothing to account for"]
    until = "to its end" if goodput.over else "so far"
    hours = "" if goodput.gpu_hours is None else f", {goodput.gpu_hours:,.1f} GPU-hours"
    gpus = "" if goodput.gpus is None else f" on {goodput.gpus:,} GPUs"
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
        visible = f"{spent / wall:.2%}" != f"{0:.2%}"  # as the column beside it
        filled = max(round(spent / wall * _BAR), 1) if visible else 0
        bar = f"{'#' * filled:<{_BAR}}"
        lines.append(f"{label:<14} {bar} {spent / wall:>7.2%}  {_time(spent):>10}".rstrip())
    lines += ["", *_ratios(goodput)]
    if goodput.causes:  # the most expensive first, with the largest category of each
        lines += ["", _row("CAUSE", (head for head, _, _ in _COLUMNS), "MOSTLY")]
    for loss in goodput.causes:
        mostly = _LABELS[max(loss.seconds, key=loss.seconds.__getitem__)] if loss.seconds else "-"
        cells = (cell(loss) for _, _, cell in _COLUMNS)
        lines.append(_row(loss.cause.replace("_", " "), cells, mostly))
    return lines


def _row(cause: str, cells: Iterable[str], mostly: str) -> str:
    padded = (f"{cell:>{width}}" for cell, (_, width, _) in zip(cells, _COLUMNS, strict=True))
    return f"{cause:<18}{''.join(padded)}  {mostly}".rstrip()


def _ratios(goodput: Goodput) -> list[str]:
    queue = (
        f"{_percent(goodput.ettr)} with the queue, {_percent(goodput.ettr_without_queue)} without"
    )
    windows = ", ".join(
        f"last {name} {_percent(window.last)} (worst {_percent(window.worst)})"
        for name, window in (("hour", goodput.hour), ("day", goodput.day))
        if window.last is not None
    )
    lines = [f"ETTR      {queue}"]
    lines += [f"Windows   {windows}"] if windows else []
    failures = counted(goodput.failures, "failure") if goodput.failures else "none"
    mttf = f", one per {short_duration(goodput.mttf_seconds)}" if goodput.mttf_seconds else ""
    lines.append(f"Failures  {failures}{mttf}")
    if goodput.recovery_median_seconds is not None and goodput.recovery_mean_seconds is not None:
        median = short_duration(goodput.recovery_median_seconds)
        mean = short_duration(goodput.recovery_mean_seconds)
        lines.append(f"Recovery  median {median}, mean {mean}, from the last sign to a new step")
    return lines


def _time(seconds: float) -> str:
    return short_duration(seconds) if seconds > 0 else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
