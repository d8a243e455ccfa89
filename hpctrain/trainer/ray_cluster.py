"""Start Ray on the nodes of a launch, for a trainer of one's own, and leave nothing of it behind.

The first node has Ray's head, all others a worker each. The command is the driver, beside the head,
and its end is the end of the launch: then the head's agent marks it, and all agents take Ray down.
Agents tell each other by files in the directory of their launch:

    .ray/token      what Ray's programs show each other: nobody else's may join (Ray >= 2.52)
    .ray/head       the head's address, once it is up
    .ray/000001     the worker of that node has joined
    .ray/over       the driver has ended

`ray symmetric-run` (Ray >= 2.49, ray/scripts/symmetric_run.py) does not do: it refuses a node that
has another Ray, ends every Ray of the user there (`ray stop`), does not notice a head that has
died, and keeps signals from the driver. Belongs here: Ray's options, waiting for its nodes, and its
remains. Does not belong here: what its end means (`agent`), processes in general (`ranks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from hpctrain.base import reserved_ports
from hpctrain.base.errors import HpctrainError
from hpctrain.train.launchers.agent_environment import Place
from hpctrain.train.launchers.rank_processes import Rank
from hpctrain.train.rank_environment import host_threads
from hpctrain.trainer.ranks import descendants

_POLL_SECONDS = 0.1
# Nodes join within seconds of each other; importing Ray from a busy file system takes longer.
_JOIN_SECONDS = 300.0
# Ray gives up after 30 s (ray/_private/node.py), which busy nodes and file systems take.
_SLOW_START_SECONDS = 20.0
# A driver fails at once when another node's Ray has died, whose agent notices that a little later.
_SETTLE_SECONDS = 5.0
# How long Ray may take to end its own processes after SIGTERM. It waits longer for actors of a
# driver that has failed.
_DOWN_SECONDS = 3.0
# sockaddr_un has room for 107 bytes (unix(7)); Ray appends up to 66, such as
# /session_2026-11-28_15-30-45_194303_3189600/sockets/plasma_store.1.
_LONGEST_DIRECTORY = 107 - 66
_PREFIX, _LOCK = "hpctrain-ray-", "lock"
_PR_SET_CHILD_SUBREAPER = 36
# Printed by `ray start` when its node is registered (ray/scripts/scripts.py).
_STARTED = "Ray runtime started"
_ADDRESS = re.compile(r"Local node IP: (\S+)")
# Printed by `ray start --block` of each of Ray's processes that has died.
_DEAD = re.compile(r"(\w+) \[exit code=(-?\d+)\]")
# Ray's client server has a port that two heads on a node would share. It exists where grpc does,
# and only there it may be given another port (ray/_private/parameter.py).
_START = """\
import sys
from importlib.util import find_spec
from ray.scripts.scripts import main
port = sys.argv.pop(1)
if port != "-" and find_spec("grpc"):
    sys.argv.append("--ray-client-server-port=" + port)
