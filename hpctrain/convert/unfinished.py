"""The directory that a conversion fills, file by file, so that a killed one goes on where it was.

A journal beside the files lists the finished ones with their digests. At the end every file is read
again and must have its digest, a manifest like that of a checkpoint is written, and the directory
gets its name. Belongs here: this order. Does not belong here: what stands in the files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base import clock
from hpctrain.base.durable import fsync_directory, replace_text
from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.records.manifest import (
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    digest_file,
    file_problem,
)
from hpctrain.records.sweeps import try_lock
from hpctrain.spec.document import Document
from hpctrain.version import __version__

# Files of the result have at most so many bytes, or one tensor (as transformers splits models).
MOST_FILE_BYTES = 5 * 10**9
_JOURNAL, _LOCK = "journal.json", "lock"


class _Finished(Document):
    """A file that is complete, and what `write` has returned about it."""

    digest: FileDigest
    about: Any


class _Journal(BaseModel):
    """`source`: what is converted; of another source or in other files nothing can be used."""

    model_config = ConfigDict(extra="forbid")

    source: dict[str, Any]
    finished: dict[str, _Finished] = {}


class DigestedStream:
    """A file to write whose bytes are digested on the way."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        written = self._stream.write(data)
        self.size_bytes += written
        return written

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._stream.flush()

    def digest(self, name: str) -> FileDigest:
        return FileDigest(name=name, size_bytes=self.size_bytes, sha256=self._sha256.hexdigest())


class UnfinishedConversion:
    """The directory while it is being filled."""

    def __init__(self, directory: Path, source: dict[str, Any]) -> None:
        self.directory = directory
        self.most_file_bytes = MOST_FILE_BYTES
        self._journal = _kept(directory, source) or _Journal(source=source)

    def write(self, name: str, write: Callable[[DigestedStream], Any]) -> Any:
        """Write a file by `write` unless it is finished; return what `write` returned (JSON)."""
        known = self._journal.finished.get(name)
        if known is not None:
            return known.about
        with (self.directory / name).open("wb") as file:
            stream = DigestedStream(file)
            about = write(stream)
            file.flush()
            os.fsync(file.fileno())
        finished = _Finished(digest=stream.digest(name), about=about)
        self._journal.finished[name] = finished
        replace_text(self.directory / _JOURNAL, self._journal.model_dump_json())
        return about

    def finish(self) -> None:
        """Verify all that was written, and list it in a manifest. Raises HpctrainError."""
        written = {name: one.digest for name, one in self._journal.finished.items()}
        for digest in written.values():
            if problem := file_problem(self.directory, digest, deep=True):
                raise HpctrainError(f"{self.directory}: {problem}", hint="is the disk sound?")
        own = {_JOURNAL, _LOCK}
        names = sorted({path.name for path in self.directory.iterdir()} - own)
        manifest = Manifest(
            step=0,
            epoch=0,
            engine="convert",
            layout="any",
            world_size=1,
            consumed_samples=None,
            time=clock.now(),
            files=tuple(written.get(name) or digest_file(self.directory, name) for name in names),
        )
        replace_text(self.directory / MANIFEST_NAME, manifest.sealed().model_dump_json())
        for name in own:
            (self.directory / name).unlink(missing_ok=True)
        fsync_directory(self.directory)


def _kept(directory: Path, source: dict[str, Any]) -> _Journal | None:
    """Return the journal of an earlier attempt at the same, of files that are still good.

    Everything else in the directory is removed.
    """
    try:
        journal = _Journal.model_validate_json((directory / _JOURNAL).read_bytes())
    except (OSError, ValidationError):
        journal = None
    if journal is not None and journal.source != source:
        journal = None
    good = {
        name: one
        for name, one in (journal.finished if journal else {}).items()
        if file_problem(directory, one.digest, deep=True) is None
    }
    for path in directory.iterdir():
        if path.name not in (*good, _LOCK):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return None if journal is None else journal.model_copy(update={"finished": good})


@contextmanager
def unfinished(target: Path, source: Path) -> Iterator[UnfinishedConversion]:
    """Make the directory `TARGET.partial`, which becomes `target` at the end.

    Input that cannot be converted removes it; after anything else the next call goes on with it.
    """
    directory = target.with_name(f"{target.name}.partial")
    directory.mkdir(parents=True, exist_ok=True)
    lock = try_lock(directory)
    if lock is None:
        raise HpctrainError(f"{directory} is being written by another process")
    try:
        files = sorted(path for path in source.iterdir() if path.is_file())
        states = {path.name: path.stat() for path in files}
        about = {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}
        made_by = {"version": __version__, "most_file_bytes": MOST_FILE_BYTES}
        work = UnfinishedConversion(directory, {"files": about, **made_by})
        yield work
        work.finish()
        directory.rename(target)
    except InvalidInputError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        os.close(lock)
