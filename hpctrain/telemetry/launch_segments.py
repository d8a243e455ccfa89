"""Cut the time of one launch into start, steps, saves and end. Pure.

Does not belong here: the time between launches (see `timeline`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hpctrain.telemetry.time_categories import Category


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
