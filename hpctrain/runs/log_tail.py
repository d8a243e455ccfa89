"""Reads the end of a run's newest log, and what is added to it, for a live view.

Belongs here: which part of the log is kept. Does not belong here: whole logs (`logs`), wrapping.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.records.find import RunFiles
from hpctrain.runs.logs import job_logs

# What a first look reads, and how many lines are kept.
_FIRST_BYTES = 128 * 1024
_KEPT_LINES = 2000


class LogTail:
    """The last lines of the newest log of a job; each call reads what was added since the last."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._path: Path | None = None
        self._position = 0
        self._lines: list[str] = []
        self._torn = b""

    def read(self) -> tuple[str, ...]:
        """Return the lines that are kept, none before there is a log. Raises OSError."""
        try:
            newest = next(reversed(job_logs(self._run)), None)
        except FileNotFoundError:
            newest = None
        if newest is None:
            return ()
        with newest.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            if newest != self._path or size_bytes < self._position:
                self._path, self._lines, self._torn = newest, [], b""
                self._position = max(0, size_bytes - _FIRST_BYTES)
                begins_inside = self._position > 0
            else:
                begins_inside = False
            stream.seek(self._position)
            data = stream.read()
        self._position += len(data)
        *whole, self._torn = (self._torn + data).split(b"\n")
        lines = [line.decode(errors="replace") for line in whole]
        self._lines = (self._lines + lines[1 if begins_inside else 0 :])[-_KEPT_LINES:]
        torn = self._torn.decode(errors="replace")
        return (*self._lines, torn) if torn else tuple(self._lines)
