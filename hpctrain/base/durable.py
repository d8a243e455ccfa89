"""Files that survive a crash: atomic replacement, durable appends, exclusive creation.

Belongs here: the system-call sequences that make a file either complete or absent on a shared file
system, and the errors that mean that the file system itself has failed. Does not belong here: the
contents of the files (see `records` and `checkpoints`).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# Errors that mean that a file system is full.
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors that mean that a file system cannot be reached or used, for any file: nfs(5) (soft mounts,
# stale handles), Lustre after an eviction (EIO, ESHUTDOWN), a read-only remount.
_FAULT_ERRNOS = frozenset(
    {
        *(errno.EIO, errno.EROFS, errno.ESTALE, errno.ESHUTDOWN, errno.ENOTCONN, errno.ETIMEDOUT),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECOMM, errno.EREMOTEIO),
        *(errno.ENODEV, errno.ENXIO, errno.ENOLCK, errno.EKEYEXPIRED),
    }
)
# A retry searches this much of the end of a file for lines that a failed attempt already wrote.
_LOOK_BACK_BYTES = 1 << 16


def is_storage_fault(error: BaseException) -> bool:
    """Whether an error means that a file system is unusable, not that one file is missing or that
    the disk is full."""
    return isinstance(error, OSError) and error.errno in _FAULT_ERRNOS


def shared_mode(directory: Path, mode: int) -> int:
    """Choose the mode for a new entry of `directory`: private, or shared like the directory.

    A user who shares a directory (chmod(1), setfacl(1)) also shares its future entries, and the
    group bits of a new file's mode mask the ACL entries that it inherits (acl(5), OBJECT CREATION
    AND DEFAULT ACLs). So a private mode gets those group bits of the directory that match its own
    bits for the owner. Other modes do not change.
    """
    if mode & 0o077:
        return mode
    return mode | (os.stat(directory).st_mode & (mode >> 3) & 0o070)


def make_private_directory(directory: Path) -> None:
    """Make one directory, private or shared like its parent; no error if it exists."""
    directory.mkdir(exist_ok=True, mode=shared_mode(directory.parent, 0o700))


def fsync_directory(directory: Path) -> None:
    """Make renames and creations inside `directory` durable (fsync(2), NOTES)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Flush one file that another process wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace the content of `path`: readers see the old or the new text, never a mixture."""
    replace_bytes(path, text.encode(), mode=mode, durable=durable)


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace the content of `path`, as `replace_text` does."""
    temporary = _temporary(path)
    try:
        _write_new(temporary, data, mode=mode, durable=durable)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def append_line(
    path: Path, line: str, *, mode: int = 0o644, durable: bool = True, create: bool = True
) -> None:
    """Append one line; an incomplete last line of a crashed writer is terminated first.

    O_APPEND makes the position atomic for writers on one host; `durable` adds an fsync. Without
    `create` a missing file is an error.
    """
    flags = os.O_RDWR | os.O_APPEND
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        if not create:
            raise
        descriptor = os.open(path, flags | os.O_CREAT, shared_mode(path.parent, mode))
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        prefix = "\n" if is_torn else ""
        _write_all(descriptor, f"{prefix}{line}\n".encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineBuffer:
    """Append lines to one file, in order, and keep them in memory while that fails.

    `mode` and `durable` as for `append_line`. At most `most_lines` are kept. Before the file is
    created again, `may_create` is called, which raises OSError if that is not allowed. Thread-safe.
    """

    def __init__(
        self,
        path: Path,
        *,
        may_create: Callable[[], None],
        mode: int = 0o644,
        durable: bool = True,
        most_lines: int = 100_000,
    ) -> None:
        self.path = path
        self._may_create = may_create
        self._mode, self._durable, self._most_lines = mode, durable, most_lines
        self._waiting: list[str] = []
        self._tried = False
        self._lock = threading.Lock()

    @property
    def waiting(self) -> tuple[str, ...]:
        """Lines that are not yet in the file, oldest first."""
        return tuple(self._waiting)

    def append(self, line: str) -> OSError | None:
        """Write the waiting lines and `line`; return the error if that fails.

        Raises that error if more than `most_lines` are waiting.
        """
        with self._lock:
            self._waiting.append(line)
            error = self._write()
            if error is not None and len(self._waiting) > self._most_lines:
                raise error
            return error

    def keep(self, line: str) -> None:
        """Add `line` to the waiting lines and write nothing now."""
        with self._lock:
            self._waiting.append(line)

    def flush(self) -> OSError | None:
        """Write the waiting lines; return the error if that fails."""
        with self._lock:
            return self._write()

    def _write(self) -> OSError | None:
        if not self._waiting:
            return None
        try:
            # a failed attempt may have written lines: fsync(2) can fail after write(2)
            lines = self._missing() if self._tried else self._waiting
            text = "\n".join(lines)
            if lines:
                try:
                    append_line(self.path, text, durable=self._durable, create=False)
                except FileNotFoundError:
                    self._may_create()
                    append_line(self.path, text, mode=self._mode, durable=self._durable)
        except OSError as error:
            self._tried = True
            return error
        self._waiting, self._tried = [], False
        return None

    def _missing(self) -> Sequence[str]:
        """List the waiting lines that a failed attempt did not write."""
        try:
            with self.path.open("rb") as stream:
                needed = sum(len(line.encode()) + 1 for line in self._waiting)
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - needed - _LOOK_BACK_BYTES))
                written = set(stream.read().splitlines())
        except FileNotFoundError:
            return self._waiting
        return [line for line in self._waiting if line.encode() not in written]


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`: it names the old or the new one, never nothing."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_exclusive(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """Create `path` with `text`; return False if it already exists.

    The name appears together with its content (link(2) of a complete file), also on NFS.
    """
    temporary = _temporary(path)
    try:
        _write_new(temporary, text.encode(), mode=mode, durable=True)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def _temporary(path: Path) -> Path:
    """Choose a name beside `path` that no other node, process or thread uses."""
    writer = f"{os.uname().nodename}.{os.getpid()}.{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{writer}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a file is one that an interrupted replacement has left."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _write_new(path: Path, data: bytes, *, mode: int, durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, shared_mode(path.parent, mode))
    try:
        _write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
