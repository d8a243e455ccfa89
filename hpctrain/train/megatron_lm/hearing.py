"""Reading along what the program prints, while it goes where it always goes.

Belongs here: standard output, line by line. Does not belong here: what lines mean (see `lines`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

# A line without an end is not kept for longer than this.
_LONGEST_LINE = 1 << 16


class Hearing:
    """Stands in for a text stream; `heard` gets every line, in the thread that wrote it."""

    def __init__(self, stream: TextIO, heard: Callable[[str], None]) -> None:
        self._stream = stream
        self._heard = heard
        self._rest = ""

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest[-_LONGEST_LINE:]
        for line in lines:
            self._heard(line)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def hearing(heard: Callable[[str], None]) -> Iterator[None]:
    """Read along standard output inside the block."""
    before = sys.stdout
    sys.stdout = Hearing(before, heard)
    try:
        yield
    finally:
        sys.stdout = before
