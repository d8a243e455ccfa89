"""The YAML library behind a narrow door: its events, and its complaints in plain words.

Belongs here: everything that imports ruamel.yaml. Does not belong here: the tree that is built
from the events (see `positions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import Problem
from hpctrain.spec.scalars import shorten

MAX_DEPTH = 24
MAX_VALUES = 5_000


@dataclass(frozen=True)
class Place:
    """Where something was written; line and column are 1-based, None for the command line."""

    file: str
    line: int | None = None
    column: int | None = None

    def problem(self, message: str, hint: str | None = None) -> Problem:
        return Problem(message, self.file, self.line, self.column, hint)


class StopReading(Exception):
    """Carries the one problem that ends the reading of a file."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def too_much(place: Place) -> Problem:
    return place.problem(
        f"too deep or too large: at most {MAX_DEPTH} levels and {MAX_VALUES} values are read",
        "aliases count as often as they are used",
    )


def yaml_events(text: str, file: str) -> Iterator[Any]:
    """The parser's events; its errors become StopReading."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield from YAML(typ="rt", pure=True).parse(text)
    except MarkedYAMLError as error:
        raise StopReading(_syntax_problem(error, file)) from None
    except YAMLError:
        raise StopReading(_unprintable(text, file)) from None
    except RecursionError:  # cannot happen below MAX_DEPTH; here in case the library changes
        raise StopReading(too_much(Place(file))) from None


def _unprintable(text: str, file: str) -> Problem:
    for number, line in enumerate(text.split("\n"), 1):
        for column, char in enumerate(line, 1):
            if not char.isprintable() and char not in "\t\r\x85\u2028\u2029\ufeff":
                message = f"character U+{ord(char):04X} is not allowed in YAML"
                return Place(file, number, column).problem(message, "remove it")
    return Place(file).problem("not a YAML text")


# What the library says -> what we say. The texts are those of ruamel.yaml's scanner and parser.
_SYNTAX = (
    ("character '\\t'", "a tab cannot be used here", "indent with spaces"),
    ("mapping values are not allowed", "a `:` is not allowed here",
     "check the indentation of this line and the one above; quote text that contains `: `"),
    ("could not find expected ':'", "a key without `:`", "write `key: value`"),
    ("expected <block end>", "this line does not line up with the lines above",
     "keys of one section start in the same column; list items start with `- `"),
    ("unexpected end of stream", "a quote that is opened here is never closed", "close it"),
    ("expected ',' or ']'", "a list that is opened with `[` is not closed", "add `]` or a comma"),
    ("expected ',' or '}'", "a mapping opened with `{` is not closed", "add `}` or a comma"),
    ("that cannot start any token", "a value cannot start with this character", "put it in quotes"),
    ("unknown escape character", "unknown escape after `\\`", "use single quotes for a plain `\\`"),
)  # fmt: skip


def _syntax_problem(error: Any, file: str) -> Problem:
    raw = str(error.problem)
    opened = "unexpected end" in raw or "could not find" in raw or "expected ','" in raw
    mark = (error.context_mark if opened else None) or error.problem_mark or error.context_mark
    place = Place(file, mark.line + 1, mark.column + 1) if mark is not None else Place(file)
    for needle, message, hint in _SYNTAX:
        if needle in raw:
            return place.problem(message, hint)
    return place.problem(f"not valid YAML: {shorten(raw.splitlines()[0])}")
