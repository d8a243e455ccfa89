"""Put the rank before each line that ranks below an agent write, into the agent's own log.

srun labels what its own tasks write (`--label`), and the agent is the only one on its node. Each
rank writes into a named pipe that the agent reads (fifo(7)), so the log of the node looks as it
does without an agent. Does not belong here: reading such a log (`hpctrain.records.old_launches`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import tempfile
import threading
from pathlib import Path

_READ_BYTES = 1 << 16
# A line that is still longer, such as a progress bar without an end, is written in pieces.
_LONGEST_LINE_BYTES = 1 << 16
_WAIT_SECONDS = 0.2


class LabelledOutput:
    """Named pipes of the ranks of this node, and the thread that reads them."""

    def __init__(self, output: int = 1) -> None:
        self._output = output
        self._directory = Path(tempfile.mkdtemp(prefix="hpctrain-logs-"))
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, bytes] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._relay, daemon=True, name="rank output")
        self._thread.start()

    def pipe_of(self, rank: int) -> Path:
        """Make the pipe that a rank opens as its log; it may be opened and closed several times."""
        path = self._directory / str(rank)
        os.mkfifo(path, 0o600)
        # Opened for writing too, so that it neither ends nor keeps a rank waiting for its reader.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._lines[rank] = b""
        self._selector.register(descriptor, selectors.EVENT_READ, rank)
        return path

    def close(self) -> None:
        """Write what the ranks have written until now, and remove the pipes."""
        self._stopping.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _relay(self) -> None:
        while True:
            stopping = self._stopping.is_set()
            ready = self._selector.select(0 if stopping else _WAIT_SECONDS)
            for key, _ in ready:
                with contextlib.suppress(BlockingIOError):
                    self._write(key.data, os.read(key.fd, _READ_BYTES))
            if stopping and not ready:
                break
        for rank, rest in self._lines.items():
            if rest:
                self._write(rank, b"\n")

    def _write(self, rank: int, data: bytes) -> None:
        *whole, rest = (self._lines[rank] + data).split(b"\n")
        if len(rest) >= _LONGEST_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        self._lines[rank] = rest
        if whole:
            text = memoryview(b"".join(b"%d: %s\n" % (rank, line) for line in whole))
            with contextlib.suppress(OSError):  # a full disk must not end the ranks
                while text:
                    text = text[os.write(self._output, text) :]
