"""Write the records of one task of a replica: signs of life, how it drained, how it ended.

Belongs here: writing them, and outlasting a directory that is away. Does not belong here: the
formats (`hpctrain.records`), what happens (`lifecycle`).
"""

from __future__ import annotations

import contextlib
import time

from hpctrain.base import clock
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    Outcome,
    Phase,
    Progress,
    TrainerExit,
    write_record,
)
from hpctrain.records.service_records import DrainRecord
from hpctrain.train.rank_environment import Launch
from hpctrain.train.storage import record_exit

_PROGRESS_SECONDS = 1.0


class Life:
    """The records of this task; only rank 0 writes signs of life and the drain."""

    def __init__(self, run: RunLayout, launch: Launch) -> None:
        self.run, self.launch = run, launch
        self._phase: Phase = "starting"
        self._ready_since: float | None = None
        self._written_at = 0.0

    def enter(self, phase: Phase) -> None:
        """Begin a phase, and say so."""
        if phase == "serving" and self._ready_since is None:
            self._ready_since = clock.now()
        self._phase, self._written_at = phase, 0.0
        self.beat()

    def beat(self) -> None:
        """Replace the sign of life if it is older than a second."""
        now = clock.monotonic()
        if not self.launch.leads or now - self._written_at < _PROGRESS_SECONDS:
            return
        progress = Progress(
            epoch=self.launch.epoch,
            phase=self._phase,
            step=int(self._ready_since is not None),
            target_step=1,
            time=clock.now(),
            ready_since=self._ready_since,
        )
        with contextlib.suppress(OSError):
            write_record(self.run.progress, progress, durable=False)
            self._written_at = now

    def drained(self, record: DrainRecord) -> None:
        """Replace the record of the drain."""
        with contextlib.suppress(OSError):
            write_record(self.run.drain, record, durable=False)

    def left(self, message: str, signal_name: str | None) -> int:
        """Record that this task has left because it was asked to; returns its exit code."""
        if self.launch.leads:
            self._record("yielded", message, signal_name)
        say(message)
        return TrainerExit.YIELDED

    def refused(self, message: str) -> int:
        """Record settings that can never work; returns the exit code."""
        self._record("config_error", message)
        say(f"config_error: {message}")
        return TrainerExit.CONFIG_ERROR

    def failed(self, error: ReplicaError, signal_name: str | None) -> int:
        """Record a failure with its cause and the engine's last lines; returns the exit code."""
        self._record("crash", str(error), signal_name, error)
        say(f"crash: {error}")
        return TrainerExit.CRASH

    def _record(
        self,
        outcome: Outcome,
        message: str,
        signal_name: str | None = None,
        error: ReplicaError | None = None,
    ) -> None:
        record_exit(
            self.run,
            self.launch,
            outcome,
            step=int(self._ready_since is not None),
            time=clock.now(),
            message=message,
            traceback=error.tail or None if error else None,
            cause=error.cause if error else None,
            node_dependent=error.node_dependent if error else False,
            signal=signal_name,
        )


# -- The ways in which a replica fails, as exceptions with the supervisor's name of the cause ---


class ReplicaError(Exception):
    """A replica cannot go on. `cause`: one of the supervisor's, None where logs have to tell.

    `tail`: the last lines of the engine. `node_dependent`: it may work on another node.
    """

    cause: str | None = None

    def __init__(self, message: str, tail: str = "", *, node_dependent: bool = False) -> None:
        super().__init__(message)
        self.tail, self.node_dependent = tail, node_dependent


class EngineCrashedError(ReplicaError):
    """The engine has ended with an error: its last lines say why."""


class EngineLeftError(ReplicaError):
    """The engine has ended with exit code 0, and nobody has asked it to."""

    cause = "engine_exit"


class EngineHungError(ReplicaError):
    """The engine runs and does not answer."""

    cause = "hang"


class PortTakenError(ReplicaError):
    """No port could be had."""

    cause = "port"


class WeightsError(ReplicaError):
    """The weights are not there, or cannot be read or copied."""

    cause = "weights"


class SupersededError(ReplicaError):
    """A newer launch of the same job owns the replica."""

    cause = "superseded"


# -- Write lines of the replica program between those of its engine -----------------------------


def say(text: str) -> None:
    """Write one line with the time; a log that cannot be written ends nothing."""
    with contextlib.suppress(OSError):
        print(f"hpctrain {time.strftime('%H:%M:%S')} {text}", flush=True)
