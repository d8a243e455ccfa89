"""A shell on a terminal of 80 columns in which one command after the other is typed.

Belongs here: the terminal and the answers. Does not belong here: what is typed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 80
_PATIENCE_SECONDS = 600.0
_END = re.compile(rb"\x01(\d+)\x01\r?\n")


@dataclass
class TypedShell:
    """bash that reads commands from a pipe and prints on a terminal."""

    process: subprocess.Popen[bytes]
    terminal: int

    def type(self, command: str) -> tuple[int, str]:
        """Run one command in the shell itself; returns its exit code and all that it printed."""
        typed = f"{{\n{command}\n}} </dev/null; printf '\\001%s\\001\\n' $?\n"
        assert self.process.stdin is not None
        self.process.stdin.write(typed.encode())
        self.process.stdin.flush()
        printed = b""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (end := _END.search(printed)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"`{command}` never ended: {printed.decode(errors='replace')}"
            if select.select([self.terminal], [], [], left)[0]:
                printed += os.read(self.terminal, 65536)
        return int(end[1]), printed[: end.start()].decode()


@contextlib.contextmanager
def typed_shell(directory: Path, environment: Mapping[str, str]) -> Iterator[TypedShell]:
    """A shell that starts in this directory with this environment and nothing else."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile"],
        stdin=subprocess.PIPE,
        stdout=follower,
        stderr=follower,
        cwd=directory,
        env=dict(environment),
        start_new_session=True,
    )
    os.close(follower)
    try:
        yield TypedShell(process, leader)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        process.wait(timeout=60)
        os.close(leader)
