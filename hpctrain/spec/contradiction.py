"""An error of a validator that names the field to look at.

Belongs here: that exception. Does not belong here: rules (they are beside the fields), and the
place in the file (see `explain`).
"""

from __future__ import annotations


class Contradiction(ValueError):
    """Two fields that exclude each other: the path of the one to look at, and what to do."""

    def __init__(self, path: tuple[str | int, ...], message: str, hint: str) -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint
