"""Cut the wall time of a run into segments without gaps, by category and cause. Pure.

Segments follow each other and add up exactly (times are whole microseconds). Belongs here:
classifying time from the ledger's marks and the trainer's rows, repairing their clocks. Does not
belong here: sums and ratios (see `goodput`), reading files.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hpctrain.records.run_records import SaveRecord, StepMetrics
from hpctrain.records.step_times import StepTime

# -- Categories of wall time, and a segment of one category. Pure -------------------------------


class Category(StrEnum):
    """How wall time was spent."""

    PRODUCTIVE = "productive"  # steps that are in the final weights
    REDONE = "redone"  # steps that were lost and are trained again
    SAVING = "saving"  # training waits for a checkpoint
    BETWEEN = "between"  # otherwise between steps: evaluation, and the step in progress
    UNREPORTED = "unreported"  # a launch of a trainer that does not report its steps
    STARTING = "starting"  # from the start of an attempt or launch to its first step
    QUEUEING = "queueing"  # submitted or requeued, waiting for nodes
    DETECTING = "detecting"  # from the last observed progress to the verdict
    RESTARTING = "restarting"  # from the verdict to the next launch, or to the end of the attempt
    DOWN = "down"  # an attempt that was lost without a record
    HELD = "held"  # stopped or held on request


class Segment(NamedTuple):
    """From `start` to `end` (microseconds since the epoch).

    `cause`: the interruption that caused it; None for training and for the first start.
    """

    start: int
    end: int
    category: Category
    cause: str | None


# ----------------------------------------------------------------------------------------------


# -- Cut the time of one launch into start, steps, saves and end. Pure --------------------------


class StepTicks(NamedTuple):
    """One step: its end and length in ticks; `redone_by`: the epoch that trained it again."""

    step: int
    end: int
    length: int
    redone_by: int | None


@dataclass(frozen=True)
class LaunchSteps:
    """The trainer's records of one launch: its steps, and the stall after each saved one."""

    steps: tuple[StepTicks, ...] = ()
    stalls: dict[int, int] = field(default_factory=dict)


class Piece(NamedTuple):
    """A segment; for redone steps the cause is looked up later, by the epoch in `redone_by`."""

    start: int
    end: int
    category: Category
    cause: str | None
    redone_by: int | None


def cut_launch(
    launch: LaunchSteps, start: int, end: int, tail: Category, cause: str | None, before: str | None
) -> list[Piece]:
    """Return the pieces from `start` to `end`, in order and without gaps.

    `cause`: why the launch ended; `before`: why the previous one did; `tail`: the category after
    the last step. Steps outside of the launch are cut off: those of a trainer that outlived its
    launch take no time. A save's stall is taken from the gaps after its step, as far as they
    reach: a save in the background stops training at its start and at its end.
    """
    steps = [step for step in launch.steps if step.end - step.length < end]
    if not steps:
        if tail is Category.DOWN:
            return [Piece(start, end, tail, cause, None)]
        # A failed start is due to its own cause, a start in progress to the previous one.
        reason = before if tail is Category.BETWEEN else cause
        return [Piece(start, end, Category.STARTING, reason, None)]
    pieces, cursor, stall = [], start, 0
    for number, step in enumerate(steps):
        begin = max(step.end - step.length, cursor)
        stop = min(max(step.end, begin), end)
        if number == 0:
            pieces.append(Piece(cursor, begin, Category.STARTING, before, None))
        else:
            stall = _fill_gap(pieces, cursor, begin, stall, Category.BETWEEN, None)
        kind = Category.PRODUCTIVE if step.redone_by is None else Category.REDONE
        pieces.append(Piece(begin, stop, kind, None, step.redone_by))
        stall += launch.stalls.get(step.step, 0)
        cursor = stop
    _fill_gap(pieces, cursor, end, stall, tail, None if tail is Category.BETWEEN else cause)
    return pieces


def _fill_gap(
    pieces: list[Piece], start: int, end: int, stall: int, rest: Category, cause: str | None
) -> int:
    """Append up to `stall` ticks of saving, then `rest`; returns the stall that did not fit."""
    saved = min(stall, end - start)
    if saved:
        pieces.append(Piece(start, start + saved, Category.SAVING, None, None))
    if start + saved < end:
        pieces.append(Piece(start + saved, end, rest, cause, None))
    return stall - saved


