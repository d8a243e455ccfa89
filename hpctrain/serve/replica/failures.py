"""The ways in which a replica fails, as exceptions with the supervisor's name of the cause.

Does not belong here: writing the record (`life`), what is done about it (the supervisor).
"""

from __future__ import annotations


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
