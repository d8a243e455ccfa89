"""The base class of all documents.

A module of its own, because `status` needs it on a login node, where building the classes of a run
spec would take longer than the rest of `status`. Does not belong here: any field.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """Base of all parts of a spec or a profile: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)


# -- The error of two fields that exclude each other, with the position of one of them ----------


class Contradiction(ValueError):
    """Two fields that exclude each other: the path of the one to report, and what to do."""

    def __init__(self, path: tuple[str | int, ...], message: str, hint: str | None) -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint


class Contradictions(ValueError):
    """Several of them, each to be reported at its own place."""

    def __init__(self, found: Sequence[Contradiction]) -> None:
        super().__init__("; ".join(map(str, found)))
        self.found = tuple(found)
