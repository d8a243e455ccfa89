"""A dataset's files appear whole: made in a hidden directory, then renamed in a fixed order.

`.NAME.partial/` beside the dataset holds what is being made, and a lock against a second writer.
Order of the renames: tokenizer, .bin, .idx or .npz, sidecar; an old sidecar and index go first. So
a sidecar stands for files that belong together, whatever interrupts this program. Belongs here:
this order.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hpctrain.durable import fsync_directory, fsync_file, replace_text
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.datasets import (
    AnySidecar,
    DatasetSidecar,
    SamplesSidecar,
    bin_path,
    idx_path,
    npz_path,
    sidecar_path,
)

_LOCK_NAME = "lock"
_RENAMING_NAME = "renaming"
_SIDECAR: TypeAdapter[AnySidecar] = TypeAdapter(AnySidecar)


class Workplace:
    """The hidden directory in which one dataset is made; use `workplace` to enter it."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.target = target
        self.prefix = directory / "dataset"
        self.tokenizer = directory / "tokenizer.json"
        self.shards = directory / "shards"
        self.published = False
        # shards that are made already shall still be there for the next attempt
        self.keeps_shards = False

    @property
    def rubble(self) -> bool:
        """True if a writer began its renames and did not finish: what lies there is no dataset."""
        return (self.directory / _RENAMING_NAME).exists()

    def publish(self, sidecar: AnySidecar, tokenizer_target: Path | None) -> None:
        """Give the files their final names; `tokenizer_target` None: it is there already."""
        made = sidecar_path(self.prefix)
        replace_text(made, sidecar.model_dump_json(indent=1) + "\n")
        parts = _parts(sidecar)
        for part in parts:
            fsync_file(part(self.prefix))
        replace_text(self.directory / _RENAMING_NAME, "")
        sidecar_path(self.target).unlink(missing_ok=True)
        for old in {bin_path, idx_path, npz_path} - set(parts[:-1]):
            old(self.target).unlink(missing_ok=True)
        fsync_directory(self.target.parent)
        if tokenizer_target is not None:
            self._publish_tokenizer(tokenizer_target)
        for part in parts:
            os.replace(part(self.prefix), part(self.target))
        fsync_directory(self.target.parent)
        os.replace(made, sidecar_path(self.target))
        fsync_directory(self.target.parent)
        self.published = True

    def _publish_tokenizer(self, target: Path) -> None:
        if target.absolute().parent == self.target.absolute().parent:
            fsync_file(self.tokenizer)
            os.replace(self.tokenizer, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            # perhaps another file system, where a rename from here is impossible
            replace_text(target, self.tokenizer.read_text("utf-8"))


def _parts(sidecar: AnySidecar) -> tuple[Callable[[Path], Path], ...]:
    """The files of a dataset by its prefix; without the last one the others are nothing."""
    return (bin_path, idx_path) if isinstance(sidecar, DatasetSidecar) else (npz_path,)


@contextmanager
def workplace(target: Path) -> Iterator[Workplace]:
    """Make the hidden directory for `target`, alone; it is removed at the end.

    Raises InvalidInputError when another process is making this dataset, or when nothing can be
    written there.
    """
    directory = target.parent / f".{target.name}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        message = f"nothing can be written there: {error.strerror}"
        raise InvalidInputError([Problem(message, file=str(target.parent))]) from error
    try:
        _lock(lock, directory, target)
        place = Workplace(directory, target)
        try:
            yield place
        finally:
            # the marker of a death between renames must outlive everything but success
            if place.published or not (place.rubble or place.keeps_shards):
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(lock: int, directory: Path, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the one that had the lock may have removed the file before letting go
        same = os.fstat(lock).st_ino == (directory / _LOCK_NAME).stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        hint = "wait for it; the lock is free as soon as that process has ended"
        busy = Problem("another process is making this dataset", file=str(target), hint=hint)
        raise InvalidInputError([busy])


def read_sidecar(target: Path) -> AnySidecar | None:
    """The sidecar of a dataset; None if there is none that can be read."""
    try:
        return _SIDECAR.validate_json(sidecar_path(target).read_bytes())
    except (OSError, ValidationError):
        return None


def is_intact(target: Path, sidecar: AnySidecar, tokenizer: Path | None) -> bool:
    """True if the dataset's files have the sidecar's sizes, the tokenizer its SHA-256.

    `tokenizer` None: there is none, or its digest is part of the request.
    """
    try:
        if isinstance(sidecar, SamplesSidecar):
            whole = npz_path(target).stat().st_size == sidecar.npz_bytes
        else:
            whole = bin_path(target).stat().st_size == sidecar.bin_bytes
            whole = whole and idx_path(target).stat().st_size == sidecar.idx_bytes
        if tokenizer is None:
            return whole
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        return whole and digest == sidecar.tokenizer_sha256
    except OSError:
        return False


def refuse_to_replace(place: Workplace, request_sha256: str) -> None:
    """Raise InvalidInputError if another dataset is at the target: a resumed run would read it."""
    if place.rubble:
        return
    sidecar = read_sidecar(place.target)
    if sidecar is not None and sidecar.request_sha256 == request_sha256:
        return
    paths = [part(place.target) for part in (bin_path, idx_path, npz_path, sidecar_path)]
    there = [path.name for path in paths if path.exists()]
    if there:
        message = f"holds another dataset already ({', '.join(there)})"
        hint = "use another --output, or --force to replace it (runs that read it will differ)"
        raise InvalidInputError([Problem(message, file=str(place.target), hint=hint)])


def refuse_to_replace_tokenizer(path: Path, text: str) -> None:
    """Raise InvalidInputError if another tokenizer is at `path`: datasets may depend on it."""
    if path.exists() and path.read_bytes() != text.encode():
        hint = "reuse it with --tokenizer, write to another --tokenizer-output, or use --force"
        raise InvalidInputError([Problem("is another tokenizer", file=str(path), hint=hint)])
