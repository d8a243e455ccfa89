"""The error of two fields that exclude each other, with the place to look at.

Belongs here: that class. Does not belong here: any rule (each stands with the fields it is about).
"""

from __future__ import annotations


class Contradiction(ValueError):
    """Two fields that exclude each other: the path of the one to look at, and what to do."""

    def __init__(self, path: tuple[str | int, ...], message: str, hint: str) -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint
