"""What every moment of a run went into: the run's wall time, cut into segments without gaps. Pure.

Segments follow each other and add up exactly (times are whole microseconds). Belongs here: which
moment belongs to what, from the ledger's marks and the trainer's rows. Does not belong here: sums
and ratios (`goodput`), reading files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hpctrain.telemetry.clocks import agreeing, moment, ticks
from hpctrain.telemetry.launch_body import Body, Piece, Row, cut_body
from hpctrain.telemetry.segments import Category, Segment


class MarkKind(StrEnum):
    """What the ledger says that changes what time goes into."""

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
    """One entry of a ledger; `time` in seconds since the epoch, `failure`: the cause is one."""

    kind: MarkKind
    time: float
    attempt: tuple[int | None, int | None] = (None, None)
    epoch: int | None = None
    cause: str | None = None
    failure: bool = False


@dataclass(frozen=True)
class Step:
    """One row of metrics; `time` is the end of the step, in seconds since the epoch."""

    step: int
    epoch: int
    time: float
    step_seconds: float


@dataclass(frozen=True)
class Save:
    """What one checkpoint cost: training stood still for `stall_seconds` after `step`."""

    step: int
    epoch: int
    stall_seconds: float


@dataclass(frozen=True)
class Timeline:
    """A run's segments, in order and without gaps, and how its launches ended."""

    segments: tuple[Segment, ...]
    ends: tuple[tuple[str, bool], ...]
    attempts: int
    launches: int
    kept_steps: int
    lost_steps: tuple[tuple[str, int], ...]


UNKNOWN_CAUSE = "unknown"
_QUIET_SECONDS = 1800.0


def timeline(
    marks: Sequence[Mark],
    steps: Sequence[Step],
    saves: Sequence[Save] = (),
    now: float = 0.0,
    quiet_seconds: float = _QUIET_SECONDS,
) -> Timeline:
    """Cut the time from the first submission to `now`, or to the end of a run that is over.

    Marks and steps in the order written. A launch that has given no sign of life for
    `quiet_seconds` before `now` counts as down since then. A run that was never submitted has no
    segments.
    """
    popped = _popped_by(steps)
    known = _with_unannounced_launches(marks, steps)
    times = agreeing([moment(mark.time) for mark in known])
    machine = _Machine(_bodies(steps, popped, saves), quiet=ticks(quiet_seconds))
    for mark, time in zip(known, times, strict=True):
        machine.take(mark, time)
    machine.close(max(ticks(now), times[-1] if times else 0))
    return machine.told(steps, popped)


def _popped_by(steps: Sequence[Step]) -> list[int | None]:
    """For each row the epoch that took its place in the lineage; None: it is in the weights.

    A launch that trains step N takes the place of all that earlier launches had from N on.
    """
    popped: list[int | None] = [None] * len(steps)
    kept: list[int] = []
    for index in sorted(range(len(steps)), key=lambda i: steps[i].epoch):
        while kept and steps[kept[-1]].step >= steps[index].step:
            popped[kept.pop()] = steps[index].epoch
        kept.append(index)
    return popped


def _bodies(
    steps: Sequence[Step], popped: Sequence[int | None], saves: Sequence[Save]
) -> dict[int, Body]:
    """What the trainer says about each launch."""
    indices: dict[int, list[int]] = defaultdict(list)
    stalls: dict[int, dict[int, int]] = defaultdict(dict)
    for index, step in enumerate(steps):
        indices[step.epoch].append(index)
    for save in saves:
        stalls[save.epoch][save.step] = max(0, ticks(save.stall_seconds))
    bodies = {}
    for epoch, mine in indices.items():
        times = agreeing([moment(steps[index].time) for index in mine])
        rows = tuple(
            Row(steps[i].step, time, max(0, ticks(steps[i].step_seconds)), popped[i])
            for i, time in zip(mine, times, strict=True)
        )
        bodies[epoch] = Body(rows, stalls[epoch])
    return bodies


def _with_unannounced_launches(marks: Sequence[Mark], steps: Sequence[Step]) -> list[Mark]:
    """With a start for each launch whose own line in the ledger is torn."""
    announced = {mark.epoch for mark in marks if mark.kind is MarkKind.LAUNCH_STARTED}
    first: dict[int, Step] = {}
    for step in steps:
        first.setdefault(step.epoch, step)
    known = list(marks)
    for epoch in sorted(first.keys() - announced):
        row = first[epoch]
        later = (i for i, m in enumerate(known) if m.epoch is not None and m.epoch >= epoch)
        start = Mark(MarkKind.LAUNCH_STARTED, row.time - row.step_seconds, epoch=epoch)
        known.insert(next(later, len(known)), start)
    return known


_CLOSES_ATTEMPT = {
    MarkKind.QUEUED: Category.QUEUEING,
    MarkKind.STOPPED: Category.HELD,
    MarkKind.FINISHED: None,
}
# The highest epoch owns the run, so a launch needs no attempt that is known.
_OF_ANYBODY = (
    MarkKind.SUBMITTED,
    MarkKind.ATTEMPT_STARTED,
    MarkKind.LAUNCH_STARTED,
    MarkKind.CANCELLED,
)


