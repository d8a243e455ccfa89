"""Read the events of a YAML text with ruamel.yaml, and explain its syntax errors.

Errors are classified by their class and position, never by the wording of the library. Belongs
here: everything that imports ruamel.yaml. Does not belong here: the tree that is built from the
events (see `positions`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.base.errors import Problem
from hpctrain.spec.scalars import shorten

MAX_DEPTH = 24
MAX_VALUES = 5_000
_CLOSED_QUOTE = re.compile(r"""'(?:[^']|'')*'(?!')|"(?:\\.|[^"\\])*\"""", re.DOTALL)


@dataclass(frozen=True)
class SourcePlace:
    """Position of a key or value; line and column are 1-based, None for the command line."""

    file: str
    line: int | None = None
    column: int | None = None

    def problem(self, message: str, hint: str | None = None) -> Problem:
        return Problem(message, self.file, self.line, self.column, hint)


class StopReading(Exception):
    """The problem that ends the reading of a file."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def too_large_problem(place: SourcePlace) -> Problem:
    return place.problem(
        f"too deep or too large: at most {MAX_DEPTH} levels and {MAX_VALUES} values are read",
        "an alias counts again each time it is used",
    )


def yaml_events(text: str, file: str) -> Iterator[Any]:
    """Parse `text` into the library's events. Raises StopReading for its errors."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    open_collections: list[Any] = []
    try:
        # "safe" names the reader that keeps no comments; nothing is constructed from the events
        for event in YAML(typ="safe", pure=True).parse(text):
            if type(event).__name__ in ("SequenceStartEvent", "MappingStartEvent"):
                open_collections.append(event)
            elif type(event).__name__ in ("SequenceEndEvent", "MappingEndEvent"):
                open_collections.pop()
            yield event
    except MarkedYAMLError as error:
        innermost = open_collections[-1] if open_collections else None
        raise StopReading(_syntax_problem(error, text, file, innermost)) from None
    except YAMLError:
        for number, line in enumerate(text.split("\n"), 1):
            for column, char in enumerate(line, 1):
                if not char.isprintable() and char not in "\t\r\x85\u2028\u2029\ufeff":
                    message = f"character U+{ord(char):04X} is not allowed in YAML"
                    place = SourcePlace(file, number, column)
                    raise StopReading(place.problem(message, "remove it")) from None
        raise StopReading(SourcePlace(file).problem("not a YAML text")) from None
    except RecursionError:  # cannot happen below MAX_DEPTH; here in case the library changes
        raise StopReading(too_large_problem(SourcePlace(file))) from None


def _syntax_problem(error: Any, text: str, file: str, innermost: Any) -> Problem:
    """Explain an error by its class, and by the characters at its two positions.

    `innermost` is the event that opened the collection in which the parser stopped.
    """
    from ruamel.yaml.parser import ParserError

    found, opened = error.problem_mark, error.context_mark
    if isinstance(error, ParserError):
        # the parser names the `[` or `{` of a flow collection, or the first key of a block
        inside = innermost is not None and opened is not None
        inside = inside and opened.index == innermost.end_mark.index - bool(innermost.flow_style)
        if inside and innermost.flow_style and text[opened.index] == "[":
            message = "a list that is opened with `[` is not closed"
            return _at(opened, file).problem(message, "add `]` or a comma")
        if inside and innermost.flow_style:
            message = "a mapping opened with `{` is not closed"
            return _at(opened, file).problem(message, "add `}` or a comma")
        if inside:
            hint = "keys of one section start in the same column; list items start with `- `"
            message = "this line does not line up with the lines above"
            return _at(found, file).problem(message, hint)
    elif found is not None:
        char, quote = text[found.index : found.index + 1], None
        if opened is not None and text[opened.index : opened.index + 1] in ("'", '"'):
            quote = "closed" if _CLOSED_QUOTE.match(text, opened.index) else "open"
        if char == "\t" and opened is None:
            return _at(found, file).problem("a tab cannot be used here", "indent with spaces")
        if char == ":" and opened is None:
            hint = "check the indentation of this line and the one above; quote text that "
            return _at(found, file).problem("a `:` is not allowed here", hint + "contains `: `")
        if opened is None and char not in ("-", "?"):
            message = "a value cannot start with this character"
            return _at(found, file).problem(message, "put it in quotes")
        if quote is not None and text[opened.index] == '"' and text[found.index - 1] == "\\":
            hint = "use single quotes for a plain `\\`"
            return _at(found, file).problem("unknown escape after `\\`", hint)
        if quote == "open" and found.index >= len(text):
            message = "a quote that is opened here is never closed"
            return _at(opened, file).problem(message, "close it")
        plain = opened is not None and text[opened.index] not in "&*!%|>'\"" and char != ":"
        if opened is not None and (plain or quote == "closed" or opened.line < found.line):
            return _at(opened, file).problem("a key without `:`", "write `key: value`")
    words = shorten(str(error.problem).splitlines()[0])
    return _at(found or opened, file).problem(f"not valid YAML: {words}")


def _at(mark: Any, file: str) -> SourcePlace:
    return SourcePlace(file) if mark is None else SourcePlace(file, mark.line + 1, mark.column + 1)
