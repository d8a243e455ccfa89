"""The sandbox as a whole: make it, bring it up, look at it, take it down.

Belongs here: the order of things, and what is left behind on failure. Does not belong here: the
single daemons (see `daemons`), or breaking them on purpose (see `faults`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from hpctrain.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.sandbox.config import Site, config_files
from hpctrain.sandbox.daemons import (
    Launcher,
    log_tail,
    sandbox_daemons,
    slurmd_name,
    stop_daemons,
)
from hpctrain.sandbox.job_processes import processes_of_nodes
from hpctrain.sandbox.paths import SandboxPaths, default_sockets, sockets_fit, state_file
from hpctrain.sandbox.ports import are_free, find_ports
from hpctrain.sandbox.processes import await_condition, find_process, is_alive, kill
from hpctrain.sandbox.programs import Programs, call, daemon_environment, find_programs
from hpctrain.sandbox.shape import SandboxShape
from hpctrain.sandbox.state import DaemonRecord, SandboxState, read_state, write_state

_KEY_BYTES = 1024

Health = Literal["up", "down", "partial"]


@dataclass(frozen=True)
class DaemonStatus:
    """One daemon that was started; `frozen` is one that has been stopped with SIGSTOP."""

    name: str
    pid: int
    alive: bool
    frozen: bool


@dataclass(frozen=True)
class NodeStatus:
    """One node: its state in the words of sinfo, `unknown` while no controller answers."""

    name: str
    state: str


@dataclass(frozen=True)
class SandboxStatus:
    """`health` is `partial` when some daemons live and others are dead or missing."""

    directory: Path
    health: Health
    version: tuple[int, int]
    nodes: tuple[NodeStatus, ...]
    daemons: tuple[DaemonStatus, ...]


class Sandbox:
    """A Slurm in `directory`; all it remembers is in files, so any process may open it."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.realpath(directory))

    @classmethod
    def create(cls, directory: Path, shape: SandboxShape, slurm: Path | None = None) -> Sandbox:
        """Make the directory (mode 700) and write down the shape; nothing is started.

        `slurm` is a directory with another Slurm than the installed one (see `find_programs`).
        Raises UsageError when something is there already, SlurmUnreachableError when Slurm or
        munge is not installed.
        """
        sandbox = cls(directory)
        sandbox._check_vacant()
        slurm = None if slurm is None else Path(os.path.realpath(slurm))
        version = find_programs(slurm).version
        sandbox._make_directory()
        sockets = default_sockets(sandbox.directory)
        ports = find_ports(shape.nodes)
        state = SandboxState(shape, sockets, ports, version, slurm=slurm)
        write_state(SandboxPaths(sandbox.directory, sockets), state)
        return sandbox

    @classmethod
    def open(cls, directory: Path) -> Sandbox:
        """The sandbox that lies in `directory`. Raises UsageError when there is none."""
        sandbox = cls(directory)
        read_state(sandbox.directory)
        return sandbox

    @cached_property
    def programs(self) -> Programs:
        return find_programs(self.state.slurm)

    @property
    def state(self) -> SandboxState:
        return read_state(self.directory)

    @property
    def shape(self) -> SandboxShape:
        return self.state.shape

    @property
    def paths(self) -> SandboxPaths:
        return SandboxPaths(self.directory, self.state.sockets)

    @property
    def launcher(self) -> Launcher:
        return Launcher(self.paths, self.programs)

    def up(self, timeout_seconds: float = 60) -> None:
        """Start everything and wait until every node has reported; nothing to do when it is up.

        Raises SlurmError when a daemon fails or the sandbox is partly alive, and
        SlurmUnreachableError when a node has not reported in time; nothing is left running then.
        """
        with self._locked():
            health = self.health()
            if health == "up":
                return
            if health == "partial":
                raise SlurmError(
                    f"the sandbox in {self.directory} is only partly alive",
                    "take it down and start it again",
                )
            try:
                self._prepare()
                self._start(timeout_seconds)
            except BaseException:
                # Also on Ctrl-C: the daemons would outlive us, and nobody would know of them.
                self._stop()
                raise

    def down(self, *, keep: bool = False) -> None:
        """End every process of the sandbox and its jobs, and remove the directory unless `keep`.

        With `keep` the directory can be brought up again and still holds logs and job states.
        """
        with self._locked():
            self._stop()
            if not keep:
                shutil.rmtree(self.directory)

    def is_up(self) -> bool:
        """Whether every daemon lives; a frozen one counts as living."""
        return self.health() == "up"

    def health(self) -> Health:
        """`up`, `down`, or `partial`: a daemon is dead, or one lives that no record names."""
        state = self.state
        if not sandbox_daemons(self.paths):
            return "down"
        alive = {record.name for record in state.daemons if is_alive(record.identity)}
        expected = {"munged", "slurmctld", *map(slurmd_name, state.shape.node_names)}
        return "up" if expected <= alive else "partial"

    def environment(self) -> dict[str, str]:
        """What a client adds to its environment so that Slurm commands reach this sandbox."""
        conf, path = str(self.paths.slurm_conf), self.programs.search_path
        return {"SLURM_CONF": conf, "PATH": path}

    def status(self) -> SandboxStatus:
        """A look at everything; takes some seconds when the controller is frozen."""
        state = self.state
        states = self.node_states() if self.daemon_is_alive("slurmctld") else {}
        return SandboxStatus(
            directory=self.directory,
            health=self.health(),
            version=state.version,
            nodes=tuple(
                NodeStatus(name, states.get(name, "unknown")) for name in state.shape.node_names
            ),
            daemons=tuple(map(_daemon_status, state.daemons)),
        )

    def daemon_is_alive(self, name: str) -> bool:
        """Whether `munged`, `slurmctld` or `slurmd-NODE` lives."""
        return any(
            record.name == name and is_alive(record.identity) for record in self.state.daemons
        )

    def node_states(self) -> dict[str, str]:
        """State by node in the words of sinfo, empty when the controller does not answer.

        A `*` at the end of a state means that the node does not respond.
        """
        try:
            answer = self.command("sinfo", "--noheader", "--Node", "--format=%N %T")
        except SlurmError:
            return {}
        pairs = (line.split() for line in answer.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def command(self, name: str, *arguments: str) -> str:
        """Run one Slurm command as a client of this sandbox and return its stdout.

        Raises SlurmError with Slurm's words, SlurmUnreachableError when no answer comes.
        """
        environment = daemon_environment(self.paths.slurm_conf, self.programs)
        return call([self.programs[name], *arguments], environment)

    def remember(self, record: DaemonRecord) -> None:
        """Write down a daemon that has just been started, in place of its namesake."""
        state = self.state
        write_state(self.paths, replace(state, daemons=state.with_daemon(record)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One `up` or `down` at a time, across processes."""
        try:
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(f"there is no sandbox in {self.directory}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever held the lock before us may have removed the directory.
            read_state(self.directory)
            yield
        finally:
            os.close(descriptor)

    def _check_vacant(self) -> None:
        if state_file(self.directory).exists():
            raise UsageError(f"{self.directory} holds a sandbox already", "take it down first")
        try:
            if self.directory.exists() and any(self.directory.iterdir()):
                raise UsageError(f"{self.directory} is not empty", "choose a new directory")
        except OSError as error:
            raise UsageError(f"cannot make a sandbox in {self.directory}: {error}") from error

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The munge socket inside is open to all: whoever reaches it is served as its owner.
            self.directory.chmod(0o700)
        except OSError as error:
            raise UsageError(f"cannot make a sandbox in {self.directory}: {error}") from error

    def _prepare(self) -> None:
        """Directories, key, devices and configuration; ports anew if somebody took them."""
        state = self.state
        ports = state.ports if are_free(state.ports) else find_ports(state.shape.nodes)
        sockets = _make_sockets(self.directory, state.shape.node_names[-1])
        state = replace(state, ports=ports, sockets=sockets, version=self.programs.version)
        paths = SandboxPaths(self.directory, sockets)
        write_state(paths, replace(state, daemons=()))
        for directory in paths.all_directories(state.shape.node_names):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_key(paths.munge_key)
        _link_devices(paths.devices, state.shape.gpus_per_node)
        site = Site(paths, state.ports, _user_name(), state.version, self.programs.plugins)
        for file in config_files(state.shape, site):
            (self.directory / file.name).write_text(file.text)

    def _start(self, timeout_seconds: float) -> None:
        launcher, state = self.launcher, self.state
        records = [launcher.munged(), launcher.slurmctld()]
        records += launcher.slurmds(state.shape.node_names)
        write_state(self.paths, replace(state, daemons=tuple(records)))
        # A daemon checks most of its configuration after it has gone into the background.
        await_condition(lambda: bool(self._dead()) or not self._late_nodes(), timeout_seconds)
        if dead := self._dead():
            raise SlurmError(f"{dead[0]} died: {log_tail(self.paths.log(dead[0]))}")
        if late := self._late_nodes():
            raise SlurmUnreachableError(
                f"no report from {len(late)} nodes in {timeout_seconds:g} s, among them {late[0]}: "
                f"{log_tail(self.paths.log(slurmd_name(late[0])))}"
            )

    def _dead(self) -> list[str]:
        return [record.name for record in self.state.daemons if not is_alive(record.identity)]

    def _late_nodes(self) -> list[str]:
        states = self.node_states()
        names = self.shape.node_names
        return [name for name in names if not _has_reported(states.get(name, "unknown"))]

    def _stop(self) -> None:
        state, paths = self.state, self.paths
        names = state.shape.node_names
        # Looked up while the slurmstepds live: what they have started is known through them.
        doomed = processes_of_nodes(paths, names)
        stop_daemons(paths, state.daemons)
        kill(process.identity for process in doomed)
        for _ in range(3):  # a process that was forking at the first look is seen at the next
            kill(process.identity for process in processes_of_nodes(paths, names))
        shutil.rmtree(state.sockets, ignore_errors=True)
        write_state(paths, replace(state, daemons=()))


def _has_reported(node_state: str) -> bool:
    return not node_state.endswith("*") and node_state != "unknown"


def _daemon_status(record: DaemonRecord) -> DaemonStatus:
    process = find_process(record.identity.pid)
    alive = process is not None and process.identity == record.identity
    frozen = alive and process is not None and process.state == "T"
    return DaemonStatus(record.name, record.identity.pid, alive, frozen)


def _make_sockets(directory: Path, longest_node: str) -> Path:
    sockets = default_sockets(directory)
    if sockets_fit(sockets, longest_node):
        return sockets
    # Not tempfile.gettempdir(): TMPDIR may be as deep as the directory itself.
    return Path(tempfile.mkdtemp(prefix="hpctrain-", dir="/tmp"))


def _write_key(key: Path) -> None:
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(_KEY_BYTES))
        key.chmod(0o400)


def _link_devices(devices: Path, count: int) -> None:
    for index in range(count):
        link = devices / f"gpu{index}"
        if not link.is_symlink():
            link.symlink_to("/dev/null")


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UsageError(
            f"the user with id {os.geteuid()} has no name, and Slurm serves named users only",
            "add the user to /etc/passwd or to the directory service",
        ) from None
