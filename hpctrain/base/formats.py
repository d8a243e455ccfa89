"""Refuse documents whose format only a newer hpctrain knows.

A document carries its format as `schema_version`, whose type lists the versions that are known
(`Literal[1, 2]`); one without it has version 1. A field or a kind
of event that is added does not change the version: readers of records leave out what they do not
know. The version grows when a reader that does not know the change would misread the document.
Belongs here: this check and the problems of a document, also for rooms that do not know
`hpctrain.records`. Does not belong here: any schema, reading files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.version import __version__

_Parsed = TypeVar("_Parsed")
USE_NEWER = f"a newer hpctrain than {__version__} has written it: use that one for this run"


class NewerFormatError(InvalidInputError):
    """A newer hpctrain has written the file, in a format that this one does not know."""

    def __init__(self, path: Path, found: int, known: int) -> None:
        message = f"has format version {found}; this hpctrain knows versions up to {known}"
        super().__init__([Problem(message, str(path), hint=USE_NEWER)])


def refuse_newer(path: Path, text: str | bytes, schema: type[BaseModel]) -> None:
    """Raise NewerFormatError if `text` has a newer format version than `schema` knows.

    Readers call it after the validation of `text` has failed, so that valid files are parsed once.
    Text that is no JSON object has no version.
    """
    try:
        document = json.loads(text)
    except ValueError:
        return
    found = document.get("schema_version") if isinstance(document, dict) else None
    known = max(get_args(schema.model_fields["schema_version"].annotation))
    if isinstance(found, int) and found > known:
        raise NewerFormatError(path, found, known)


def parse_document(
    path: Path, text: bytes, schema: type[BaseModel], parse: Callable[[bytes], _Parsed]
) -> _Parsed:
    """Parse `text`, the content of `path`, that programs have written.

    Raises NewerFormatError, and InvalidInputError with all that is wrong.
    """
    try:
        return parse(text)
    except ValidationError as error:
        refuse_newer(path, text, schema)
        problems = [
            Problem(f"{'.'.join(map(str, item['loc']))}: {item['msg']}", str(path))
            for item in error.errors()
        ]
        raise InvalidInputError(problems) from error