sys.exit(main())
"""


class RayError(HpctrainError):
    """Ray did not come up on all nodes."""


def ray_environment(environment: Mapping[str, str], output: Path) -> dict[str, str]:
    """Return the environment of Ray's programs and of the driver.

    MASTER_PORT is the head's own port: what looks for a free one must not find it there.
    """
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(output / ".ray" / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    unset = ("MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")
    return {**ours, **{name: value for name, value in environment.items() if name not in unset}}


def prepare_ray(output: Path) -> None:
    """Make what all nodes read, in the new directory of a launch."""
    marks = output / ".ray"
    marks.mkdir(mode=0o700)
    descriptor = os.open(marks / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(32))


class RayNode(Rank):
    """Ray on this node: `ray start --block`, which watches over Ray's own processes.

    Its exit code counts as 0 once it has been told to leave. Raises OSError.
    """

    def __init__(
        self,
        place: Place,
        output: Path,
        node: str,
        python: str,
        arguments: Sequence[str],
        gpus: int,
        directory: str,
        environment: Mapping[str, str],
    ) -> None:
        self.address, client = "", "-"
        self._place, self._marks, self._node = place, output / ".ray", node
        self._left_at: float | None = None
        self._is_up = False
        self._began_at = time.monotonic()
        self._dead: list[str] = []
        self._directory, self._lock = _make_directory(output)
        self._client_port: socket.socket | None = None
        if self._is_head:
            self._client_port = reserved_ports.reserve_any("")
            client = str(reserved_ports.number_of(self._client_port))
            where = ["--head", f"--port={place.port}", "--include-dashboard=false"]
            number = _number_of(place.address)
            where += [f"--node-ip-address={number}"] if number is not None else []
        else:
            self.address = (self._marks / "head").read_text()
            where = [f"--address={self.address}"]
        cpus = host_threads() if gpus else max(host_threads(), place.ranks_here)
        # Without it, what Ray's processes leave behind would belong to init.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        words = [
            *(python, "-c", _START, client, "start", "--block", *where),
            *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={self._directory}"),
            # Two nodes of two runs may be one machine: each port is one that is free.
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            *arguments,
        ]
        try:
            super().__init__(None, words, directory, environment, 1, b"ray: ", self._hear_ray)
        except OSError:
            self._remove_files()
            raise

    @property
    def _is_head(self) -> bool:
        return self._place.node_rank == 0

    def _hear_ray(self, line: str) -> None:
        found = _ADDRESS.search(line)
        if found is not None and self._is_head:
            self.address = f"{found[1]}:{self._place.port}"
        self._is_up = self._is_up or _STARTED in line
        for name, code in _DEAD.findall(line):
            signalled = code.startswith("-")
            how = f"killed by signal {code[1:]}" if signalled else f"exit code {code}"
            self._dead.append(f"{name} ({how})")
        if self._dead:
            self.tail.clear()  # pages of counters of that process

    def wait_until_up(self, given_up: Callable[[], bool]) -> bool:
        """Wait for this node, and on the head for all; False if that was given up.

        Raises RayError for a node that has not joined, OSError.
        """
        deadline = time.monotonic() + _JOIN_SECONDS
        is_marked = False
        while not given_up() and super().poll() is None:
            if self._is_up and not is_marked:
                is_marked = True
                name = "head" if self._is_head else f"{self._place.node_rank:06d}"
                _write_mark(self._marks / name, self.address)
            missing = []
            if self._is_head and is_marked:
                there = set(os.listdir(self._marks))
                missing = [n for n in range(1, self._place.nodes) if f"{n:06d}" not in there]
            if is_marked and not missing:
                return True
            if time.monotonic() > deadline:
                if not is_marked:
                    raise RayError(f"Ray has not started on {self._node} in {_JOIN_SECONDS:.0f} s")
                names = ", ".join(map(str, missing[:8]))
                raise RayError(
                    f"{len(missing)} of {self._place.nodes} nodes have not joined Ray in "
                    f"{_JOIN_SECONDS:.0f} s: number {names} of this launch, counted from 0"
                )
            time.sleep(_POLL_SECONDS)
        return False

    def may_start_later(self) -> bool:
        """Tell whether it was too slow for Ray itself, and may come up if it is started again."""
        if self._is_up or super().poll() is None:
            return False
        return time.monotonic() - self._began_at > _SLOW_START_SECONDS

    def follow(self, driver: Rank | None, *, in_haste: bool) -> None:
        """Take Ray down here once the driver has ended, which the head's agent marks for all.

        `in_haste`: the launch is being ended, so nothing is waited for.
        """
        now = time.monotonic()
        if self._left_at is not None:
            if now - self._left_at > _DOWN_SECONDS:
                super().signal(signal.SIGKILL)
        elif super().poll() is not None:
            self._mark_over()
        elif self._is_over(driver, in_haste):
            self._left_at = now
            self._mark_over()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # it ends Ray's processes in their order

    def _is_over(self, driver: Rank | None, in_haste: bool) -> bool:
        if not self._is_head:
            return (self._marks / "over").exists()
        code = driver.poll() if driver is not None else 0
        if driver is None or driver.ended_at is None or code is None:
            return driver is None
        return code <= 0 or in_haste or time.time() - driver.ended_at > _SETTLE_SECONDS

    def _mark_over(self) -> None:
        if self._is_head:
            with contextlib.suppress(OSError):
                _write_mark(self._marks / "over", "")

    def signal(self, number: int) -> None:
        if self._left_at is None and super().poll() is None:
            self._left_at = time.monotonic()
            self._mark_over()
        super().signal(number)

    def poll(self) -> int | None:
        code = super().poll()
        return 0 if code is not None and self._left_at is not None else code

    @property
    def last_words(self) -> str:
        """Say which of Ray's processes has ended on which node."""
        return f"Ray on {self._node} has ended: {', '.join(self._dead) or super().last_words}"

    def close(self) -> None:
        """Kill what is left of Ray on this node, and remove its files."""
        self._mark_over()
        self.kill_left()
        self._remove_files()

    def kill_left(self) -> None:
        """Kill all that Ray has started here, also what is in sessions of its own.

        Takes their exit codes: nobody may wait for another process of this agent later.
        """
        for _ in range(20):
            for pid, _ in list(descendants(os.getpid())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break  # none is left
            time.sleep(_POLL_SECONDS)

    def _remove_files(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.close()
        if self._client_port is not None:
            self._client_port.close()
        if self._is_head:
            with contextlib.suppress(OSError):
                (self._marks / "token").unlink()


def wait_for_head(output: Path, given_up: Callable[[], bool]) -> bool:
    """Wait on a worker until the head is up; False if that was given up."""
    while not (output / ".ray" / "head").exists():
        if given_up():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _write_mark(path: Path, text: str) -> None:
    """Write a small file that is there with its whole content or not at all. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    os.replace(fresh, path)


def ray_directory(output: Path) -> Path:
    """Return Ray's own directory on a node: short, and of one name on all nodes of a launch.

    Earlier versions of Ray use that of the head on all of them.
    """
    name = f"{_PREFIX}{zlib.crc32(str(output).encode()):08x}"
    directory = Path(tempfile.gettempdir(), name)
    too_long = len(os.fsencode(directory)) > _LONGEST_DIRECTORY
    return Path("/tmp", name) if too_long else directory


def _make_directory(output: Path) -> tuple[Path, IO[bytes]]:
    """Make and lock the directory of this launch; remove those that killed agents have left here.

    Raises OSError, also where it belongs to somebody else.
    """
    directory = ray_directory(output)
    for left in directory.parent.glob(f"{_PREFIX}*"):
        if left != directory:
            with contextlib.suppress(OSError):  # of somebody else, or held by its agent
                _remove_unlocked(left)
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise FileExistsError(None, "it belongs to somebody else", str(directory))
        path = directory / _LOCK
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb")
        fcntl.flock(lock, fcntl.LOCK_SH)  # by all agents of a launch that share a directory
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.lstat()):
                return directory, lock
        lock.close()  # it was just removed


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory of Ray that no agent holds. Raises OSError where one does."""
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _number_of(address: str) -> str | None:
    """Return an address as a number; None where this node has only a loopback address for it."""
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
        numbers = [str(entry[4][0]) for entry in entries]
        return next((one for one in numbers if not one.startswith("127.")), None)
    return None