@dataclass
class _Machine:
    """Reads marks in order; `since` is up to where time has been given out."""

    bodies: dict[int, Body]
    quiet: int
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
        if not self._foreign(mark):
            getattr(self, f"_{mark.kind}")(mark, time)

    def _foreign(self, mark: Mark) -> bool:
        """Of a supervisor that has outlived its attempt, or of a launch that has been replaced."""
        if mark.epoch is not None and mark.epoch < self.epoch:
            return True
        if mark.kind in _OF_ANYBODY or mark.attempt == (None, None) or self.attempt is None:
            return False
        return mark.attempt != self.attempt

    # -- one method for each kind of mark -------------------------------------------------------

    def _submitted(self, mark: Mark, time: int) -> None:
        if self.attempt is None and self.launched is None:
            self._turn(time, Category.QUEUEING)

    def _attempt_started(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DOWN, UNKNOWN_CAUSE)
        self._turn(time, Category.STARTING)
        self.attempt = mark.attempt
        self.attempts += 1

    def _attempt_lost(self, mark: Mark, time: int) -> None:
        cause = mark.cause or UNKNOWN_CAUSE
        if not self._end_launch(time, Category.DOWN, cause):
            self._turn(time, Category.DOWN)
        self._ended(mark, cause)
        self.category, self.attempt = Category.DOWN, None

    def _launch_started(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DOWN, UNKNOWN_CAUSE)
        self._turn(time, Category.STARTING)
        self.epoch = mark.epoch if mark.epoch is not None else self.epoch + 1
        self.launched, self.attempt = time, mark.attempt
        self.cause_before[self.epoch] = self.cause
        self.launches += 1

    def _launch_ended(self, mark: Mark, time: int) -> None:
        cause = mark.cause or UNKNOWN_CAUSE
        self._end_launch(time, Category.DETECTING, cause)
        self._turn(time, Category.RESTARTING)
        self._ended(mark, cause)

    def _relaunching(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DETECTING, UNKNOWN_CAUSE)
        self._turn(time, Category.RESTARTING)

    def _queued(self, mark: Mark, time: int) -> None:
        self._end_launch(time, Category.DETECTING, UNKNOWN_CAUSE)
        self._turn(time, _CLOSES_ATTEMPT[mark.kind])
        self.attempt = None

    _stopped = _finished = _queued

    def _cancelled(self, mark: Mark, time: int) -> None:
        """While an attempt runs, its supervisor has the last word."""
        if self.attempt is None and self.launched is None:
            self._turn(time, Category.HELD)

    # -- giving out time --------------------------------------------------------------------------

    def _turn(self, time: int, category: Category | None) -> None:
        """What has been going on ends here, `category` begins."""
        if self.since is not None and self.category is not None:
            self.pieces.append(Piece(self.since, time, self.category, self.cause, None))
        elif self.since is not None and time > self.since:
            self.pieces.append(Piece(self.since, time, Category.HELD, self.cause, None))
        self.since, self.category = time, category

    def _end_launch(self, time: int, tail: Category, cause: str) -> bool:
        """The open launch ends, with `tail` from its last sign of life; False if none is open."""
        if self.launched is None or self.since is None:
            return False
        body = self.bodies.pop(self.epoch, Body())
        self.pieces.extend(cut_body(body, self.since, time, tail, cause, self.cause))
        self.since, self.category, self.launched = time, Category.DOWN, None
        self.cause = cause
        return True

    def _ended(self, mark: Mark, cause: str) -> None:
        self.cause = cause
        self.ends.append((cause, mark.failure))

    def close(self, now: int) -> None:
        """The present moment, or the end of a run that has finished or is stopped."""
        if self.since is None or self.category in (None, Category.HELD):
            return
        if self.launched is None:
            self._turn(max(now, self.since), self.category)
            return
        rows = self.bodies[self.epoch].rows if self.epoch in self.bodies else ()
        seen = max(self.since, rows[-1].end if rows else 0)
        tail = Category.DOWN if now - seen > self.quiet else Category.BETWEEN
        before = self.cause
        self._end_launch(max(now, self.since), tail, before or UNKNOWN_CAUSE)

    def told(self, steps: Sequence[Step], popped: Sequence[int | None]) -> Timeline:
        lost: dict[str, int] = defaultdict(int)
        for epoch in popped:
            if epoch is not None:
                lost[self.cause_before.get(epoch) or UNKNOWN_CAUSE] += 1
        return Timeline(
            segments=tuple(self._merged()),
            ends=tuple(self.ends),
            attempts=self.attempts,
            launches=self.launches,
            kept_steps=sum(epoch is None for epoch in popped),
            lost_steps=tuple(sorted(lost.items())),
        )

    def _merged(self) -> list[Segment]:
        """Without empty segments; neighbours of one kind become one."""
        segments: list[Segment] = []
        for start, end, category, cause, popped_by in self.pieces:
            if end <= start:
                continue
            if popped_by is not None:
                cause = self.cause_before.get(popped_by) or UNKNOWN_CAUSE
            last = segments[-1] if segments else None
            if last is not None and (last.category, last.cause) == (category, cause):
                segments[-1] = last._replace(end=end)
            else:
                segments.append(Segment(start, end, category, cause))
        return segments
