"""Compute goodput: how a run spent its wall time, in all and in windows, losses by cause. Pure.

Effective training time ratio (ETTR) after Kokolis et al. 2024, arXiv 2410.21680, section II: the
productive time over the time in which the run had nodes or waited in the queue for them. Time in
which the run was held or stopped counts in neither. Belongs here: sums and ratios of segments. Does
not belong here: classifying time (see `timeline`), text.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pydantic import BaseModel, ConfigDict

from hpctrain.records.step_times import StepTime
from hpctrain.telemetry.timeline import (
    Category,
    Mark,
    MarkKind,
    Segment,
    Timeline,
    epochs_that_trained_again,
    moment,
    non_decreasing_times,
    seconds,
    steps_of_rows,
    ticks,
)

# -- Compute the productive share of a run in rolling windows: the last and the worst. Pure -----
# After ByteRobust (arXiv 2509.16293), which reports the ratio of the last hour beside that of the
# whole run: the whole-run average of a long run hides one bad day.


_MOVES_PER_WINDOW = 60
# With more moves (for windows of an hour: ten weeks) the window moves in larger steps.
_MOST_MOVES = 100_000


class RollingGoodput(BaseModel):
    """Productive share of the last and of the worst window; None for a run shorter than one."""

    model_config = ConfigDict(frozen=True)

    last: float | None
    worst: float | None


def rolling_goodput(segments: Sequence[Segment], window_seconds: float) -> RollingGoodput:
    """Compute the shares for windows of that length which lie inside the run.

    The window moves by a sixtieth of its length, so `worst` is within 1/60 of the true minimum.
    """
    window = ticks(window_seconds)
    if not segments or segments[-1].end - segments[0].start < window:
        return RollingGoodput(last=None, worst=None)
    starts = [segment.start for segment in segments]
    lengths = (s.end - s.start if s.category is Category.PRODUCTIVE else 0 for s in segments)
    productive = [0, *accumulate(lengths)]

    def before(moment: int) -> int:
        """Return the productive ticks before `moment`, which lies inside the run."""
        index = bisect.bisect_right(starts, moment) - 1
        segment = segments[index]
        inside = moment - segment.start if segment.category is Category.PRODUCTIVE else 0
        return productive[index] + inside

    first, last = segments[0].start + window, segments[-1].end
    move = max(1, window // _MOVES_PER_WINDOW, (last - first) // _MOST_MOVES)
    ends = (*range(first, last, move), last)
    shares = [(before(end) - before(end - window)) / window for end in ends]
    return RollingGoodput(last=shares[-1], worst=min(shares))


# ----------------------------------------------------------------------------------------------


FIRST_START = "first start"
# Time with allocated nodes; queueing, held and down cost no GPU-hours of the run.
OCCUPYING = frozenset(
    {
        Category.PRODUCTIVE,
        Category.REDONE,
        Category.SAVING,
        Category.BETWEEN,
        Category.UNREPORTED,
        Category.STARTING,
        Category.DETECTING,
        Category.RESTARTING,
    }
)
# What nobody knows where steps are not reported.
OF_STEPS = frozenset({Category.PRODUCTIVE, Category.REDONE, Category.SAVING, Category.BETWEEN})
_ALIVE = OCCUPYING - {Category.DETECTING, Category.RESTARTING}
_STEPPING = frozenset({Category.PRODUCTIVE, Category.REDONE})
_TRAINING = _STEPPING | {Category.SAVING, Category.BETWEEN, Category.UNREPORTED}
_HOUR_SECONDS, _DAY_SECONDS = 3600, 86400


class LossByCause(BaseModel):
    """The cost of one cause: launches and attempts ended, seconds in all and by category, steps.

    `lost_steps`: None where the trainer does not report its steps.
    """

    model_config = ConfigDict(frozen=True)

    cause: str
    ends: int
    lost_seconds: float
    lost_gpu_hours: float
    lost_steps: int | None
    seconds: dict[str, float]


class Goodput(BaseModel):
    """How a run spent its wall time; times in seconds, ratios from 0 to 1, None: unknown.

    `seconds` has every category and adds up to `wall_seconds`. `ettr` includes the queue, as it is
    defined. `recovery` lasts from the last observed progress to the first new step. Where a trainer
    has not reported its steps, nothing is known of them, nor what of its time was productive.
    """

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
    hour: RollingGoodput
    day: RollingGoodput
    attempts: int
    launches: int
    failures: int
    mttf_seconds: float | None
    recovery_median_seconds: float | None
    recovery_mean_seconds: float | None
    kept_steps: int | None
    unsaved_steps: int | None
    lost_steps: int | None
    causes: tuple[LossByCause, ...]


def account(
    timeline: Timeline,
    gpus: int | None,
    *,
    run_id: str = "",
    over: bool = False,
    unsaved_steps: int = 0,
) -> Goodput:
    """Sum up the timeline of a run that has `gpus` GPUs while it has nodes (spares included)."""
    segments = timeline.segments
    spent: Counter[Category] = Counter()  # in ticks
    for segment in segments:
        spent[segment.category] += segment.end - segment.start
    wall = segments[-1].end - segments[0].start if segments else 0
    wanted = wall - spent[Category.HELD]
    productive = spent[Category.PRODUCTIVE]
    failures = sum(failure for _, failure in timeline.ends)
    alive = sum(spent[category] for category in _ALIVE)
    occupied = sum(spent[category] for category in OCCUPYING)
    recoveries = _recoveries(segments)
    is_known = not spent[Category.UNREPORTED]
    unknown = RollingGoodput(last=None, worst=None)
    return Goodput(
        run_id=run_id,
        over=over,
        gpus=gpus,
        start_time=seconds(segments[0].start) if segments else 0.0,
        wall_seconds=seconds(wall),
        seconds={str(category): seconds(spent[category]) for category in Category},
        gpu_hours=gpus * seconds(occupied) / _HOUR_SECONDS if gpus else None,
        ettr=_ratio(productive, wanted) if is_known else None,
        ettr_without_queue=(
            _ratio(productive, wanted - spent[Category.QUEUEING]) if is_known else None
        ),
        hour=rolling_goodput(segments, _HOUR_SECONDS) if is_known else unknown,
        day=rolling_goodput(segments, _DAY_SECONDS) if is_known else unknown,
        attempts=timeline.attempts,
        launches=timeline.launches,
        failures=failures,
        mttf_seconds=seconds(alive) / failures if failures else None,
        recovery_median_seconds=statistics.median(recoveries) if recoveries else None,
        recovery_mean_seconds=statistics.fmean(recoveries) if recoveries else None,
        kept_steps=timeline.kept_steps if timeline.reported else None,
        unsaved_steps=unsaved_steps if timeline.reported else None,
        lost_steps=sum(n for _, n in timeline.lost_steps) if timeline.reported else None,
        causes=_losses_by_cause(timeline, gpus or 0),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _losses_by_cause(timeline: Timeline, gpus: int) -> tuple[LossByCause, ...]:
    """Sum up losses per cause, the largest first; steps and saves without a cause are excluded."""
    spent: dict[str, Counter[Category]] = defaultdict(Counter)
    for segment in timeline.segments:
        if segment.cause is not None or segment.category not in _TRAINING:
            cause = segment.cause or FIRST_START
            spent[cause][segment.category] += segment.end - segment.start
    ends, lost_steps = Counter(cause for cause, _ in timeline.ends), dict(timeline.lost_steps)
    losses = []
    for cause in spent.keys() | ends.keys() | lost_steps.keys():
        lost = spent[cause]
        wasted = sum(count for category, count in lost.items() if category is not Category.HELD)
        occupied = sum(count for category, count in lost.items() if category in OCCUPYING)
        losses.append(
            LossByCause(
                cause=cause,
                ends=ends[cause],
                lost_seconds=seconds(wasted),
                lost_gpu_hours=gpus * seconds(occupied) / _HOUR_SECONDS,
                lost_steps=lost_steps.get(cause, 0) if timeline.reported else None,
                seconds={str(c): seconds(lost[c]) for c in Category if lost[c]},
            )
        )
    return tuple(sorted(losses, key=lambda loss: (-loss.lost_seconds, loss.cause)))


def _recoveries(segments: Sequence[Segment]) -> list[float]:
    """List the seconds of each interruption, from the last progress to the first new step.

    Interruptions during which the run was held or stopped are excluded.
    """
    durations: list[float] = []
    since, trained, held = None, False, False
    for segment in segments:
        if segment.category in _STEPPING:
            if since is not None and not held:
                durations.append(seconds(segment.start - since))
            since, trained, held = None, True, False
        elif segment.category not in _TRAINING and trained:
            since = segment.start if since is None else since
            held = held or segment.category is Category.HELD
    return durations


# ----------------------------------------------------------------------------------------------
# Account for the time, steps and tokens of a run in windows of wall time that follow each other.
# Pure.
# Segments are clipped in whole microseconds, so that the accounts of neighbouring windows add up to
# the account of both.


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
    kept, redone, trained = _counted_steps(steps, bounds, timeline.resumed_at)
    return tuple(
        WindowAccount(begin, end, dict(of_window), kept[number], redone[number], trained[number])
        for number, (begin, end, of_window) in enumerate(
            zip(bounds[:-1], bounds[1:], spent, strict=True)
        )
    )


def _counted_steps(
    steps: Sequence[StepTime], bounds: Sequence[int], resumed_at: Mapping[int, int]
) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """Count by window: steps that are kept, steps that were redone, tokens of kept steps."""
    kept: Counter[int] = Counter()
    redone: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    by_launch: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        by_launch[step.epoch].append(index)
    again = epochs_that_trained_again(steps, resumed_at)
    counts = steps_of_rows(steps, again, resumed_at)
    for indices in by_launch.values():
        ends = non_decreasing_times([moment(steps[index].time) for index in indices])
        for index, end in zip(indices, ends, strict=True):
            window = bisect.bisect_right(bounds, end) - 1
            if not 0 <= window < len(bounds) - 1:
                continue
            if again[index] is None:
                kept[window] += counts[index]
                trained[window] += (steps[index].tokens or 0) * counts[index]
            else:
                redone[window] += counts[index]
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


# -- Count the time in which a replica computes requests as productive. Pure --------------------
# The account of a run knows steps; a replica has none, so that all of its launches would be starts.


def with_work(timeline: Timeline, working: Sequence[tuple[float, float]]) -> Timeline:
    """Make productive what a replica has held GPUs for while it worked.

    `working`: intervals in seconds since the epoch, in order and without overlap.
    """
    windows = [(ticks(begin), ticks(end)) for begin, end in working]
    segments: list[Segment] = []
    for segment in timeline.segments:
        left = segment
        if segment.category in OCCUPYING:
            for begin, end in windows:
                first, last = max(left.start, begin), min(left.end, end)
                if first >= last:
                    continue
                if left.start < first:
                    segments.append(left._replace(end=first))
                segments.append(Segment(first, last, Category.PRODUCTIVE, None))
                left = left._replace(start=last)
        if left.start < left.end:
            segments.append(left)
    return replace(timeline, segments=tuple(segments))
