"""JSONL: one JSON object per line, each with its place for messages.

Belongs here: the fields that lines must have. Does not belong here: where lines are (see
`corpus`), tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.corpus import Source, read_text

_SHOWN = 60


@dataclass(frozen=True)
class Line:
    """The object of a line."""

    file: str
    number: int
    fields: dict[str, Any]

    def wrong(self, words: str, hint: str | None = None) -> InvalidInputError:
        """An exception with this line's place."""
        return InvalidInputError([Problem(words, file=self.file, line=self.number, hint=hint)])

    def text(self, field: str) -> str:
        """A field that is text, and not empty. Raises InvalidInputError."""
        value = self.fields.get(field)
        if not isinstance(value, str):
            known = ", ".join(self.fields) or "none"
            raise self.wrong(f"has no text in field `{field}`; its fields: {known}")
        if not value:
            raise self.wrong(f"field `{field}` is empty")
        if not _is_encodable(value):
            raise self.wrong(f"field `{field}` has half of a surrogate pair, which is no text")
        return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_lines(source: Source) -> Iterator[Line]:
    """The lines of a piece; blank ones are left out. Raises InvalidInputError."""
    number = source.first_line or 1
    # not splitlines(): U+2028 and others are no ends of lines in JSON
    for offset, text in enumerate(read_text(source).split("\n")):
        if text.strip():
            yield Line(source.name, number + offset, _object(source.name, number + offset, text))


def _object(file: str, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        column = getattr(error, "colno", None)
        problem = Problem(f"is no JSON: {error}", file=file, line=number, column=column)
        raise InvalidInputError([problem]) from error
    except RecursionError as error:
        raise InvalidInputError([Problem("is nested too deep", file=file, line=number)]) from error
    if not isinstance(value, dict):
        words = f"is no JSON object but {text[:_SHOWN]}"
        raise InvalidInputError([Problem(words, file=file, line=number)])
    return value


def documents(sources: Iterable[Source], field: str) -> Iterator[str]:
    """The text of each document: a whole file, or a field of each line of a JSONL file.

    Raises InvalidInputError.
    """
    for source in sources:
        if source.first_line is None:
            yield read_text(source)
        else:
            yield from (line.text(field) for line in read_lines(source))
