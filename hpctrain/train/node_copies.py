"""Copy files to a disk of this node, once for all processes that read them.

One process of a node copies, the others wait for its lock. A copy is complete or absent: it is made
beside its place, compared with the size and the digest that are known, and renamed. Who follows on
the same node finds it. The place is named after path, size and time of the source, so a source that
has changed is copied again. Belongs here: copying. Does not belong here: which files
(`startup`, `hpctrain.serve.replica.lifecycle`), removing (the site empties its scratch
directories).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem

_BLOCK_BYTES = 16 << 20
_POLL_SECONDS = 0.2
# Left free on the node's disk for everybody else.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class SourceFile:
    """A file of a source as it is now; `name` is its path inside of the copy."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class CopyWords:
    """How messages name what is copied, and how to do without."""

    what: str
    hint: str


def copied_once(
    files: Iterable[SourceFile],
    place: Path,
    digests: Mapping[str, str | None],
    working: Callable[[], None],
    words: CopyWords,
) -> Path:
    """Return the directory with the copies of some files, which it makes if there is none.

    `digests`: SHA-256 (hex) by path of the source, where it is known. `working` is called several
    times a second. The caller holds the lock of the node (`only_process`). Raises OSError,
    InvalidInputError where there is no room, or what arrives is not what was recorded.
    """
    files = list(files)
    name = hashlib.sha256(repr(files).encode(errors="surrogateescape")).hexdigest()[:24]
    directory, unfinished = place / name, place / f"{name}.part"
    if directory.is_dir():
        return directory
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    size_bytes = sum(file.size_bytes for file in files)
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < size_bytes + _SPARE_BYTES:
        message = (
            f"has {free_bytes / 1e9:.1f} GB free, and the copies of {words.what} take "
            f"{size_bytes / 1e9:.1f} GB ({_SPARE_BYTES / 1e9:.1f} GB stay free)"
        )
        raise InvalidInputError(
            [Problem(message, str(place), hint=words.hint, node_dependent=True)]
        )
    unfinished.mkdir(mode=0o700)
    try:
        for file in files:
            target = unfinished / file.name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _copy(file, target, digests.get(str(file.path)), working)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory


def _copy(file: SourceFile, target: Path, sha256: str | None, working: Callable[[], None]) -> None:
    """Copy one file. Raises OSError, InvalidInputError if it is not what was recorded."""
    digest = hashlib.sha256()
    copied_bytes = 0
    with file.path.open("rb", buffering=0) as source, target.open("xb", buffering=0) as copy:
        while block := source.read(_BLOCK_BYTES):
            if sha256 is not None:
                digest.update(block)
            rest = memoryview(block)
            while rest:
                rest = rest[copy.write(rest) :]
            copied_bytes += len(block)
            working()
    if copied_bytes != file.size_bytes:
        message = f"{copied_bytes} of {file.size_bytes} bytes arrived in {target.parent.parent}"
    elif sha256 is not None and digest.hexdigest() != sha256:
        message = "was read with another SHA-256 than the dataset's sidecar has"
    else:
        return
    hint = "the file has changed, or this node reads it wrongly"
    raise InvalidInputError([Problem(message, str(file.path), hint=hint, node_dependent=True)])


@contextlib.contextmanager
def only_process(path: Path, working: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of this node, calling `working` while another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                working()
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
