"""Parse the grid of a sweep, enumerate its points and name them; find a smaller grid. Pure.

    --grid optimizer.lr=1e-4,3e-4 --grid batch.global=256,512

Belongs here: the grammar, the product, the short name of a point, which values to leave out for a
budget. Does not belong here: whether a field exists and takes a value (validation reports that, as
for `--set`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import UsageError
from hpctrain.spec.merging import OptionText

OPTION = "--grid"
MOST_POINTS = 1000
_LONGEST_NAME = 63  # of a run: `name` of the spec
_KNOWN = {
    "optimizer.lr": "lr",
    "optimizer.min_lr": "minlr",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_grad": "clip",
    "optimizer.beta1": "b1",
    "optimizer.beta2": "b2",
    "batch.global": "gb",
    "batch.micro": "mb",
    "schedule.warmup_steps": "warmup",
    "model.layers": "l",
    "model.hidden": "h",
    "model.dropout": "do",
    "resources.gpus": "gpus",
    "budget.steps": "steps",
    "budget.tokens": "tokens",
}
# What may not be in a run's name.
_UNNAMED = re.compile(r"[^A-Za-z0-9.-]")
_OPENED, _CLOSED = "[{(", "]})"
Point = tuple[int, ...]


@dataclass(frozen=True)
class GridAxis:
    """One field of the spec and the texts of its values, as `--set` takes them."""

    field: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{OPTION} {self.field}={','.join(self.values)}"


@dataclass(frozen=True)
class GridPoint:
    """One point: the texts of its values in the order of the axes, and the name of its run."""

    values: tuple[str, ...]
    overrides: tuple[str, ...]
    name: str


def parse_grid(texts: Sequence[str]) -> tuple[GridAxis, ...]:
    """Parse `FIELD=VALUE,VALUE` texts. Raises UsageError; commas in lists do not separate."""
    axes: list[GridAxis] = []
    for text in texts:
        field, equals, rest = text.partition("=")
        field = field.strip()
        values = tuple(value.strip() for value in _split(text, rest))
        if not equals or not field or not all(values):
            raise UsageError(
                f"{OPTION} {text}: expected FIELD=VALUE,VALUE",
                hint=f"for example {OPTION} optimizer.lr=1e-4,3e-4",
            )
        if field == "name":
            raise UsageError(
                f"{OPTION} {text}: the names of the runs are made from their values",
                hint="`--set name=NAME` is the first part of all of them",
            )
        if field == "after":
            raise UsageError(
                f"{OPTION} {text}: all runs of a sweep wait for the same run",
                hint="`--set after=RUN`, or `after` in the spec",
            )
        if any(axis.field == field for axis in axes):
            raise UsageError(
                f"{OPTION} {text}: `{field}` is given twice", hint="give all its values at once"
            )
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise UsageError(f"{OPTION} {text}: `{twice[0]}` is there twice")
        axes.append(GridAxis(field, values))
    if not axes:
        raise UsageError(
            "a sweep needs a grid", hint=f"for example {OPTION} optimizer.lr=1e-4,3e-4"
        )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise UsageError(f"the grid has {count:,} points, and a sweep at most {MOST_POINTS:,}")
    return tuple(axes)


def _split(option: str, text: str) -> list[str]:
    """Split at commas that are in no brackets and no quotes.

    Raises UsageError, about the whole option, for one of these that is not closed or not opened.
    """
    parts, closing, quote = [""], "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPENED:
            closing += _CLOSED[_OPENED.index(letter)]
        elif letter in _CLOSED:
            if not closing.endswith(letter):
                raise _unbalanced(option, f"`{letter}` closes nothing that is open")
            closing = closing[:-1]
        elif letter == "," and not closing:
            parts.append("")
            continue
        parts[-1] += letter
    if quote or closing:
        raise _unbalanced(option, f"a `{quote or closing[-1]}` is missing at the end")
    return parts


def _unbalanced(option: str, problem: str) -> UsageError:
    return UsageError(
        f"{OPTION} {option}: {problem}",
        hint="brackets and quotes keep a value with commas together; one that is part of a value "
        "stands in quotes of the other kind",
    )


def grid_points(axes: Sequence[GridAxis], run_name: str) -> tuple[GridPoint, ...]:
    """Enumerate the product, the last axis fastest; each point has a name of its own."""
    words = short_fields([axis.field for axis in axes])
    combinations = list(itertools.product(*(axis.values for axis in axes)))
    ends = [
        "-".join(
            f"{word}{_UNNAMED.sub('', value)}" for word, value in zip(words, values, strict=True)
        )
        for values in combinations
    ]
    longest = max(map(len, ends))
    if len(set(ends)) < len(ends) or longest > _LONGEST_NAME - 9:
        width = len(str(len(ends)))
        ends = [f"p{number:0{width}d}" for number in range(1, len(ends) + 1)]
        longest = width + 1
    first = run_name[: _LONGEST_NAME - 1 - longest].rstrip("._-") or "run"
    points = []
    for values, end in zip(combinations, ends, strict=True):
        overrides = tuple(
            OptionText(f"{axis.field}={value}", OPTION)
            for axis, value in zip(axes, values, strict=True)
        )
        points.append(GridPoint(values, overrides, f"{first}-{end}"))
    return tuple(points)


def short_fields(fields: Sequence[str]) -> list[str]:
    """Abbreviate fields: a few letters, distinct from each other."""
    plain = [re.sub(r"\[\d+\]", "", field) for field in fields]
    last = [re.sub(r"[^A-Za-z0-9]", "", field.rpartition(".")[2]) for field in plain]
    words = [_KNOWN.get(field) or word for field, word in zip(fields, last, strict=True)]
    if len(set(words)) < len(words):
        words = [re.sub(r"[^A-Za-z0-9]", "", field) for field in fields]
    if len(set(words)) < len(words):
        words = [f"f{number}_" for number in range(1, len(words) + 1)]
    return words


def nearest_smaller(
    axes: Sequence[GridAxis], hours: Mapping[Point, float], limit_hours: float
) -> tuple[tuple[GridAxis, ...], float] | None:
    """Find a part of the grid whose GPU-hours are within the limit, and return it with their sum.

    One value of one axis is left out at a time: the one after which most is left within the limit,
    else the dearest. `hours` by the positions of the values on their axes; points that are not to
    run are absent. None if not even one point is within the limit.
    """
    kept = [list(range(len(axis.values))) for axis in axes]

    def total_hours(chosen: Sequence[Sequence[int]]) -> float:
        return math.fsum(hours.get(point, 0.0) for point in itertools.product(*chosen))

    def without(number: int, value: int) -> list[list[int]]:
        return [
            [one for one in values if one != value] if index == number else values
            for index, values in enumerate(kept)
        ]

    total = total_hours(kept)
    while total > limit_hours:
        smaller = [
            without(number, value)
            for number, values in enumerate(kept)
            if len(values) > 1
            for value in values
        ]
        if not smaller:
            return None
        priced = [(total_hours(one), one) for one in smaller]
        within = [(sum_, one) for sum_, one in priced if 0 < sum_ <= limit_hours]
        total, kept = max(within, key=_price) if within else min(priced, key=_price)
    if not total:
        return None
    chosen = tuple(
        GridAxis(axis.field, tuple(axis.values[number] for number in values))
        for axis, values in zip(axes, kept, strict=True)
    )
    return chosen, total


def _price(priced: tuple[float, list[list[int]]]) -> float:
    return priced[0]
