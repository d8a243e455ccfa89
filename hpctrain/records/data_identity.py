"""Record which bytes a run trains on, and compare them later with the files: `data.json`.

Datasets of terabytes cannot be read at each start. A file is the same if its size, its time of
change and a sample of its blocks are. If only the time differs (a copy, a restore, a `touch`), more
of it is read: all of it where a sidecar knows its SHA-256, otherwise a denser sample. Belongs here:
the record and comparing files with it. Does not belong here: which files a run reads
(`hpctrain.job.data_records`), what follows from a change (`hpctrain.supervise.srun_launch`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError
from hpctrain.base.formats import refuse_newer
from hpctrain.records.datasets import class_directories, is_image

_BLOCK_BYTES = 64 * 2**10
# At each start 4 MiB of a file; when its time has changed 64 MiB, so smaller files are read whole.
_QUICK_BLOCKS, _DENSE_BLOCKS = 64, 1024
# About three minutes of one thread. A larger file is compared by the denser sample.
WHOLE_LIMIT_BYTES = 256 * 2**30
_READ_BYTES = 1 << 22
_THREADS = 8
_SAMPLED_IMAGES = 64


class FileIdentity(BaseModel):
    """One file as it was when it was recorded.

    `quick_sha256` and `dense_sha256` are over blocks whose places follow from the size alone;
    `sha256` is over the whole file, where a sidecar names it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    size_bytes: int
    mtime_ns: int
    quick_sha256: str
    dense_sha256: str
    sha256: str | None = None


class FolderIdentity(BaseModel):
    """A folder of images: one digest over the names of all, one over when its directories changed.

    A sample of its images is recorded as files.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    images: int
    names_sha256: str
    times_sha256: str


class DataIdentity(BaseModel):
    """All that a run reads."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    files: tuple[FileIdentity, ...]
    folders: tuple[FolderIdentity, ...] = ()


class InterruptedReadingError(HpctrainError):
    """The process was needed for something else, so reading was given up."""


@dataclass(frozen=True)
class DataComparison:
    """How recorded data differ from the files as they are now.

    `changed` has a sentence for each file with other content; `touched` are new records of those
    that only have another time; `unread` has a sentence for each that could not be read, which
    says nothing about its content.
    """

    changed: tuple[str, ...] = ()
    touched: tuple[FileIdentity | FolderIdentity, ...] = ()
    unread: tuple[str, ...] = ()


def identify_file(path: Path, sha256: str | None = None) -> FileIdentity:
    """Record one file. Raises OSError."""
    status = path.stat()
    return FileIdentity(
        path=str(path),
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        quick_sha256=_sampled(path, status.st_size, _QUICK_BLOCKS),
        dense_sha256=_sampled(path, status.st_size, _DENSE_BLOCKS),
        sha256=sha256,
    )


def identify_folder(root: Path) -> tuple[FolderIdentity, tuple[FileIdentity, ...]]:
    """Record a folder of images and a sample of its files. Raises OSError."""
    times = _times_sha256(root)
    names = _image_names(root)
    folder = FolderIdentity(
        path=str(root),
        images=len(names),
        names_sha256=_names_sha256(names),
        times_sha256=times,
    )
    sample = [root / name for name in evenly(names, _SAMPLED_IMAGES)]
    return folder, tuple(identify_file(path) for path in sample)


