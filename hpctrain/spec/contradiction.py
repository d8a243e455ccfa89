"""The error of two fields that exclude each other, with the position of one of them.

Belongs here: that class. Does not belong here: any rule (each is beside the fields it checks).
"""

from __future__ import annotations


class Contradiction(ValueError):
    """Two fields that exclude each other: the path of the one to report, and what to do."""

    def __init__(self, path: tuple[str | int, ...], message: str, hint: str) -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint
