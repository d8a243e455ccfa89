"""Compare the digests of the checkpoint that is being loaded, each file on one rank, in a thread.

A checkpoint of terabytes takes one process half an hour to read, and all its ranks seconds; they
read it anyway, so the page cache serves both. Hashing releases Python's lock, so it runs beside
starting and loading. A rank may not make a step before all ranks have found their files as they
were written. Belongs here: the thread and the ranks' agreement. Does not belong here: who reads
what (see `hpctrain.checkpoints.digest_shares`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hpctrain.checkpoints.digest_shares import files_of_rank
from hpctrain.checkpoints.manifest import FileDigest, digest_file, read_manifest
from hpctrain.train.faults import BadCheckpointError, UnreadableCheckpointError

_POLL_SECONDS = 0.1
# How long a rank that failed to load goes on reading to find out whether the files are why.
_AFTER_FAILURE_SECONDS = 60.0
_NO_PROBLEM = ""


class Agreement(Protocol):
    """What the check asks of `hpctrain.train.step_agreement.Control`."""

    def total(self, number: float) -> float: ...
    def everywhere(self, text: str) -> list[str]: ...


class DigestCheck:
    """Reads this rank's share of `directory` in a thread; starts at once.

    `who` names the rank and its node in messages.
    """

    def __init__(self, directory: Path, files: Sequence[FileDigest], who: str) -> None:
        self.read_bytes = 0
        self._directory = directory
        self._files = tuple(files)
        self._who = who
        self._problem = _NO_PROBLEM
        self._error: Exception | None = None
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._read, name="digests", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for this rank's share only.

        Raises BadCheckpointError for content that was not written so, UnreadableCheckpointError
        for a file that this rank cannot read.
        """
        self._thread.join(timeout_seconds)
        self._raise_own()
        if self._problem:
            raise BadCheckpointError(self._problem)

    def agree(self, control: Agreement, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for the shares of all ranks; all of them must call this.

        `waiting` is called again and again meanwhile. Ranks ask each other again and again, because
        one collective operation has a time limit. Raises as `wait` does, on all ranks alike.
        """
        while control.total(float(self.running)):
            waiting()
            time.sleep(_POLL_SECONDS)
        self._raise_own()  # the others see this rank end
        for problem in control.everywhere(self._problem):
            if problem:
                raise BadCheckpointError(problem)

    def explain(self) -> None:
        """After a failure to load: raise if this rank's files are why, as `wait` does."""
        self.wait(_AFTER_FAILURE_SECONDS)

    def abandon(self) -> None:
        """End reading soon; nothing is asked any more."""
        self._abandoned.set()

    def _raise_own(self) -> None:
        if isinstance(self._error, OSError):
            words = f"{self._who} cannot read {self._error.filename}: {self._error.strerror}"
            raise UnreadableCheckpointError(words) from self._error
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            for file in self._files:
                if self._abandoned.is_set():
                    return
                self._compare(file)
                if self._problem:
                    return
        except Exception as error:  # raised by whoever asks: an unread share is not a good one
            self._error = error

    def _compare(self, file: FileDigest) -> None:
        found = digest_file(self._directory, file.name)
        self.read_bytes += found.size_bytes
        if found == file:
            return
        _forget_cached(self._directory / file.name)
        again = digest_file(self._directory, file.name)
        if again == file:
            # The disk has what was written: what this node has read, and perhaps loaded, differs.
            path = str(self._directory / file.name)
            self._error = OSError(0, "its content changed between two readings", path)
            return
        self._problem = (
            f"cannot resume from {self._directory.name}: {file.name} has other content than was "
            f"written, as {self._who} reads it ({again.size_bytes} bytes with SHA-256 "
            f"{again.sha256}, written were {file.size_bytes} with {file.sha256})"
        )


def start_digest_check(
    directory: Path | None, rank: int, world_size: int, node: str
) -> DigestCheck | None:
    """Begin with this rank's share; None where nothing is resumed.

    Raises BadCheckpointError without a readable manifest.
    """
    if directory is None:
        return None
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadCheckpointError(f"cannot resume from {directory.name}: no readable manifest")
    files = files_of_rank(manifest, rank, world_size)
    return DigestCheck(directory, files, f"rank {rank} on {node}")


def _forget_cached(path: Path) -> None:
    """Have the next reading come from the disk (posix_fadvise(2)), as far as the system follows."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
