"""Read JSONL: one JSON object per line, with file and line number for error messages.

Belongs here: the fields that lines must have. Does not belong here: which bytes to read (see
`corpus`), tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.corpus import Source, read_text

_MAX_QUOTED_CHARACTERS = 60


@dataclass(frozen=True)
class Line:
    """The object of a line; `number` counts from 1."""

    file: str
    number: int
    fields: dict[str, Any]

    def error(self, message: str, hint: str | None = None) -> InvalidInputError:
        """Return an exception that names this line."""
        return InvalidInputError([Problem(message, file=self.file, line=self.number, hint=hint)])

    def text(self, field: str) -> str:
        """Return a field that must be non-empty text. Raises InvalidInputError."""
        value = self.fields.get(field)
        if not isinstance(value, str):
            known = ", ".join(self.fields) or "none"
            raise self.error(f"has no text in field `{field}`; its fields: {known}")
        if not value:
            raise self.error(f"field `{field}` is empty")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            message = f"field `{field}` has half of a surrogate pair, which is no text"
            raise self.error(message) from None
        return value


def read_lines(sources: Iterable[Source]) -> Iterator[Line]:
    """Parse the lines of JSONL pieces; blank lines are skipped. Raises InvalidInputError."""
    for source in sources:
        first = source.first_line or 1
        # not splitlines(): U+2028 and others do not end a line in JSON
        for number, text in enumerate(read_text(source).split("\n"), first):
            if text.strip():
                yield Line(source.name, number, _parse_object(source.name, number, text))


def _parse_object(file: str, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        column = getattr(error, "colno", None)
        problem = Problem(f"is not JSON: {error}", file=file, line=number, column=column)
        raise InvalidInputError([problem]) from error
    except RecursionError as error:
        raise InvalidInputError([Problem("is nested too deep", file=file, line=number)]) from error
    if not isinstance(value, dict):
        message = f"is not a JSON object but {text[:_MAX_QUOTED_CHARACTERS]}"
        raise InvalidInputError([Problem(message, file=file, line=number)])
    return value


def documents(sources: Iterable[Source], field: str) -> Iterator[str]:
    """Yield the text of each document: a whole file, or a field of each line of a JSONL file.

    Raises InvalidInputError.
    """
    for source in sources:
        if source.first_line is None:
            yield read_text(source)
        else:
            yield from (line.text(field) for line in read_lines([source]))
