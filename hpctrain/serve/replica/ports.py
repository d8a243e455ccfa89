"""Choose a port for an engine, so that no other replica on the node chooses the same one.

Belongs here: the choice and the lock that goes with it. Does not belong here: starting again on
another port (`lifecycle`).
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import reserved_ports
from hpctrain.serve.replica.failures import PortTakenError

_TRIES_OF_KERNEL = 20
# Not $TMPDIR, which may be a directory of one job: the locks are between jobs.
_OF_NODE = Path("/tmp")


@dataclass
class HeldPort:
    """A port of this node that no other replica of this user takes until it is released."""

    port: int
    _lock: int

    def release(self) -> None:
        """Let others have it; the end of this process does the same."""
        os.close(self._lock)


def hold_port(host: str, ports: tuple[int, int] | None, directory: Path | None = None) -> HeldPort:
    """Choose a free port, one of `ports` if the site allows only these.

    Others begin at another one, so that replicas of one node seldom try the same. `directory`:
    where the locks of this node lie. Raises PortTakenError, OSError.
    """
    place = (directory or _OF_NODE) / f"hpctrain-ports-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PortTakenError(f"{place} is another user's", node_dependent=True)
    for port in _candidates(host, ports):
        lock = _locked(place / f"{port}.lock")
        if lock is None:
            continue
        if reserved_ports.is_free(host, port):
            return HeldPort(port, lock)
        os.close(lock)
    where = "of this node" if ports is None else f"between {ports[0]} and {ports[1]}"
    raise PortTakenError(f"no port {where} is free on {host}", node_dependent=True)


def _candidates(host: str, ports: tuple[int, int] | None) -> list[int]:
    if ports is not None:
        numbers = list(range(ports[0], ports[1] + 1))
        start = random.randrange(len(numbers))
        return numbers[start:] + numbers[:start]
    found = []
    for _ in range(_TRIES_OF_KERNEL):
        with socket.socket() as probe:
            probe.bind((host, 0))
            found.append(int(probe.getsockname()[1]))
    return found


def _locked(path: Path) -> int | None:
    """Lock a file of this node; None if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
