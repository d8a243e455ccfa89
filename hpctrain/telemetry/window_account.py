"""Account for the time, steps and tokens of a run in windows of wall time that follow each other.
Pure.

Segments are clipped in whole microseconds, so that the accounts of neighbouring windows add up to
the account of both. Belongs here: clipping and counting. Does not belong here: classifying time
(see `timeline`), GPUs and money.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.records.step_times import StepTime
from hpctrain.telemetry.clock_repair import moment, non_decreasing_times, seconds
from hpctrain.telemetry.time_categories import Category
from hpctrain.telemetry.timeline import (
    Mark,
    MarkKind,
    Timeline,
    epochs_that_trained_again,
)

SpentTicks = dict[tuple[Category, str | None], int]


@dataclass(frozen=True)
class WindowAccount:
    """How a run spent one window, from `begin` up to `end` (microseconds since the epoch).

    `spent`: microseconds by category and cause; None: no interruption has caused it. A step counts
    in the window in which it ended: in `kept_steps` and `tokens` if it is in the final weights,
    in `redone_steps` if it was lost and trained again.
    """

    begin: int
    end: int
    spent: SpentTicks
    kept_steps: int
    redone_steps: int
    tokens: int


def window_accounts(
    timeline: Timeline, steps: Sequence[StepTime], bounds: Sequence[int]
) -> tuple[WindowAccount, ...]:
    """Account for the windows between neighbouring `bounds`, which are in ascending order.

    What lies outside of the bounds counts in no window.
    """
    spent: list[SpentTicks] = [defaultdict(int) for _ in bounds[1:]]
    for segment in timeline.segments:
        number = max(0, bisect.bisect_right(bounds, segment.start) - 1)
        while number < len(spent) and bounds[number] < segment.end:
            begin, end = max(segment.start, bounds[number]), min(segment.end, bounds[number + 1])
            if end > begin:
                spent[number][segment.category, segment.cause] += end - begin
            number += 1
    kept, redone, trained = _counted_steps(steps, bounds)
    return tuple(
        WindowAccount(begin, end, dict(of_window), kept[number], redone[number], trained[number])
        for number, (begin, end, of_window) in enumerate(
            zip(bounds[:-1], bounds[1:], spent, strict=True)
        )
    )


def _counted_steps(
    steps: Sequence[StepTime], bounds: Sequence[int]
) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """Count by window: steps that are kept, steps that were redone, tokens of kept steps."""
    kept: Counter[int] = Counter()
    redone: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    by_launch: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        by_launch[step.epoch].append(index)
    again = epochs_that_trained_again(steps)
    for indices in by_launch.values():
        ends = non_decreasing_times([moment(steps[index].time) for index in indices])
        for index, end in zip(indices, ends, strict=True):
            window = bisect.bisect_right(bounds, end) - 1
            if not 0 <= window < len(bounds) - 1:
                continue
            if again[index] is None:
                kept[window] += 1
                trained[window] += steps[index].tokens
            else:
                redone[window] += 1
    return kept, redone, trained


def needless_epochs(marks: Sequence[Mark], steps: Sequence[StepTime], begin: int) -> frozenset[int]:
    """Return the launches whose steps have no part in any window that begins at `begin` or later.

    They began before a launch that began before the window, so they had ended, and so had all
    launches before them. A launch is needed if its trainer outlived it and has left steps in the
    window, and so are later ones, which may have replaced these steps.
    """
    times = non_decreasing_times([moment(mark.time) for mark in marks])
    begun = [
        mark.epoch
        for mark, time in zip(marks, times, strict=True)
        if mark.kind is MarkKind.LAUNCH_STARTED and mark.epoch is not None and time <= begin
    ]
    owner = max(begun, default=0)
    ended = {epoch for epoch in begun if epoch < owner}
    begin_seconds = seconds(begin)
    needed = {
        step.epoch for step in steps if step.epoch not in ended or not step.time < begin_seconds
    }
    oldest = min(needed, default=owner)
    return frozenset(epoch for epoch in ended if epoch < oldest)
