"""Run an engine as a child: its start behind a shield, its output, its end.

Belongs here: the process and its last lines. Does not belong here: asking it anything (`answers`),
when it is ended (`drain`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base import clock
from hpctrain.serve.replica.failures import EngineCrashedError, EngineLeftError, ReplicaError
from hpctrain.serve.replica.shield import DIRECTORY_VARIABLE

_TAIL_LINES = 60
_READ_SECONDS = 2.0
_POLL_SECONDS = 0.05
_ADDRESS_TAKEN = re.compile(r"(?i)address already in use|EADDRINUSE|errno 98")
# The line of a traceback that names the error, such as `torch.OutOfMemoryError: CUDA out of ...`.
_ERROR = re.compile(r"(?:^|\s)(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b:?.*")


class EngineProcess:
    """One process group of an engine, from its start to its end."""

    def __init__(
        self, words: tuple[str, ...], environment: Mapping[str, str], directory: Path | None = None
    ) -> None:
        """Start it, in `directory` if that is given. Raises OSError."""
        self._place = tempfile.TemporaryDirectory(prefix="hpctrain-engine-")
        shield = (sys.executable, "-P", "-m", "hpctrain.serve.replica.shield")
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            [*shield, str(os.getpid()), *words],
            env={**os.environ, **environment, DIRECTORY_VARIABLE: self._place.name},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name="engine-output")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(self._tail)

    def failure(self) -> ReplicaError | None:
        """How it has ended, which nobody has asked for; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(_READ_SECONDS)
        if code == 0:
            return EngineLeftError("the engine has left with exit code 0, unasked", self.tail)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        errors = [line.strip() for line in self._tail if _ERROR.search(line)]
        words = f": {errors[-1]}" if errors else ""
        return EngineCrashedError(f"the engine has ended with {how}{words}"[:400], self.tail)

    @property
    def lacks_its_port(self) -> bool:
        """Whether it has ended because another process has its port."""
        ended = self._process.poll() is not None
        return ended and _ADDRESS_TAKEN.search(self.tail) is not None

    def ask_to_end(self) -> None:
        """Send SIGINT to the engine and its own children, which do not hear SIGTERM.

        Not to all: workers of a tensor parallel group end at once by it, and the process above
        them is the one that finishes what has begun.
        """
        for pid in (self.pid, *_children(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def end(self, seconds: float) -> bool:
        """Ask it to end, wait, and kill what is left of its group; True if it left by itself."""
        deadline = clock.monotonic() + seconds
        if self._process.poll() is None:
            self.ask_to_end()
        while self._process.poll() is None and clock.monotonic() < deadline:
            clock.sleep(_POLL_SECONDS)
        left = self._process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_READ_SECONDS)
        self._place.cleanup()
        return left

    def _read(self) -> None:
        """Copy its output line by line into this task's, which is the log of the rank."""
        stream = self._process.stdout
        assert stream is not None
        for line in stream:
            self._tail.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()


def _children(pid: int) -> list[int]:
    """List the children of a process (proc(5), /proc/PID/task/TID/children)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found
