"""One launch: the `srun` process, the lines it prints about failures, and the signals we get.

Belongs here: processes, threads and signal handlers of the supervisor. Does not belong here:
reading a line (`hpctrain.slurm.messages`), what follows from it (`classify`).
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType

from hpctrain.slurm.messages import (
    StepNotice,
    TaskFailure,
    read_notice,
    read_task_failure,
    waits_for_step,
)
from hpctrain.store.run_records import TrainerExit
from hpctrain.supervise.job_log import write_log

# Below the ephemeral range of Linux (32768-60999), above the ports of services.
_PORT_FIRST, _PORT_COUNT = 20000, 10000
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

        What `__main__` has held back until now arrives here.
        """
        for number in _CAUGHT:
            signal.signal(number, self._remember)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(signal.Signals(number).name.removeprefix("SIG"))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrived)

    @property
    def final(self) -> bool:
        """True once the job is being ended: only KillWait seconds are left."""
        return any(name in _FINAL for name in self.standing)

    @property
    def standing(self) -> tuple[str, ...]:
        """All but those that were found not to be Slurm's."""
        return tuple(self._arrived[self._dismissed :])

    def take(self) -> tuple[str, ...]:
        """The signals that nobody has taken yet."""
        taken, self._taken = self._taken, len(self._arrived)
        return tuple(self._arrived[taken : self._taken])

    def dismiss(self, count: int) -> None:
        """The first `count` signals were not Slurm's: nobody ends the job."""
        self._dismissed = max(self._dismissed, count)


class Launch:
    """A running `srun`. Its stderr is passed on and read for the first words about a failure."""

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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            write_log(line)
            self.waits_for_step = waits_for_step(line, self.waits_for_step)
            failure = read_task_failure(line)
            if failure is None:
                if (notice := read_notice(line)) is not None:
                    self._notices.append(notice)
            elif failure.code != TrainerExit.YIELDED:
                self._failures.append(replace(failure, at=time.time()))

    def poll(self) -> int | None:
        """srun's exit code (negative: the signal that killed it), None while it runs."""
        return self.process.poll()

    def finish_reading(self, timeout_seconds: float = 2.0) -> None:
        """Give the reader time for srun's last words; orphans may hold the pipe open for ever."""
        self._reader.join(timeout_seconds)

    def kill(self) -> None:
        """End srun itself; its step is ended through Slurm."""
        if self.process.poll() is None:
            self.process.kill()

    @property
    def failures(self) -> tuple[TaskFailure, ...]:
        return tuple(self._failures)

    @property
    def notices(self) -> tuple[StepNotice, ...]:
        return tuple(self._notices)


def free_port(launch: str) -> int:
    """A port on this host that nobody listens on, outside the ephemeral range.

    `launch` names the launch beyond doubt (run directory, job, epoch). The search starts from a
    number that differs between launches, so that leftovers of an earlier one do not meet the next
    (pytorch/pytorch#126510), nor two runs on one host that look at the same time.
    """
    start = zlib.crc32(launch.encode()) % _PORT_COUNT
    for offset in range(_PORT_COUNT):
        port = _PORT_FIRST + (start + offset) % _PORT_COUNT
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {_PORT_FIRST} and {_PORT_FIRST + _PORT_COUNT - 1}")
