"""Counts and removes files below a directory, never following a link out of it, and what is left.

Belongs here: walking. Does not belong here: what may be removed (`hpctrain.runs.clean`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Directory:
    """A directory of the login node; bytes and inodes that are left to this user, None: unknown.

    `inodes` is 0 on file systems that do not count them (statvfs(3), f_files).
    """

    path: str
    exists: bool = True
    free_bytes: int | None = None
    free_inodes: int | None = None
    inodes: int | None = None


@dataclass(frozen=True)
class DiskUsage:
    """Files (and links) and the bytes in them; directories are not counted."""

    files: int = 0
    size_bytes: int = 0

    def __add__(self, other: DiskUsage) -> DiskUsage:
        return DiskUsage(self.files + other.files, self.size_bytes + other.size_bytes)


def walk(path: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a directory but directories, in the order of names; OSError."""
    with os.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path))
        else:
            yield entry


def usage_of(path: Path) -> DiskUsage:
    """Count a file or all files below a directory; nothing for a path that is not there."""
    try:
        if path.is_symlink() or not path.is_dir():
            return DiskUsage(1, path.lstat().st_size)
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in walk(path)]
    except FileNotFoundError:
        return DiskUsage()
    return DiskUsage(len(sizes), sum(sizes))


def total_usage(paths: Iterable[Path]) -> DiskUsage:
    """Count the files at and below all of these paths."""
    return sum(map(usage_of, paths), DiskUsage())


def remove_tree(path: Path) -> None:
    """Remove a file, a link (not what it points to), or a directory with all that is below.

    No error for what is not there. Raises OSError for what cannot be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)  # does not follow links below, either


def directory_facts(path: Path) -> Directory:
    """Count what is left in the nearest directory that exists."""
    absolute = Path(os.path.abspath(path))
    nearest = next((one for one in (absolute, *absolute.parents) if one.is_dir()), Path("/"))
    try:
        left = os.statvfs(nearest)
    except OSError:
        return Directory(str(absolute), absolute.is_dir())
    return Directory(
        path=str(absolute),
        exists=absolute.is_dir(),
        free_bytes=left.f_bavail * left.f_frsize,
        free_inodes=left.f_favail,
        inodes=left.f_files,
    )
