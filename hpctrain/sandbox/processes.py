"""Processes as /proc shows them: who they are, whether they live, how to end them.

Belongs here: reading proc(5), signals, waiting. Does not belong here: which daemon is which
(see `daemons`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken: PIDs are used again, a start time with a PID is not."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class Process:
    """One living process; `state` is the letter of proc(5), `T` for a stopped one."""

    identity: ProcessId
    parent_pid: int
    name: str
    state: str

    @property
    def pid(self) -> int:
        return self.identity.pid


def parse_stat(text: str) -> Process:
    """One /proc/PID/stat; the name in parentheses may hold spaces and parentheses (proc(5))."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    # proc(5) counts from 1: state is field 3, ppid 4, starttime 22; `fields` begins with field 3.
    identity = ProcessId(int(pid), int(fields[19]))
    return Process(identity, int(fields[1]), name, fields[0])


def find_process(pid: int) -> Process | None:
    """The living process with this PID. A zombie is dead: a PID 1 that never reaps keeps them."""
    try:
        process = parse_stat((_PROC / str(pid) / "stat").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return None if process.state in "ZX" else process


def is_alive(identity: ProcessId) -> bool:
    """Whether this very process still runs (or is stopped)."""
    process = find_process(identity.pid)
    return process is not None and process.identity == identity


def all_processes() -> tuple[Process, ...]:
    """Every living process on this machine, except ourselves."""
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    found = (find_process(pid) for pid in pids if pid != os.getpid())
    return tuple(process for process in found if process is not None)


def read_environment(pid: int) -> dict[str, str]:
    """The environment at the start of the process; empty when it may not be read or is gone."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def read_command_line(pid: int) -> tuple[str, ...]:
    """The arguments of the process; empty when it is gone."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0"))


def open_files(pid: int) -> Iterator[str]:
    """The names of the files that the process holds open."""
    with contextlib.suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor)


def descendants(roots: Iterable[int], processes: Iterable[Process]) -> tuple[Process, ...]:
    """All children of `roots`, their children, and so on; the roots themselves are left out."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent_pid, []).append(process)
    found: list[Process] = []
    todo = list(roots)
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return tuple(found)


def send(identities: Iterable[ProcessId], number: signal.Signals) -> None:
    """Send a signal to those that still live."""
    for identity in identities:
        if is_alive(identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, number)


def end(identities: Iterable[ProcessId], grace_seconds: float) -> None:
    """Ask with SIGTERM, insist with SIGKILL after `grace_seconds`, and wait for the end."""
    left = tuple(identities)
    send(left, signal.SIGTERM)
    # A stopped process takes note of SIGTERM only when it runs again.
    send(left, signal.SIGCONT)
    if not await_condition(lambda: not any(map(is_alive, left)), grace_seconds):
        kill(left)


def kill(identities: Iterable[ProcessId]) -> None:
    """SIGKILL, and wait until they are gone; a process in state D may take longer than we wait."""
    left = tuple(identities)
    send(left, signal.SIGKILL)
    await_condition(lambda: not any(map(is_alive, left)), timeout_seconds=5)


def await_condition(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Ask every 50 ms; False when the time is over and the answer is still no."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