# ----------------------------------------------------------------------------------------------


# A row of metrics, read as a whole or in part; `time` is the end of the step.
TrainedStep = StepTime | StepMetrics


class MarkKind(StrEnum):
    """Entries of the ledger that change the category of time."""

    SUBMITTED = "submitted"
    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_LOST = "attempt_lost"
    LAUNCH_STARTED = "launch_started"
    LAUNCH_ENDED = "launch_ended"
    RELAUNCHING = "relaunching"
    QUEUED = "queued"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FINISHED = "finished"


@dataclass(frozen=True)
class Mark:
    """One entry of a ledger; `time` in seconds since the epoch, `failure`: the cause is one.

    `resume_step`: the step of the checkpoint that a launch begins at, where that is known.
    """

    kind: MarkKind
    time: float
    attempt: tuple[int | None, int | None] = (None, None)
    epoch: int | None = None
    cause: str | None = None
    failure: bool = False
    resume_step: int | None = None


@dataclass(frozen=True)
class Timeline:
    """A run's segments, in order and without gaps, and how its launches ended.

    `resumed_at`: the step at which each launch began, where that is known. `reported`: False if
    nobody tells which steps the run has trained; then it has none here.
    """

    segments: tuple[Segment, ...]
    ends: tuple[tuple[str, bool], ...]
    attempts: int
    launches: int
    kept_steps: int
    lost_steps: tuple[tuple[str, int], ...]
    resumed_at: Mapping[int, int] = field(default_factory=dict)
    reported: bool = True


UNKNOWN_CAUSE = "unknown"
_QUIET_SECONDS = 1800.0


def timeline(
    marks: Sequence[Mark],
    steps: Sequence[TrainedStep],
    saves: Sequence[SaveRecord] = (),
    now: float = 0.0,
    quiet_seconds: float = _QUIET_SECONDS,
    *,
    reports_steps: bool = True,
) -> Timeline:
    """Cut the time from the first submission to `now`, or to the end of a run that is over.

    Marks and steps are in the order written. A launch without progress for `quiet_seconds` before
    `now` counts as down since then. A run that was never submitted has no segments. Unless a
    trainer `reports_steps`, nothing is known about a launch without any.
    """
    resumed_at = {
        mark.epoch: mark.resume_step
        for mark in marks
        if mark.epoch is not None and mark.resume_step is not None
    }
    redone_by = epochs_that_trained_again(steps, resumed_at)
    known = _with_missing_starts(marks, steps)
    times = non_decreasing_times([moment(mark.time) for mark in known])
    builder = _TimelineBuilder(
        _steps_by_launch(steps, redone_by, saves, resumed_at),
        quiet=ticks(quiet_seconds),
        reports_steps=reports_steps,
    )
    for mark, time in zip(known, times, strict=True):
        builder.take(mark, time)
    builder.close(max(ticks(now), times[-1] if times else 0))
    return builder.timeline(redone_by, steps_of_rows(steps, redone_by, resumed_at), resumed_at)


def epochs_that_trained_again(
    steps: Sequence[TrainedStep], resumed_at: Mapping[int, int]
) -> list[int | None]:
    """Return for each row the epoch that trained its step again; None: it is in the weights.

    A launch that trains step N replaces all steps of earlier launches from N on. `resumed_at`: the
    steps at which launches began, for a trainer whose first report is of a later step.
    """
    redone_by: list[int | None] = [None] * len(steps)
    kept: list[int] = []
    epoch = None
    for index in sorted(range(len(steps)), key=lambda i: steps[i].epoch):
        first = steps[index].step
        if steps[index].epoch != epoch:
            epoch = steps[index].epoch
            first = min(first, resumed_at.get(epoch, first) + 1)
        while kept and steps[kept[-1]].step >= first:
            redone_by[kept.pop()] = epoch
        kept.append(index)
    return redone_by


