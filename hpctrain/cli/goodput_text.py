"""The account of a run in lines of at most 80 columns.

Belongs here: bars and words. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.actions.goodput import Goodput, Loss
from hpctrain.units import short_duration

_BAR = 30
# In the order in which a run goes through them.
_WORDS = {
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


def goodput_lines(told: Goodput) -> list[str]:
    """A heading, one bar for each category, ratios, and what each cause has cost."""
    if told.wall_seconds <= 0:
        return [f"Run {told.run_id} has not been submitted: there is nothing to account for"]
    return [
        *_heading(told),
        "",
        *(_bar(_WORDS[name], told.seconds[name], told.wall_seconds) for name in _WORDS),
        "",
        *_ratios(told),
        *(["", *_causes(told)] if told.causes else []),
    ]


def _heading(told: Goodput) -> list[str]:
    until = "to its end" if told.over else "so far"
    hours = "" if told.gpu_hours is None else f", {told.gpu_hours:,.1f} GPU-hours"
    gpus = "" if told.gpus is None else f" on {told.gpus:,} GPUs"
    steps = f"{told.kept_steps:,} steps kept, {told.lost_steps:,} lost and redone"
    unsaved = f", {told.unsaved_steps:,} not saved yet" if told.unsaved_steps else ""
    return [
        f"{told.run_id}: {short_duration(told.wall_seconds)} {until}{gpus}{hours}",
        f"{steps}{unsaved}; {told.attempts} attempts, {told.launches} launches",
    ]


def _bar(word: str, spent: float, wall: float) -> str:
    share = spent / wall
    filled = round(share * _BAR)
    # What there is at all is to be seen.
    filled = max(filled, 1) if spent > 0 else 0
    bar = f"{'#' * filled:<{_BAR}}"
    return f"{word:<14} {bar} {share:>7.2%}  {_time(spent):>10}".rstrip()


def _ratios(told: Goodput) -> list[str]:
    queue = f"{_percent(told.ettr)} with the queue, {_percent(told.ettr_without_queue)} without"
    windows = ", ".join(
        f"last {name} {_percent(window.last)} (worst {_percent(window.worst)})"
        for name, window in (("hour", told.hour), ("day", told.day))
        if window.last is not None
    )
    lines = [f"ETTR      {queue}"]
    lines += [f"Windows   {windows}"] if windows else []
    failures = f"{told.failures} failure{'' if told.failures == 1 else 's'}"
    mttf = f", one per {short_duration(told.mttf_seconds)}" if told.mttf_seconds else ""
    lines.append(f"Failures  {failures}{mttf}")
    if told.recovery_median_seconds is not None and told.recovery_mean_seconds is not None:
        median = short_duration(told.recovery_median_seconds)
        mean = short_duration(told.recovery_mean_seconds)
        lines.append(f"Recovery  median {median}, mean {mean}, from the last sign to a new step")
    return lines


_COLUMNS: tuple[tuple[str, Callable[[Loss], str]], ...] = (
    ("ENDS", lambda loss: f"{loss.ends:,}"),
    ("LOST", lambda loss: _time(loss.lost_seconds)),
    ("GPU-HOURS", lambda loss: f"{loss.lost_gpu_hours:,.1f}"),
    ("STEPS", lambda loss: f"{loss.lost_steps:,}"),
)


def _causes(told: Goodput) -> list[str]:
    """One row for each cause, the dearest first; the last column says what most of it was."""
    widths = [6, 10, 12, 8]
    heads = "".join(f"{head:>{w}}" for (head, _), w in zip(_COLUMNS, widths, strict=True))
    lines = [f"{'CAUSE':<18}{heads}  MOSTLY"]
    for loss in told.causes:
        cells = "".join(f"{cell(loss):>{w}}" for (_, cell), w in zip(_COLUMNS, widths, strict=True))
        lines.append(f"{loss.cause.replace('_', ' '):<18}{cells}  {_mostly(loss)}")
    return [line.rstrip() for line in lines]


def _mostly(loss: Loss) -> str:
    return _WORDS[max(loss.seconds, key=lambda name: loss.seconds[name])] if loss.seconds else "-"


def _time(seconds: float) -> str:
    return short_duration(seconds) if seconds > 0 else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
