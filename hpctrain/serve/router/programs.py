"""What the router's job needs of a program that hands requests to replicas: one small interface.

Belongs here: the interface, and how a program is found and watched. Does not belong here: what is
special about one program (`vllm_router`, `haproxy`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.records.service_records import RouterSettings
from hpctrain.spec.job_text import expanded_text

# What clients are told while no replica is ready.
RETRY_AFTER_SECONDS = 5


class PortTakenError(HpctrainError):
    """None of the allowed ports can be listened on."""


@dataclass(frozen=True)
class Place:
    """Where the router runs: its node, the address others reach it by, its job and its logs."""

    node: str
    host: str
    job_id: int | None
    logs: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Counts:
    """What a router has counted since it was started; `last_request` in seconds since the epoch."""

    requests: int
    failed: int
    refused: int
    limited: int
    in_flight: int
    last_request: float | None


class RouterProgram(Protocol):
    """A router that runs. Replicas are known by their URL, such as `http://10.0.0.7:8000`."""

    @property
    def port(self) -> int:
        """The port that clients reach."""

    def start(self) -> None:
        """Listen and answer from now on. Raises InvalidInputError for settings that cannot work."""

    def problem(self) -> str | None:
        """What is wrong with the program; None while it runs."""

    def restart(self) -> None:
        """Start what has ended anew, with the port it had. Raises OSError, InvalidInputError."""

    def add(self, url: str) -> bool:
        """Ask this replica from now on, within seconds; False if the router will not."""

    def remove(self, url: str) -> bool:
        """No longer give requests to this replica; those that have begun go on."""

    def replicas(self) -> frozenset[str] | None:
        """The replicas that are asked; None if the router does not say."""

    def counts(self) -> Counts:
        """What it has counted."""

    def refresh(self) -> None:
        """Take up tokens and certificate if their files were replaced; the old ones hold if not."""

    def stop(self, seconds: float) -> None:
        """Take no more requests, let those that have begun end for so long, and end."""


def find_program(name: str, given: str | None, python: str | None) -> str:
    """Return the path of a program: the given one, beside an interpreter, or on PATH.

    Raises InvalidInputError.
    """
    try:
        given = None if given is None else expanded_text(given, os.environ)
        python = None if python is None else expanded_text(python, os.environ)
    except ValueError as error:
        problem = Problem(f"router.program: {error}", node_dependent=True)
        raise InvalidInputError([problem]) from None
    if given is not None:
        beside = given
    elif python is not None and os.path.dirname(python):
        beside = os.path.join(os.path.dirname(python), name)
    else:
        beside = ""
    if beside and os.access(beside, os.X_OK):
        return beside
    found = None if given is not None else shutil.which(name)
    # Debian and Red Hat have daemons in sbin, which is not on the PATH of users.
    found = found or (None if given is not None else shutil.which(name, path="/usr/sbin:/sbin"))
    if found is None:
        words = f"router.program: `{given or name}` is no program here"
        raise InvalidInputError([Problem(words, node_dependent=True)])
    return found


def listen(place: Place, router: RouterSettings) -> socket.socket:
    """Open the socket that clients reach: on the given port, else on the first free one allowed.

    Raises PortTakenError.
    """
    first, last = (router.port, router.port) if router.port else router.ports or (0, 0)
    wanted = range(first, last + 1)
    host, problem = router.address or place.host, "no port is allowed"
    for port in wanted:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            problem = str(error.strerror or error)
    which = str(wanted[0]) if len(wanted) == 1 else f"{wanted[0]}-{wanted[-1]}"
    raise PortTakenError(f"cannot listen on {host}:{which}: {problem}")


class Child:
    """A process of the router's job, in a group of its own, whose output goes to a log.

    Slurm's signals do not reach it (see `hpctrain.serve.replica.shield`), so that requests are
    carried to their end: SIGINT asks it to end.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        shield = (sys.executable, "-P", "-m", "hpctrain.serve.replica.shield", str(os.getpid()))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*shield, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                pass_fds=tuple(descriptors),
                start_new_session=True,
            )
        self._name, self._log = os.path.basename(argv[0]), log

    def problem(self) -> str | None:
        """How it ended, with its last line; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"{self._name} ended with {code}: {last[-300:]}"

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
