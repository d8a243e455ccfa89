"""Reading along what the program prints, while it goes where it always goes.

Belongs here: standard output, line by line. Does not belong here: what lines mean (see `lines`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

# A line without an end is not held back for longer than this.
_LONGEST_LINE = 1 << 16


class Hearing:
    """Stands in for a text stream; `heard` gets every line, in the thread that wrote it.

    Lines go on once they are complete, and only those for which `heard` returns True or of which
    a part has been flushed already.
    """

    def __init__(self, stream: TextIO, heard: Callable[[str], bool]) -> None:
        self._stream = stream
        self._heard = heard
        self._line = ""
        self._gone_on = 0

    def write(self, text: str) -> int:
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            gone_on, self._line, self._gone_on = self._gone_on, "", 0
            if self._heard(line) or gone_on:
                self._stream.write(f"{line[gone_on:]}\n")
        self._line = rest
        if len(rest) > _LONGEST_LINE:
            self._pass_on()
            self._line, self._gone_on = "", 0
        return len(text)

    def flush(self) -> None:
        """With what has no end yet, such as a bar that shows progress."""
        self._pass_on()
        self._stream.flush()

    def _pass_on(self) -> None:
        self._stream.write(self._line[self._gone_on :])
        self._gone_on = len(self._line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def hearing(heard: Callable[[str], bool]) -> Iterator[None]:
    """Read along standard output inside the block."""
    before = sys.stdout
    hearing_along = Hearing(before, heard)
    sys.stdout = hearing_along
    try:
        yield
    finally:
        hearing_along.flush()
        sys.stdout = before