def steps_of_rows(
    steps: Sequence[TrainedStep], redone_by: Sequence[int | None], resumed_at: Mapping[int, int]
) -> list[int]:
    """Return how many steps each row counts for: one, unless a trainer reports some steps only.

    A row that counts has the steps since the one that counts before it. A row that was trained
    again has those since the row before it in its launch that are not in the weights. A launch of
    which is not known where it began has as many steps as rows.
    """
    counts = [1] * len(steps)
    newest: dict[int, int] = {}
    kept: int | None = None
    for index in sorted(range(len(steps)), key=lambda i: steps[i].epoch):
        row, again = steps[index], redone_by[index]
        begun = resumed_at.get(row.epoch)
        if begun is not None:
            before = newest.get(row.epoch, begun)
            if again is None and kept is not None:
                before = kept
            elif again is not None:
                before = max(before, resumed_at.get(again, before))
            counts[index] = max(1, row.step - before)
        newest[row.epoch] = row.step
        kept = row.step if again is None else kept
    return counts


def _steps_by_launch(
    steps: Sequence[TrainedStep],
    redone_by: Sequence[int | None],
    saves: Sequence[SaveRecord],
    resumed_at: Mapping[int, int],
) -> dict[int, LaunchSteps]:
    """Group the trainer's records by launch.

    A row takes the time of all steps since the one before it. Those of unknown time, before the
    first report of a launch, take as long as those of known time.
    """
    known = [row.step_seconds for row in steps if row.step_seconds is not None]
    usual = 0.0 if len(known) in (0, len(steps)) else statistics.median(known)
    indices: dict[int, list[int]] = defaultdict(list)
    stalls: dict[int, dict[int, int]] = defaultdict(dict)
    for index, step in enumerate(steps):
        indices[step.epoch].append(index)
    for save in saves:
        stalls[save.epoch][save.step] = max(0, ticks(save.stall_seconds or 0.0))
    launches = {}
    for epoch, of_launch in indices.items():
        times = non_decreasing_times([moment(steps[index].time) for index in of_launch])
        rows, before = [], resumed_at.get(epoch)  # of an unknown beginning: a step each
        for i, time in zip(of_launch, times, strict=True):
            row = steps[i]
            step_seconds = usual if row.step_seconds is None else row.step_seconds
            count = 1 if before is None else max(1, row.step - before)
            rows.append(
                StepTicks(row.step, time, max(0, ticks(step_seconds * count)), redone_by[i])
            )
            before = None if before is None else row.step
        launches[epoch] = LaunchSteps(tuple(rows), stalls[epoch])
    return launches


def _with_missing_starts(marks: Sequence[Mark], steps: Sequence[TrainedStep]) -> list[Mark]:
    """Insert a start for each launch whose own line in the ledger is damaged."""
    announced = {mark.epoch for mark in marks if mark.kind is MarkKind.LAUNCH_STARTED}
    first: dict[int, TrainedStep] = {}
    for step in steps:
        first.setdefault(step.epoch, step)
    known = list(marks)
    for epoch in sorted(first.keys() - announced):
        row = first[epoch]
        later = (i for i, m in enumerate(known) if m.epoch is not None and m.epoch >= epoch)
        start = Mark(MarkKind.LAUNCH_STARTED, row.time - (row.step_seconds or 0.0), epoch=epoch)
        known.insert(next(later, len(known)), start)
    return known


_CLOSES_ATTEMPT = {
    MarkKind.QUEUED: Category.QUEUEING,
    MarkKind.STOPPED: Category.HELD,
    MarkKind.FINISHED: None,
}
# Accepted from any attempt: the highest epoch owns the run, known attempt or not.
_FROM_ANY_ATTEMPT = (
    MarkKind.SUBMITTED,
    MarkKind.ATTEMPT_STARTED,
    MarkKind.LAUNCH_STARTED,
    MarkKind.CANCELLED,
)


