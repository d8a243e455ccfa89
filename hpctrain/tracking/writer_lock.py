"""Keep two processes from writing the same event files or W&B run at the same time.

Belongs here: that lock. Does not belong here: what is written. Without locks on the file system
nothing is kept apart; TensorBoard then still shows each step once, because each process has event
files of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from hpctrain.base.durable import shared_mode
from hpctrain.base.errors import UsageError

_HELD = (errno.EACCES, errno.EAGAIN)


class TrackingInUseError(UsageError):
    """Another process writes the same files."""


class WriterLock:
    """A lock beside the files that it protects, from its making until `release`."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises TrackingInUseError if another process has it, OSError."""
        flags = os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags, shared_mode(path.parent, 0o600))
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                self.release()
                raise TrackingInUseError(
                    f"another process is writing {path.parent}",
                    hint="the job of a run does that while it runs",
                ) from None

    def release(self) -> None:
        os.close(self._descriptor)
