"""Publish a dataset atomically: write its files in a hidden directory, then rename them in order.

`.NAME.partial/` beside the dataset holds the files being made, and a lock against a second writer.
Order of the renames: tokenizer, .bin, .idx or .npz, sidecar; an old sidecar and index are removed
first. So a sidecar always describes files that belong together, whenever this program is
interrupted. Belongs here: this order.
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

from hpctrain.base.durable import fsync_directory, fsync_file, replace_text
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.datasets import (
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


class StagingDirectory:
    """The hidden directory in which one dataset is made; use `staging_directory` to enter it."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.target = target
        self.prefix = directory / "dataset"
        self.tokenizer = directory / "tokenizer.json"
        self.shards = directory / "shards"
        self.published = False
        # leave the finished shards for the next attempt
        self.keeps_shards = False

    @property
    def was_interrupted(self) -> bool:
        """True if a writer died between its renames: the files at the target are no dataset."""
        return (self.directory / _RENAMING_NAME).exists()

    def publish(self, sidecar: AnySidecar, tokenizer_target: Path | None) -> None:
        """Rename the files to their targets; `tokenizer_target` None: there is none to publish."""
        new_sidecar = sidecar_path(self.prefix)
        replace_text(new_sidecar, sidecar.model_dump_json(indent=1) + "\n")
        parts: tuple[Callable[[Path], Path], ...] = (npz_path,)
        if isinstance(sidecar, DatasetSidecar):
            parts = (bin_path, idx_path)  # without an index the tokens are unusable
        for part in parts:
            fsync_file(part(self.prefix))
        replace_text(self.directory / _RENAMING_NAME, "")
        sidecar_path(self.target).unlink(missing_ok=True)
        for old in {bin_path, idx_path, npz_path} - set(parts[:-1]):
            old(self.target).unlink(missing_ok=True)
        fsync_directory(self.target.parent)
        if tokenizer_target is None:
            pass
        elif tokenizer_target.absolute().parent == self.target.absolute().parent:
            fsync_file(self.tokenizer)
            os.replace(self.tokenizer, tokenizer_target)
        else:
            tokenizer_target.parent.mkdir(parents=True, exist_ok=True)
            # perhaps another file system, where a rename from here is impossible
            replace_text(tokenizer_target, self.tokenizer.read_text("utf-8"))
        for part in parts:
            os.replace(part(self.prefix), part(self.target))
        fsync_directory(self.target.parent)
        os.replace(new_sidecar, sidecar_path(self.target))
        fsync_directory(self.target.parent)
        self.published = True


@contextmanager
def staging_directory(target: Path) -> Iterator[StagingDirectory]:
    """Make and lock the hidden directory for `target`; it is removed at the end.

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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the former holder may have removed the file before it released the lock
            locked = os.fstat(lock).st_ino == (directory / _LOCK_NAME).stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            locked = False
        if not locked:
            hint = "wait for it; the lock is free as soon as that process has ended"
            busy = Problem("another process is making this dataset", file=str(target), hint=hint)
            raise InvalidInputError([busy])
        staging = StagingDirectory(directory, target)
        try:
            yield staging
        finally:
            # the marker of interrupted renames must stay until a dataset is published
            if staging.published or not (staging.was_interrupted or staging.keeps_shards):
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def read_sidecar(target: Path) -> AnySidecar | None:
    """Read the sidecar of a dataset; None if it is missing or invalid."""
    try:
        return _SIDECAR.validate_json(sidecar_path(target).read_bytes())
    except (OSError, ValidationError):
        return None


def is_intact(target: Path, sidecar: AnySidecar, tokenizer: Path | None) -> bool:
    """Check that the dataset's files have the sidecar's sizes, and the tokenizer its SHA-256.

    `tokenizer` None: there is none, or its digest is part of the request.
    """
    try:
        if isinstance(sidecar, SamplesSidecar):
            same = npz_path(target).stat().st_size == sidecar.npz_bytes
        else:
            same = bin_path(target).stat().st_size == sidecar.bin_bytes
            same = same and idx_path(target).stat().st_size == sidecar.idx_bytes
        if tokenizer is None:
            return same
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        return same and digest == sidecar.tokenizer_sha256
    except OSError:
        return False


def refuse_to_replace(staging: StagingDirectory, request_sha256: str) -> None:
    """Raise InvalidInputError if another dataset is at the target: a resumed run would read it."""
    if staging.was_interrupted:
        return
    sidecar = read_sidecar(staging.target)
    if sidecar is not None and sidecar.request_sha256 == request_sha256:
        return
    paths = [part(staging.target) for part in (bin_path, idx_path, npz_path, sidecar_path)]
    present = [path.name for path in paths if path.exists()]
    if present:
        message = f"holds another dataset already ({', '.join(present)})"
        hint = "use another --output, or --force to replace it (runs that read it will differ)"
        raise InvalidInputError([Problem(message, file=str(staging.target), hint=hint)])


def refuse_to_replace_tokenizer(path: Path, text: str) -> None:
    """Raise InvalidInputError if another tokenizer is at `path`: datasets may depend on it."""
    if path.exists() and path.read_bytes() != text.encode():
        hint = "reuse it with --tokenizer, write to another --tokenizer-output, or use --force"
        raise InvalidInputError([Problem("is another tokenizer", file=str(path), hint=hint)])