@dataclass
class _TimelineBuilder:
    """State machine over marks in order; time before `since` has been classified."""

    steps_by_launch: dict[int, LaunchSteps]
    quiet: int
    reports_steps: bool = True
    pieces: list[Piece] = field(default_factory=list)
    ends: list[tuple[str, bool]] = field(default_factory=list)
    cause_before: dict[int, str | None] = field(default_factory=dict)
    since: int | None = None
    category: Category | None = None
    cause: str | None = None
    attempt: tuple[int | None, int | None] | None = None
    launched: int | None = None
    epoch: int = 0
    attempts: int = 0
    launches: int = 0

    def take(self, mark: Mark, time: int) -> None:
        """Process a mark, unless its launch was replaced or its attempt is over."""
        if mark.epoch is not None and mark.epoch < self.epoch:
            return
        from_any = mark.kind in _FROM_ANY_ATTEMPT or mark.attempt == (None, None)
        if not from_any and self.attempt not in (None, mark.attempt):
            return
        getattr(self, f"_on_{mark.kind}")(mark, time)

    # -- one method for each kind of mark, called by `take` --------------------------------------

    def _on_submitted(self, mark: Mark, time: int) -> None:
        if self.attempt is None and self.launched is None:
            self._switch(time, Category.QUEUEING)

    def _on_attempt_started(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DOWN, UNKNOWN_CAUSE)
        self._switch(time, Category.STARTING)
        self.attempt = mark.attempt
        self.attempts += 1

    def _on_attempt_lost(self, mark: Mark, time: int) -> None:
        cause = mark.cause or UNKNOWN_CAUSE
        if not self._end_launch(time, Category.DOWN, cause):
            self._switch(time, Category.DOWN)
        self._record_end(mark, cause)
        self.category, self.attempt = Category.DOWN, None

    def _on_launch_started(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DOWN, UNKNOWN_CAUSE)
        self._switch(time, Category.STARTING)
        self.epoch = mark.epoch if mark.epoch is not None else self.epoch + 1
        self.launched, self.attempt = time, mark.attempt
        self.cause_before[self.epoch] = self.cause
        self.launches += 1

    def _on_launch_ended(self, mark: Mark, time: int) -> None:
        cause = mark.cause or UNKNOWN_CAUSE
        self._end_launch(time, Category.DETECTING, cause)
        self._switch(time, Category.RESTARTING)
        self._record_end(mark, cause)

    def _on_relaunching(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DETECTING, UNKNOWN_CAUSE)
        self._switch(time, Category.RESTARTING)

    def _on_queued(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DETECTING, UNKNOWN_CAUSE)
        self._switch(time, _CLOSES_ATTEMPT[mark.kind])
        self.attempt = None

    _on_stopped = _on_finished = _on_queued

    def _on_cancelled(self, mark: Mark, time: int) -> None:
        """Ignore a cancellation during an attempt: its supervisor records how it ends."""
        if self.attempt is None and self.launched is None:
            self._switch(time, Category.HELD)

    # -- classifying time -------------------------------------------------------------------------

    def _switch(self, time: int, category: Category | None) -> None:
        """End the current category at `time` and begin `category`."""
        if self.since is not None and self.category is not None:
            self.pieces.append(Piece(self.since, time, self.category, self.cause, None))
        elif self.since is not None and time > self.since:
            self.pieces.append(Piece(self.since, time, Category.HELD, self.cause, None))
        self.since, self.category = time, category

    def _end_launch(self, time: int, tail: Category, cause: str) -> bool:
        """End the open launch, with `tail` after its last step; returns False if none is open."""
        if self.launched is None or self.since is None:
            return False
        launch = self.steps_by_launch.pop(self.epoch, LaunchSteps())
        if launch.steps or self.reports_steps or tail is Category.DOWN:
            self.pieces.extend(cut_launch(launch, self.since, time, tail, cause, self.cause))
        else:
            self.pieces.append(Piece(self.since, time, Category.UNREPORTED, None, None))
        self.since, self.category, self.launched = time, Category.DOWN, None
        self.cause = cause
        return True

    def _record_end(self, mark: Mark, cause: str) -> None:
        self.cause = cause
        self.ends.append((cause, mark.failure))

    def close(self, now: int) -> None:
        """Classify the time up to `now`, unless the run has finished or is stopped."""
        if self.since is None or self.category in (None, Category.HELD):
            return
        if self.launched is None:
            self._switch(max(now, self.since), self.category)
            return
        steps = self.steps_by_launch.get(self.epoch, LaunchSteps()).steps
        last_progress = max(self.since, steps[-1].end if steps else 0)
        is_quiet = now - last_progress > self.quiet and (steps or self.reports_steps)
        tail = Category.DOWN if is_quiet else Category.BETWEEN
        before = self.cause
        self._end_launch(max(now, self.since), tail, before or UNKNOWN_CAUSE)

    def timeline(
        self,
        redone_by: Sequence[int | None],
        counts: Sequence[int],
        resumed_at: Mapping[int, int],
    ) -> Timeline:
        """Return the result: no empty segments, neighbours of one kind merged."""
        segments: list[Segment] = []
        for start, end, category, cause, epoch in self.pieces:
            if end <= start:
                continue
            if epoch is not None:
                cause = self.cause_before.get(epoch) or UNKNOWN_CAUSE
            last = segments[-1] if segments else None
            if last is not None and (last.category, last.cause) == (category, cause):
                segments[-1] = last._replace(end=end)
            else:
                segments.append(Segment(start, end, category, cause))
        lost: dict[str, int] = defaultdict(int)
        kept_steps = 0
        for epoch, count in zip(redone_by, counts, strict=True):
            if epoch is None:
                kept_steps += count
            else:
                lost[self.cause_before.get(epoch) or UNKNOWN_CAUSE] += count
        return Timeline(
            segments=tuple(segments),
            ends=tuple(self.ends),
            attempts=self.attempts,
            launches=self.launches,
            kept_steps=kept_steps,
            lost_steps=tuple(sorted(lost.items())),
            resumed_at=resumed_at,
            reported=self.reports_steps or kept_steps > 0,
        )


