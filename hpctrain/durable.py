"""Files that survive a crash: atomic replacement, durable appends, exclusive creation.

Belongs here: the few system-call sequences that make a file either whole or absent on a shared
file system. Does not belong here: what the files mean (see `store` and `checkpoints`).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def fsync_directory(directory: Path) -> None:
    """Make renames and creations inside `directory` durable (fsync(2), NOTES)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Flush one file that somebody else wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write `text` to `path` so that a reader sees the old or the new content, never a mixture."""
    temporary = _temporary(path)
    try:
        _write_new(temporary, text, mode=mode, durable=durable)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def append_line(path: Path, line: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Append one line; a torn last line of a crashed writer is closed first, so it stays alone.

    O_APPEND makes the position atomic for writers on one host; `durable` adds an fsync.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)
    try:
        prefix = "" if _ends_with_newline(descriptor) else "\n"
        _write_all(descriptor, f"{prefix}{line}\n".encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_exclusive(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """Create `path` with `text`; False when somebody else has created it first.

    The name appears together with its content (link(2) of a complete file), so a reader that
    sees the name can read it, on NFS too.
    """
    temporary = _temporary(path)
    try:
        _write_new(temporary, text, mode=mode, durable=True)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def _temporary(path: Path) -> Path:
    """A name beside `path` that no other writer uses: not another node, process or thread."""
    writer = f"{os.uname().nodename}.{os.getpid()}.{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{writer}.tmp")


def _write_new(path: Path, text: str, *, mode: int, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        _write_all(descriptor, text.encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
