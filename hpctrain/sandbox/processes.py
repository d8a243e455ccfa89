"""List, identify and end processes by /proc.

psutil is not used, because `sandbox.json` must identify a process across restarts of hpctrain:
psutil has start times only as wall-clock time, which changes with the clock, and its `open_files`
omits deleted logs. The field of proc(5) that is needed comes with all others in one read. Belongs
here: reading proc(5), signals, waiting. Does not belong here: which daemon a process is (see
`daemons`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock

_PROC = Path("/proc")
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ProcessId:
    """Unique identity of a process: a PID is reused, a PID with a start time is not."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class Process:
    """One running process; `state` is the letter of proc(5), `T` for a stopped one."""

    identity: ProcessId
    parent_pid: int
    name: str
    state: str

    @property
    def pid(self) -> int:
        return self.identity.pid


def parse_stat(text: str) -> Process:
    """Parse /proc/PID/stat; the name in parentheses may hold spaces and parentheses (proc(5))."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    # proc(5) counts from 1: state is field 3, ppid 4, starttime 22; `fields` begins with field 3.
    identity = ProcessId(int(pid), int(fields[19]))
    return Process(identity, int(fields[1]), name, fields[0])


def find_process(pid: int) -> Process | None:
    """Return the running process with this PID. Zombies are dead: PID 1 may never reap them."""
    try:
        process = parse_stat((_PROC / str(pid) / "stat").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return None if process.state in "ZX" else process


def is_alive(identity: ProcessId) -> bool:
    """Check that this very process still runs (or is stopped)."""
    process = find_process(identity.pid)
    return process is not None and process.identity == identity


def all_processes() -> tuple[Process, ...]:
    """List every running process on this machine except this one."""
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    processes = (find_process(pid) for pid in pids if pid != os.getpid())
    return tuple(process for process in processes if process is not None)


def read_environment(pid: int) -> dict[str, str]:
    """Read the initial environment of a process; empty when it is gone or not readable."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def read_command_line(pid: int) -> tuple[str, ...]:
    """Read the arguments of a process; empty when it is gone."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0"))


def open_files(pid: int) -> Iterator[str]:
    """Yield the names of the files that a process holds open."""
    with contextlib.suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor)


def descendants(roots: Iterable[int], processes: Iterable[Process]) -> tuple[Process, ...]:
    """List all descendants of `roots`, without the roots themselves."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent_pid, []).append(process)
    result: list[Process] = []
    todo = list(roots)
    while todo:
        below = children.get(todo.pop(), [])
        result += below
        todo += [process.pid for process in below]
    return tuple(result)


def send(identities: Iterable[ProcessId], number: signal.Signals) -> None:
    """Send a signal to the processes that still run."""
    for identity in identities:
        if is_alive(identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, number)


def end(identities: Iterable[ProcessId], grace_seconds: float) -> None:
    """Send SIGTERM, after `grace_seconds` SIGKILL, and wait for the processes to end."""
    targets = tuple(identities)
    send(targets, signal.SIGTERM)
    # A stopped process handles SIGTERM only when it runs again.
    send(targets, signal.SIGCONT)
    if not await_condition(lambda: not any(map(is_alive, targets)), grace_seconds):
        kill(targets)


def kill(identities: Iterable[ProcessId]) -> None:
    """Send SIGKILL and wait up to a minute; a process in state D may take longer."""
    targets = tuple(identities)
    send(targets, signal.SIGKILL)
    await_condition(lambda: not any(map(is_alive, targets)), timeout_seconds=60)


def await_condition(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll a condition every 50 ms; returns False at the timeout."""
    deadline = clock.monotonic() + timeout_seconds
    while not condition():
        if clock.monotonic() > deadline:
            return False
        clock.sleep(_POLL_SECONDS)
    return True
