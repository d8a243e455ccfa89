"""Count what this process asks a file system about a directory: the load of a metadata server."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_EVENTS = ("open", "os.listdir", "os.scandir")


class FileSystemCalls:
    """Counts `stat`, `open` and listings of paths below a directory, by all threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._below = ""
        self._calls: Counter[str] = Counter()
        real = os.stat

        def stat(path: object, *args: object, **options: object) -> os.stat_result:
            self._count("stat", path)
            return real(path, *args, **options)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(os, "stat", stat)
        sys.addaudithook(self._hear)  # cannot be removed: outside of `counted` it counts nothing

    @contextlib.contextmanager
    def counted(self, directory: Path) -> Iterator[Counter[str]]:
        """The calls meanwhile, by kind."""
        self._calls = Counter()
        self._below = str(directory)
        try:
            yield self._calls
        finally:
            self._below = ""

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self._below and event in _EVENTS:
            self._count(event, args[0])

    def _count(self, kind: str, path: object) -> None:
        if self._below and isinstance(path, str | os.PathLike):
            name = os.fspath(path)
            if isinstance(name, str) and name.startswith(self._below):
                self._calls[kind] += 1
