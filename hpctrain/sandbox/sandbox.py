"""Create, start, inspect and stop a whole sandbox.

Belongs here: the order of these steps, and cleaning up on failure. Does not belong here: single
daemons (see `daemons`), fault injection (see `faults`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.observe.monitoring import RULES, with_delays
from hpctrain.sandbox.config import Site, config_files
from hpctrain.sandbox.daemons import (
    DaemonLauncher,
    create_database,
    log_tail,
    processes_of_nodes,
    register,
    sandbox_daemons,
    slurmd_name,
    slurmdbd_conf,
    stop_daemons,
    stop_monitors,
)
from hpctrain.sandbox.debian import fetch_modules, modules_cache
from hpctrain.sandbox.monitoring import (
    MONITORS,
    MonitorFiles,
    Monitoring,
    alertmanager_yaml,
    job_endpoints,
    monitor_addresses,
    prometheus_yaml,
)
from hpctrain.sandbox.paths import (
    SandboxPaths,
    are_free,
    default_sockets,
    find_ports,
    sockets_fit,
    state_file,
)
from hpctrain.sandbox.processes import await_condition, find_process, is_alive, kill
from hpctrain.sandbox.programs import Programs, call, daemon_environment, find_programs
from hpctrain.sandbox.shape import SandboxShape
from hpctrain.sandbox.stand_in_site import write_site
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
    """One node with its state as sinfo prints it; `unknown` while no controller answers."""

    name: str
    state: str


@dataclass(frozen=True)
class SandboxStatus:
    """Status of all parts; `health` is `partial` when only some daemons are running.

    `addresses` has the pages of the monitors by their names.
    """

    directory: Path
    health: Health
    version: tuple[int, int]
    nodes: tuple[NodeStatus, ...]
    daemons: tuple[DaemonStatus, ...]
    addresses: dict[str, str] = field(default_factory=dict)


class Sandbox:
    """A Slurm in `directory`. All state is in files, so any process may open it."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.realpath(directory))

    @classmethod
    def create(cls, directory: Path, shape: SandboxShape, slurm: Path | None = None) -> Sandbox:
        """Make the directory (mode 700) and record the shape; nothing is started.

        `slurm` is a directory with another Slurm than the installed one (see `find_programs`).
        Raises UsageError when the directory is not empty, SlurmUnreachableError when Slurm or
        munge is not installed.
        """
        sandbox = cls(directory)
        path = sandbox.directory
        if state_file(path).exists():
            raise UsageError(f"{path} holds a sandbox already", "take it down first")
        try:
            if path.exists() and any(path.iterdir()):
                raise UsageError(f"{path} is not empty", "choose a new directory")
        except OSError as error:
            raise UsageError(f"cannot make a sandbox in {path}: {error}") from error
        slurm = None if slurm is None else Path(os.path.realpath(slurm))
        version = find_programs(slurm, accounting=shape.accounting == "slurmdbd").version
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The munge socket inside is open to all: whoever reaches it acts as its owner.
            path.chmod(0o700)
        except OSError as error:
            raise UsageError(f"cannot make a sandbox in {path}: {error}") from error
        sockets = default_sockets(path)
        ports = find_ports(shape.nodes)
        state = SandboxState(shape, sockets, ports, version, slurm=slurm)
        write_state(SandboxPaths(path, sockets), state)
        return sandbox

    @classmethod
    def open(cls, directory: Path) -> Sandbox:
        """Open the sandbox in `directory`. Raises UsageError when there is none."""
        sandbox = cls(directory)
        read_state(sandbox.directory)
        return sandbox

    @cached_property
    def programs(self) -> Programs:
        state = self.state
        return find_programs(state.slurm, accounting=state.shape.accounting == "slurmdbd")

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
    def launcher(self) -> DaemonLauncher:
        return DaemonLauncher(self.paths, self.programs)

    def up(self, timeout_seconds: float = 60) -> None:
        """Start everything and wait until every node has reported; does nothing when it is up.

        Raises SlurmError when a daemon fails or the sandbox is partly alive, and
        SlurmUnreachableError when a node has not reported in time. No process is left running then.
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
                # Also on Ctrl-C: otherwise the daemons would keep running without a record.
                self._stop()
                raise

    def monitor(self, monitoring: Monitoring | None) -> None:
        """Watch runs with Prometheus from now on, also after later starts; None: no longer.

        Does nothing when it does so already, with the same settings. Raises UsageError when the
        sandbox is not up, SlurmError when a monitor does not start; no monitor runs then.
        """
        with self._locked():
            if monitoring is None:
                return self._stop_monitors()
            if self.health() != "up":
                raise UsageError(f"the sandbox in {self.directory} is not up", "start it first")
            if self.state.monitoring == monitoring:
                return
            self._stop_monitors()
            try:
                self._start_monitors(monitoring)
            except BaseException:
                self._stop_monitors()
                raise

    def down(self, *, keep: bool = False) -> None:
        """End every process of the sandbox and its jobs, and remove the directory unless `keep`.

        With `keep` the sandbox can be started again, with its logs and job states.
        """
        with self._locked():
            self._stop()
            if not keep:
                shutil.rmtree(self.directory)

    def is_up(self) -> bool:
        """Check that every daemon is running; a frozen one counts as running."""
        return self.health() == "up"

    def health(self) -> Health:
        """Return `up`, `down`, or `partial`: a daemon is dead, or one runs without a record."""
        state = self.state
        if not sandbox_daemons(self.paths):
            return "down"
        alive = {record.name for record in state.daemons if is_alive(record.identity)}
        expected = {"munged", "slurmctld", *map(slurmd_name, state.shape.node_names)}
        if state.shape.accounting == "slurmdbd":
            expected |= {"slurmdbd", "mariadbd"}
        if state.monitoring is not None:
            expected |= set(MONITORS)
        return "up" if expected <= alive else "partial"

    def environment(self) -> dict[str, str]:
        """Return the variables that make Slurm commands of a client reach this sandbox.

        Also where Prometheus and Alertmanager answer, if there are any, and the variables that a
        login of the site sets.
        """
        state, conf = self.state, str(self.paths.slurm_conf)
        found = {"SLURM_CONF": conf, "PATH": self.programs.search_path}
        if state.shape.site.launchers:
            found["PATH"] = f"{self.paths.programs}{os.pathsep}{found['PATH']}"
        if "USER" not in os.environ:  # as in a container; a login has it, and jobs inherit it
            found["USER"] = _user_name()
        for name in state.shape.site.variables:
            found[name] = str(self.paths.site_directory(name))
        if state.monitoring is not None:
            addresses = monitor_addresses(state.ports)
            found["HPCTRAIN_PROMETHEUS"] = addresses["prometheus"]
            found["HPCTRAIN_ALERTMANAGER"] = addresses["alertmanager"]
        return found

    def status(self) -> SandboxStatus:
        """Collect the status of all parts; takes some seconds when the controller is frozen."""
        state = self.state
        states = self.node_states() if self.daemon_is_alive("slurmctld") else {}
        daemons = []
        for record in state.daemons:
            process = find_process(record.identity.pid)
            alive = process is not None and process.identity == record.identity
            frozen = alive and process is not None and process.state == "T"
            daemons.append(DaemonStatus(record.name, record.identity.pid, alive, frozen))
        return SandboxStatus(
            directory=self.directory,
            health=self.health(),
            version=state.version,
            nodes=tuple(
                NodeStatus(name, states.get(name, "unknown")) for name in state.shape.node_names
            ),
            daemons=tuple(daemons),
            addresses=monitor_addresses(state.ports) if state.monitoring else {},
        )

    def daemon_is_alive(self, name: str) -> bool:
        """Check that `munged`, `slurmctld` or `slurmd-NODE` is running."""
        return any(
            record.name == name and is_alive(record.identity) for record in self.state.daemons
        )

    def node_states(self) -> dict[str, str]:
        """Return sinfo's state of each node; empty when the controller does not answer.

        A `*` at the end of a state means that the node does not respond.
        """
        try:
            output = self.command("sinfo", "--noheader", "--Node", "--format=%N %T")
        except SlurmError:
            return {}
        pairs = (line.split() for line in output.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def command(self, name: str, *arguments: str) -> str:
        """Run one Slurm command as a client of this sandbox and return its stdout.

        Raises SlurmError with Slurm's message, SlurmUnreachableError when there is no reply.
        """
        environment = daemon_environment(self.paths.slurm_conf, self.programs)
        return call([self.programs[name], *arguments], environment)

    def remember(self, record: DaemonRecord) -> None:
        """Record a daemon that has just been started, replacing the record of the same name."""
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
            # The previous holder of the lock may have removed the directory.
            read_state(self.directory)
            yield
        finally:
            os.close(descriptor)

    def _prepare(self) -> None:
        """Write directories, key, devices and configuration; choose new ports if needed."""
        state = self.state
        ports = state.ports if are_free(state.ports) else find_ports(state.shape.nodes)
        sockets = default_sockets(self.directory)
        if not sockets_fit(sockets, state.shape.node_names[-1]):
            # Not tempfile.gettempdir(): TMPDIR may be as deep as the directory itself.
            sockets = Path(tempfile.mkdtemp(prefix="hpctrain-", dir="/tmp"))
        state = replace(state, ports=ports, sockets=sockets, version=self.programs.version)
        paths = SandboxPaths(self.directory, sockets)
        write_state(paths, replace(state, daemons=()))
        for directory in paths.all_directories(state.shape.node_names):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = paths.munge_key
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(_KEY_BYTES))
            key.chmod(0o400)
        for index in range(max(group.gpus for group in state.shape.node_groups)):
            link = paths.devices / f"gpu{index}"
            if not link.is_symlink():
                link.symlink_to("/dev/null")
        site = self._site()
        for file in config_files(state.shape, site):
            (self.directory / file.name).write_text(file.text)
        has_modules = state.shape.site.modules is not None
        write_site(paths, state.shape.site, fetch_modules(modules_cache()) if has_modules else None)
        if state.shape.accounting == "slurmdbd":
            # slurmdbd refuses a file that others may read.
            paths.slurmdbd_conf.touch(mode=0o600)
            paths.slurmdbd_conf.chmod(0o600)
            paths.slurmdbd_conf.write_text(slurmdbd_conf(site))
            create_database(paths, self.programs, site.user)

    def _site(self) -> Site:
        state, programs = self.state, self.programs
        return Site(self.paths, state.ports, _user_name(), state.version, programs.plugins)

    def _start(self, timeout_seconds: float) -> None:
        launcher, state = self.launcher, self.state
        records = [launcher.munged()]
        if state.shape.accounting == "slurmdbd":
            records += [launcher.mariadbd(_user_name()), launcher.slurmdbd(state.ports.accounting)]
            register(self._site(), self.programs, state.shape)
        records.append(launcher.slurmctld())
        records += launcher.slurmds(state.shape.node_names)
        write_state(self.paths, replace(state, daemons=tuple(records)))
        # A daemon checks most of its configuration after it has daemonized.
        await_condition(lambda: bool(self._dead()) or not self._late_nodes(), timeout_seconds)
        if dead := self._dead():
            raise SlurmError(f"{dead[0]} died: {log_tail(self.paths.log(dead[0]))}")
        if late := self._late_nodes():
            raise SlurmUnreachableError(
                f"no report from {len(late)} nodes in {timeout_seconds:g} s, among them {late[0]}: "
                f"{log_tail(self.paths.log(slurmd_name(late[0])))}"
            )

        if state.shape.reserved_as is not None:
            self._reserve(state.shape.reserved_as)
        if state.monitoring is not None:
            self._start_monitors(state.monitoring)

    def _reserve(self, name: str) -> None:
        """Make a reservation of all nodes for this user; Slurm remembers it from start to start."""
        known = self.command("scontrol", "--oneliner", "show", "reservation").split()
        if f"ReservationName={name}" not in known:
            self.command(
                "scontrol", "create", "reservation", f"ReservationName={name}",
                f"Users={_user_name()}", "StartTime=now", "Duration=UNLIMITED", "Nodes=ALL",
            )  # fmt: skip

    def _start_monitors(self, monitoring: Monitoring) -> None:
        """Write the configuration of the monitors and start them, each before those that ask it."""
        ports, files = self.state.ports, MonitorFiles(self.paths)
        for directory in files.all_directories():
            directory.mkdir(mode=0o700, exist_ok=True)
        # Prometheus complains again and again about a directory that is not there yet.
        with contextlib.suppress(OSError):
            job_endpoints(monitoring.runs).mkdir(parents=True, exist_ok=True)
        texts = {
            files.prometheus_yaml: prometheus_yaml(files, ports, monitoring),
            files.alertmanager_yaml: alertmanager_yaml(monitoring),
            files.rules: with_delays(RULES.read_text(), monitoring.delay_factor),
        }
        for path, text in texts.items():
            replace_text(path, text, mode=0o600, durable=False)
        for name in MONITORS:
            self.remember(self.launcher.monitor(name, ports, monitoring))
        write_state(self.paths, replace(self.state, monitoring=monitoring))

    def _stop_monitors(self) -> None:
        state = self.state
        running = [record for record in state.daemons if record.name in MONITORS]
        stop_monitors(self.paths, running)
        others = tuple(record for record in state.daemons if record not in running)
        write_state(self.paths, replace(state, daemons=others, monitoring=None))

    def _dead(self) -> list[str]:
        return [record.name for record in self.state.daemons if not is_alive(record.identity)]

    def _late_nodes(self) -> list[str]:
        """List the nodes that have not reported: state unknown, or ending with `*`."""
        states = self.node_states()
        return [
            name
            for name in self.shape.node_names
            if states.get(name, "unknown") == "unknown" or states[name].endswith("*")
        ]

    def _stop(self) -> None:
        state, paths = self.state, self.paths
        names = state.shape.node_names
        # Listed while the slurmstepds run: their children are found through them.
        processes = processes_of_nodes(paths, names)
        stop_daemons(paths, state.daemons)
        kill(process.identity for process in processes)
        for _ in range(3):  # a process that was being forked in one pass is seen in the next
            kill(process.identity for process in processes_of_nodes(paths, names))
        shutil.rmtree(state.sockets, ignore_errors=True)
        write_state(paths, replace(state, daemons=()))


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UsageError(
            f"the user with id {os.geteuid()} has no name, and Slurm serves named users only",
            "add the user to /etc/passwd or to the directory service",
        ) from None