# -- Repair timestamps that several machines wrote into one ordered log. Pure -------------------
# A later entry happened later, but its clock may have been set back or be wrong.


TICKS_PER_SECOND = 1_000_000
# A time beyond this (the year 33,658) is a damaged number.
_LATEST_SECONDS = 1e12


def ticks(seconds: float) -> int:
    """Convert to whole microseconds, which add up exactly; returns 0 for a damaged number."""
    if not math.isfinite(seconds) or abs(seconds) > _LATEST_SECONDS:
        return 0
    return round(seconds * TICKS_PER_SECOND)


def moment(time: float) -> int | None:
    """Convert seconds since the epoch to ticks; returns None for a damaged time."""
    return ticks(time) or None


def seconds(count: int) -> float:
    """Convert ticks to seconds."""
    return count / TICKS_PER_SECOND


def non_decreasing_times(times: Sequence[int | None]) -> list[int]:
    """Make times, in the order written, non-decreasing with as few changes as possible.

    The longest non-decreasing subsequence is kept (patience sorting: Fredman 1975, Discrete
    Mathematics 11, 29-35). Every other time becomes that of the kept one before it, or of the first
    kept one. So one wrong clock does not change the times of the others. None is never kept.
    """
    known = [(index, time) for index, time in enumerate(times) if time is not None]
    in_order = [time for _, time in known]
    if len(known) == len(times) and in_order == sorted(in_order):  # as nearly always
        return in_order
    kept = _longest_non_decreasing(in_order)
    trusted = dict(known[position] for position in kept)
    latest = known[kept[0]][1] if kept else 0
    result = []
    for index in range(len(times)):
        latest = trusted.get(index, latest)
        result.append(latest)
    return result


def _longest_non_decreasing(times: Sequence[int]) -> list[int]:
    """Return the positions of the longest non-decreasing subsequence."""
    lowest_end: list[int] = []
    positions: list[int] = []
    before: list[int] = []
    for index, time in enumerate(times):
        length = bisect.bisect_right(lowest_end, time)
        before.append(positions[length - 1] if length else -1)
        if length == len(lowest_end):
            lowest_end.append(time)
            positions.append(index)
        else:
            lowest_end[length], positions[length] = time, index
    chain, index = [], positions[-1] if positions else -1
    while index >= 0:
        chain.append(index)
        index = before[index]
    return chain[::-1]
