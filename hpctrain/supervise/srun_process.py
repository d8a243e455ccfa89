"""Run the `srun` process of a launch, read what it reports, and receive the supervisor's signals.

Belongs here: processes, signal handlers and the job's log. Does not belong here:
reading a line (`hpctrain.slurm.messages`), what follows from it (`classify`).
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType

from hpctrain.base import clock, reserved_ports
from hpctrain.records.run_records import TrainerExit
from hpctrain.slurm.messages import (
    StepNotice,
    TaskFailure,
    read_notice,
    read_task_failure,
    waits_for_step,
)

_PORT_STEP = 7  # between the launches of an attempt: a few ports may be passed over
_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_FINAL = frozenset({"TERM", "INT", "HUP"})


class Signals:
    """Remembers which signals have arrived; the handlers do nothing else."""

    def __init__(self) -> None:
        self._arrived: list[str] = []
        self._dismissed = 0
        self._taken = 0

    def install(self) -> None:
        """Catch what Slurm sends to a batch script, and what a person at a terminal sends.

        Signals that `__main__` has blocked until now are delivered here.
        """

        def remember(number: int, frame: FrameType | None) -> None:
            self._arrived.append(signal.Signals(number).name.removeprefix("SIG"))

        for number in _CAUGHT:
            signal.signal(number, remember)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrived)

    @property
    def final(self) -> bool:
        """True once the job is being ended: only KillWait seconds are left."""
        return any(name in _FINAL for name in self.standing)

    @property
    def standing(self) -> tuple[str, ...]:
        """The signals without those that were found not to come from Slurm."""
        return tuple(self._arrived[self._dismissed :])

    def take(self) -> tuple[str, ...]:
        """Return the signals that arrived since the last call."""
        taken, self._taken = self._taken, len(self._arrived)
        return tuple(self._arrived[taken : self._taken])

    def dismiss(self, count: int) -> None:
        """Record that the first `count` signals did not come from Slurm and do not end the job."""
        self._dismissed = max(self._dismissed, count)


class SrunProcess:
    """A running `srun`. Its stderr goes to the job's log and is parsed for reports of failures."""

    def __init__(self, argv: list[str], environment: Mapping[str, str]) -> None:
        self._failures: list[TaskFailure] = []
        self._notices: list[StepNotice] = []
        self.waits_for_step = False
        self.process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

        def read() -> None:
            for line in self.process.stderr or ():
                write_log(line)
                self.waits_for_step = waits_for_step(line, self.waits_for_step)
                failure = read_task_failure(line)
                if failure is None:
                    if (notice := read_notice(line)) is not None:
                        self._notices.append(notice)
                elif failure.code != TrainerExit.YIELDED:
                    self._failures.append(replace(failure, at=clock.now()))

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return srun's exit code (negative: the signal that killed it), None while it runs."""
        return self.process.poll()

    def finish_reading(self, timeout_seconds: float = 2.0) -> None:
        """Wait for srun's last lines; orphans may keep the pipe open for ever."""
        self._reader.join(timeout_seconds)

    def kill(self) -> None:
        """Kill srun itself; its step is killed through Slurm."""
        if self.process.poll() is None:
            self.process.kill()

    @property
    def failures(self) -> tuple[TaskFailure, ...]:
        return tuple(self._failures)

    @property
    def notices(self) -> tuple[StepNotice, ...]:
        return tuple(self._notices)


def reserve_port(attempt: str, epoch: int, ports: tuple[int, int] | None = None) -> socket.socket:
    """Reserve a free port of this host for rank 0, outside the ephemeral range.

    Returns a UDP socket that is bound to the port's number until the caller closes it. Rank 0
    listens on TCP, and does so seconds later, when torch is imported: meanwhile no other supervisor
    on this host takes the number. `attempt` identifies run directory and job. The search starts at
    a number that differs between the launches of an attempt, so that remains of an earlier one do
    not connect to the next (pytorch/pytorch#126510). `ports` are the first and the last that the
    site allows. Raises OSError without a free port.
    """
    first, last = ports or (reserved_ports.FIRST, reserved_ports.FIRST + reserved_ports.COUNT - 1)
    count = last - first + 1
    start = (zlib.crc32(attempt.encode()) + _PORT_STEP * epoch) % count
    numbers = (first + (start + offset) % count for offset in range(count))
    reserved = reserved_ports.reserve("", numbers)
    if reserved is None:
        raise OSError(f"no free port between {first} and {last}")
    return reserved


# -- Write the messages of the supervisor and of srun into the job's log, which is stderr -------
# Slurm has opened the log in the run directory, so writing may fail for a while. Then the lines are
# buffered and written with the next one.


# More lines than a supervisor writes in an hour; the oldest are dropped.
_MOST_BUFFERED_LINES = 1000
_buffered: deque[str] = deque(maxlen=_MOST_BUFFERED_LINES)
# The reader of srun's stderr writes, too; a signal may interrupt a thread that is writing.
_lock = threading.RLock()


def write_log(text: str) -> None:
    """Write text with its line end into the job's log, or buffer it until that is possible."""
    with _lock:
        _buffered.append(text)
        with contextlib.suppress(OSError):
            while _buffered:
                sys.stderr.write(_buffered[0])
                sys.stderr.flush()
                _buffered.popleft()