def evenly(names: Sequence[str], count: int) -> list[str]:
    """At most `count` of them, from all over the list."""
    step = max(1, len(names) // count)
    return list(names[::step])[:count]


def read_identity(path: Path) -> DataIdentity | None:
    """The record of a run; None for runs of older versions. Raises OSError, HpctrainError."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return DataIdentity.model_validate_json(text)
    except ValidationError as error:
        refuse_newer(path, text, DataIdentity)
        raise HpctrainError(f"{path} is damaged, so the data cannot be compared with it") from error


def write_identity(path: Path, identity: DataIdentity) -> None:
    replace_text(path, identity.model_dump_json(indent=1), mode=0o600)


def compare(
    identity: DataIdentity, interrupted: Callable[[], bool] = lambda: False
) -> DataComparison:
    """Compare all recorded files with the record, several at a time.

    Raises InterruptedReadingError soon after `interrupted` returns True.
    """
    changed: list[str] = []
    touched: list[FileIdentity | FolderIdentity] = []
    unread: list[str] = []

    def look(one: FileIdentity | FolderIdentity) -> str | FileIdentity | FolderIdentity | OSError:
        try:
            if isinstance(one, FolderIdentity):
                return _compare_folder(one)
            return _compare_file(one, interrupted)
        except OSError as error:
            return error

    everything: tuple[FileIdentity | FolderIdentity, ...] = (*identity.folders, *identity.files)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="data") as pool:
        for one, found in zip(everything, pool.map(look, everything), strict=True):
            if isinstance(found, str):
                changed.append(f"{one.path} {found}")
            elif isinstance(found, OSError):
                unread.append(f"{one.path} cannot be read: {found.strerror or found}")
            elif found != one:
                touched.append(found)
    return DataComparison(tuple(changed), tuple(touched), tuple(unread))


def with_touched(identity: DataIdentity, comparison: DataComparison) -> DataIdentity:
    """Update the record with new times, so that the next start reads less."""
    files = {one.path: one for one in comparison.touched if isinstance(one, FileIdentity)}
    folders = {one.path: one for one in comparison.touched if isinstance(one, FolderIdentity)}
    return identity.model_copy(
        update={
            "files": tuple(files.get(one.path, one) for one in identity.files),
            "folders": tuple(folders.get(one.path, one) for one in identity.folders),
        }
    )


def recorded_again(identity: DataIdentity) -> DataIdentity:
    """Record the same files as they are now; the record of an unreadable one stays."""

    def file_now(known: FileIdentity) -> FileIdentity:
        with contextlib.suppress(OSError):
            return identify_file(Path(known.path))
        return known

    def folder_now(known: FolderIdentity) -> FolderIdentity:
        with contextlib.suppress(OSError):
            return identify_folder(Path(known.path))[0]
        return known

    return identity.model_copy(
        update={
            "files": tuple(map(file_now, identity.files)),
            "folders": tuple(map(folder_now, identity.folders)),
        }
    )


def _compare_file(known: FileIdentity, interrupted: Callable[[], bool]) -> str | FileIdentity:
    """What has changed, in words, or the file's record, with another time if only that has."""
    path = Path(known.path)
    status = path.stat()
    if status.st_size != known.size_bytes:
        return f"has {status.st_size} bytes instead of {known.size_bytes}"
    if _sampled(path, status.st_size, _QUICK_BLOCKS) != known.quick_sha256:
        return "has the same size and other content"
    if status.st_mtime_ns == known.mtime_ns:
        return known
    if known.sha256 is not None and status.st_size <= WHOLE_LIMIT_BYTES:
        same = _sha256(path, interrupted) == known.sha256
    else:
        same = _sampled(path, status.st_size, _DENSE_BLOCKS) == known.dense_sha256
    if not same:
        return "has the same size and other content"
    return known.model_copy(update={"mtime_ns": status.st_mtime_ns})


def _compare_folder(known: FolderIdentity) -> str | FolderIdentity:
    root = Path(known.path)
    times = _times_sha256(root)
    if times == known.times_sha256:
        return known
    names = _image_names(root)
    if _names_sha256(names) != known.names_sha256:
        return f"has {len(names)} images instead of {known.images}, or other names"
    return known.model_copy(update={"times_sha256": times})


def _sampled(path: Path, size_bytes: int, blocks: int) -> str:
    """SHA-256 over the first, the last and other blocks, or over all of a small file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for place in _places(size_bytes, blocks):
            stream.seek(place)
            digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _places(size_bytes: int, blocks: int) -> Iterator[int]:
    """Where blocks begin: one at a random place of each stretch, the same for the same size."""
    if size_bytes <= blocks * _BLOCK_BYTES:
        yield from range(0, size_bytes, _BLOCK_BYTES)
        return
    dice = random.Random(size_bytes)
    stretch = (size_bytes - 2 * _BLOCK_BYTES) // (blocks - 2)
    yield 0
    for number in range(blocks - 2):
        begin = _BLOCK_BYTES + number * stretch
        yield begin + dice.randrange(max(1, stretch - _BLOCK_BYTES))
    yield size_bytes - _BLOCK_BYTES


def _sha256(path: Path, interrupted: Callable[[], bool]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            if interrupted():
                raise InterruptedReadingError(f"reading {path} was given up")
            digest.update(block)
    return digest.hexdigest()


def _times_sha256(root: Path) -> str:
    """Adding, removing and renaming a file change the time of its directory (stat(2))."""
    names = class_directories(root)
    times = [f"{name} {os.stat(root / name).st_mtime_ns}" for name in names]
    return hashlib.sha256("\n".join(times).encode(errors="surrogateescape")).hexdigest()


def _image_names(root: Path) -> list[str]:
    """Relative to the folder, as the trainer lists them."""
    return sorted(
        os.path.relpath(os.path.join(directory, file), root)
        for name in class_directories(root)
        for directory, _, files in os.walk(root / name)
        for file in files
        if is_image(file)
    )


def _names_sha256(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()
