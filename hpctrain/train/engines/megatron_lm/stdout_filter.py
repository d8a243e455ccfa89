"""Standard output of this process, with every line shown to a function that may drop it.

Belongs here: standard output, line by line. Does not belong here: what lines mean (see
`log_lines`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

# A longer line without an end is written at once and not kept.
_LONGEST_LINE_CHARACTERS = 1 << 16


class LineFilter:
    """Wraps a text stream; calls `handle_line` with every line, in the thread that wrote it.

    A complete line is written to the stream if `handle_line` returns True, or if a part of it has
    been flushed before.
    """

    def __init__(self, stream: TextIO, handle_line: Callable[[str], bool]) -> None:
        self._stream = stream
        self._handle_line = handle_line
        self._line = ""
        self._written_characters = 0

    def write(self, text: str) -> int:
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            written, self._line, self._written_characters = self._written_characters, "", 0
            if self._handle_line(line) or written:
                self._stream.write(f"{line[written:]}\n")
        self._line = rest
        if len(rest) > _LONGEST_LINE_CHARACTERS:
            self._write_unfinished_line()
            self._line, self._written_characters = "", 0
        return len(text)

    def flush(self) -> None:
        """Flush the stream, together with a line that has no end yet, such as a progress bar."""
        self._write_unfinished_line()
        self._stream.flush()

    def _write_unfinished_line(self) -> None:
        self._stream.write(self._line[self._written_characters :])
        self._written_characters = len(self._line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def filter_stdout(handle_line: Callable[[str], bool]) -> Iterator[None]:
    """Replace `sys.stdout` by a `LineFilter` inside the block."""
    before = sys.stdout
    line_filter = LineFilter(before, handle_line)
    sys.stdout = line_filter
    try:
        yield
    finally:
        line_filter.flush()
        sys.stdout = before
