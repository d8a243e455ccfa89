"""One launch, cut into start, steps, saves and end. Pure.

Belongs here: the time between the start of one launch and its end. Does not belong here: what
lies between launches (see `timeline`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hpctrain.telemetry.segments import Category


class Row(NamedTuple):
    """One step: its end and length in ticks; `popped_by`: the epoch that trains it again."""

    step: int
    end: int
    length: int
    popped_by: int | None


@dataclass(frozen=True)
class Body:
    """What the trainer says about one launch: its steps, and the stall after each saved one."""

    rows: tuple[Row, ...] = ()
    stalls: dict[int, int] = field(default_factory=dict)


class Piece(NamedTuple):
    """A segment whose cause may still have to be looked up, by the epoch that redoes its steps."""

    start: int
    end: int
    category: Category
    cause: str | None
    popped_by: int | None


def cut_body(
    body: Body, start: int, end: int, tail: Category, cause: str | None, before: str | None
) -> list[Piece]:
    """The pieces from `start` to `end`, in order and without gaps.

    `cause`: why the launch ended; `before`: why the one before did. What lies outside of the
    launch by its own clock is cut off: steps of a trainer that has outlived its launch take no
    time. A save's stall is taken from the gaps after its step, as far as they reach: a save in
    the background stops training at its start and at its end.
    """
    rows = [row for row in body.rows if row.end - row.length < end]
    if not rows:
        return [_without_steps(start, end, tail, cause, before)]
    pieces, cursor, owed = [], start, 0
    for number, row in enumerate(rows):
        begin = max(row.end - row.length, cursor)
        stop = min(max(row.end, begin), end)
        if number == 0:
            pieces.append(Piece(cursor, begin, Category.STARTING, before, None))
        else:
            owed = _gap(pieces, cursor, begin, owed, Category.BETWEEN, None)
        kind = Category.PRODUCTIVE if row.popped_by is None else Category.REDONE
        pieces.append(Piece(begin, stop, kind, None, row.popped_by))
        owed += body.stalls.get(row.step, 0)
        cursor = stop
    _gap(pieces, cursor, end, owed, tail, None if tail is Category.BETWEEN else cause)
    return pieces


def _without_steps(
    start: int, end: int, tail: Category, cause: str | None, before: str | None
) -> Piece:
    """A launch that failed at its start is due to its own cause, one under way to the last."""
    if tail is Category.DOWN:
        return Piece(start, end, tail, cause, None)
    return Piece(start, end, Category.STARTING, before if tail is Category.BETWEEN else cause, None)


def _gap(
    pieces: list[Piece], start: int, end: int, owed: int, rest: Category, cause: str | None
) -> int:
    """Between two steps, or after the last: first what saves still owe, then `rest`."""
    saved = min(owed, end - start)
    pieces.append(Piece(start, start + saved, Category.SAVING, None, None))
    pieces.append(Piece(start + saved, end, rest, cause, None))
    return owed - saved
