"""Check a checkpoint while it is loaded: digests, each file on one rank, and the sample order.

Reading a checkpoint of terabytes takes one process half an hour, but all its ranks seconds. They
read it anyway, so the page cache serves both. Hashing releases Python's lock and runs beside
start-up and loading. No rank makes a step before all ranks have verified their files. Belongs
here: the thread, the agreement of ranks, and checks that all engines share. Does not belong here:
the assignment of files (`hpctrain.checkpoints.resume_shares`), loading (the engines' rooms).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.resume_shares import files_of_rank, read_share
from hpctrain.records.manifest import (
    FileDigest,
    digest_file,
    file_problem,
    list_problem,
    read_manifest,
)
from hpctrain.train.faults import (
    BadCheckpointError,
    LoadFailedError,
    UnreadableCheckpointError,
    is_damage,
)
from hpctrain.train.storage import chain

if TYPE_CHECKING:  # imports torch
    from hpctrain.train.step_agreement import Control

_POLL_SECONDS = 0.1
# How long a rank that failed to load continues to verify, to learn whether the files are damaged.
_AFTER_FAILURE_SECONDS = 60.0
_NO_PROBLEM = ""


class DigestCheck:
    """Verifies this rank's share of `directory` in a thread; starts at once.

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
        self._thread = threading.Thread(target=self._verify_share, name="digests", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for this rank's share only.

        Raises BadCheckpointError for content that differs from what was written,
        UnreadableCheckpointError for a file that this rank cannot read.
        """
        self._thread.join(timeout_seconds)
        self._raise_own()
        if self._problem:
            raise BadCheckpointError(self._problem)

    def agree(self, control: Control, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for the shares of all ranks; a collective call.

        `waiting` is called repeatedly meanwhile. Ranks poll each other, because a single collective
        operation has a timeout. Raises as `wait` does, on all ranks alike.
        """
        while control.total(float(self.running)):
            waiting()
            time.sleep(_POLL_SECONDS)
        self._raise_own()  # the other ranks notice that this rank ends
        for problem in control.everywhere(self._problem):
            if problem:
                raise BadCheckpointError(problem)

    def explain(self) -> None:
        """After a failure to load: raise as `wait` does if this rank's files are damaged."""
        self.wait(_AFTER_FAILURE_SECONDS)

    def abandon(self) -> None:
        """Stop verifying soon; the result is not used."""
        self._abandoned.set()

    def _raise_own(self) -> None:
        if isinstance(self._error, OSError):
            message = f"{self._who} cannot read {self._error.filename}: {self._error.strerror}"
            raise UnreadableCheckpointError(message) from self._error
        if self._error is not None:
            raise self._error

    def _verify_share(self) -> None:
        try:
            for file in self._files:
                if self._abandoned.is_set() or self._problem:
                    return
                self._verify_file(file)
        except Exception as error:  # raised in the main thread: an unread share is not verified
            self._error = error

    def _verify_file(self, file: FileDigest) -> None:
        path = self._directory / file.name
        first = digest_file(self._directory, file.name)
        self.read_bytes += first.size_bytes
        if first == file:
            return
        # read again from the disk (posix_fadvise(2)), as far as the system allows
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        again = digest_file(self._directory, file.name)
        if again == file:
            # The disk is right, but what this node read, and perhaps loaded, was not.
            self._error = OSError(0, "its content changed between two readings", str(path))
            return
        self._problem = (
            f"cannot resume from {self._directory.name}: {file.name} has other content than was "
            f"written, as {self._who} reads it ({again.size_bytes} bytes with SHA-256 "
            f"{again.sha256}, written were {file.size_bytes} with {file.sha256})"
        )


def start_digest_check(
    directory: Path | None, rank: int, world_size: int, node: str
) -> DigestCheck | None:
    """Check this rank's share by names and sizes, then start to verify its content.

    Returns None when nothing is resumed. Each file is in the share of one rank, and no rank can
    join the others before its own check, so nothing is loaded of a checkpoint that lacks a file.
    Rank 0 also checks the list itself. A rank asks about no file of others: at R ranks that would
    be R x R operations on the metadata server.

    Raises BadCheckpointError for what differs from what was written, UnreadableCheckpointError for
    what this rank cannot see, although the supervisor has seen it a moment before.
    """
    if directory is None:
        return None
    who = f"rank {rank} on {node}"
    share = read_share(directory, rank, world_size)
    if share is None or rank == 0:
        manifest = read_manifest(directory)
        problem = list_problem(directory, manifest) if manifest is None or rank == 0 else None
        if problem is not None:
            message = f"{who} cannot resume from {directory.name}: {problem}"
            raise (UnreadableCheckpointError if manifest is None else BadCheckpointError)(message)
        assert manifest is not None, "without a manifest there is a problem"
        files = files_of_rank(manifest, rank, world_size) if share is None else share.files
    else:
        files = share.files
    for file in files:
        problem = file_problem(directory, file, deep=False)
        if problem is not None:
            message = f"{who} cannot resume from {directory.name}: {problem}"
            seen = os.path.exists(directory / file.name)
            raise (BadCheckpointError if seen else UnreadableCheckpointError)(message)
    return DigestCheck(directory, files, who)


def lost_file(directory: Path, error: BaseException) -> str | None:
    """The file of the manifest that a loader has missed in `directory`; None if there is none.

    Asked after a failure only, because it reads the whole manifest.
    """
    missed = {Path(os.fsdecode(link.filename)).name for link in _missing_files(error)}
    manifest = read_manifest(directory) if missed else None
    names = [file.name for file in manifest.files] if manifest is not None else []
    return next((name for name in names if Path(name).name in missed), None)


def _missing_files(error: BaseException) -> Iterator[FileNotFoundError]:
    """The missing files in a chain of errors, and in torch's collection of those of all ranks
    (checkpoint/api.py, CheckpointException)."""
    for link in chain(error):
        failures = getattr(link, "failures", None)
        for failure in failures.values() if isinstance(failures, dict) else ():
            yield from _missing_files(failure[0])
        if isinstance(link, FileNotFoundError) and link.filename:
            yield link


# -- Checks common to all engines when they resume from a checkpoint -----------------------------


def check_sample_order(now: dict[str, Any], saved: dict[str, Any], directory: Path) -> None:
    """Raise InvalidInputError with every setting that would change the order of the samples."""
    problems = [
        Problem(
            f"{name} was {saved.get(name)} and is now {value}: the order of all samples "
            "would change",
            str(directory),
            hint="submit a new run",
        )
        for name, value in now.items()
        if saved.get(name) != value
    ]
    if problems:
        raise InvalidInputError(problems)


@contextlib.contextmanager
def damage_named(directory: Path) -> Iterator[None]:
    """Within the block, raise LoadFailedError for errors in decoding files; others pass."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if is_damage(error):
            raise LoadFailedError(f"cannot resume from {directory.name}: {error}") from error
        raise
