"""Follow the metrics of a run and write them, until it is told that the attempt ends.

Belongs here: when what is written, by one process at a time, and what a failure of one writer means
for the other. Does not belong here: the writers (`event_files`, `wandb_run`), the process
(`__main__`).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hpctrain.base.durable import shared_mode
from hpctrain.base.errors import HpctrainError, UsageError

# So often metrics are read; plan/footprint/footprint.yaml counts by it.
FOLLOW_SECONDS = 10.0


class TrackingInUseError(UsageError):
    """Another process writes the same files."""


class WriterLock:
    """A lock beside the files that it protects, from its making until `release`.

    Without locks on the file system nothing is kept apart; TensorBoard then still shows each step
    once, because each process has event files of its own.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises TrackingInUseError if another process has it, OSError."""
        flags = os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags, shared_mode(path.parent, 0o600))
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self.release()
                raise TrackingInUseError(
                    f"another process is writing {path.parent}",
                    hint="the job of a run does that while it runs",
                ) from None

    def release(self) -> None:
        os.close(self._descriptor)


class Writer(Protocol):
    """Writes what has come since the last call. `last`: there is no other call."""

    name: str

    def write(self, *, last: bool) -> None: ...

    def close(self) -> None: ...


class Follower:
    """Calls all writers in turn. One that fails is left out from then on; the others go on.

    An OSError may pass: the run directory may be away for a while. It counts if it is the last.
    """

    def __init__(self, makers: list[Callable[[], Writer]]) -> None:
        self._makers = makers
        self._writers: list[Writer] = []
        self.failures: list[str] = []

    def follow(self, wait: Callable[[float], bool]) -> None:
        """Write until `wait`, called with seconds, returns True; then once more, and close.

        Ends sooner if nothing can be written.
        """
        self._make(last=False)
        while (self._writers or self._makers) and not wait(FOLLOW_SECONDS):
            self._make(last=False)
            self._write(last=False)
        self.finish()

    def finish(self) -> None:
        """Write what there is and close all writers."""
        self._make(last=True)
        self._write(last=True)
        for writer in self._writers:
            self._try(writer.name, writer.close)
        self._writers = []

    def _make(self, *, last: bool) -> None:
        makers, self._makers = self._makers, []
        for make in makers:
            try:
                self._writers.append(make())
            except TrackingInUseError as error:
                if last:
                    self.failures.append(f"{error}; {error.hint}")
                else:  # the process of an earlier attempt may be about to end
                    self._makers.append(make)
            except ImportError as error:
                self.failures.append(_not_installed(error))
            except (HpctrainError, OSError) as error:
                self.failures.append(str(error))

    def _write(self, *, last: bool) -> None:
        for writer in tuple(self._writers):

            def write(writer: Writer = writer) -> None:
                writer.write(last=last)

            if not self._try(writer.name, write, passing=not last):
                self._writers.remove(writer)

    def _try(self, name: str, call: Callable[[], None], *, passing: bool = False) -> bool:
        """Call a writer; False if it is of no use any more."""
        try:
            call()
        except OSError as error:
            if not passing:
                self.failures.append(f"{name}: {error}")
            return passing
        except ImportError as error:
            self.failures.append(_not_installed(error))
            return False
        except Exception as error:
            # wandb raises errors of many classes, and none of them may keep the other from writing
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            return False
        return True


def _not_installed(error: ImportError) -> str:
    return f"{error.name or error} is not installed"
