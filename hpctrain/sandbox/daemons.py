"""Start, stop and identify the daemons of a sandbox.

Belongs here: munged, slurmctld, slurmd, the slurmstepds they leave behind, and what watches runs.
Does not belong here: the order in which a whole sandbox is started (see `sandbox`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.sandbox.config import Site, quoted
from hpctrain.sandbox.monitoring import (
    MONITORS,
    MonitorFiles,
    Monitoring,
    monitor_argv,
    ready_page,
)
from hpctrain.sandbox.paths import Ports, SandboxPaths, answers, is_served
from hpctrain.sandbox.processes import (
    Process,
    ProcessId,
    all_processes,
    await_condition,
    descendants,
    end,
    find_process,
    is_alive,
    kill,
    open_files,
    read_command_line,
    read_environment,
)
from hpctrain.sandbox.programs import Programs, call, daemon_environment
from hpctrain.sandbox.shape import SandboxShape
from hpctrain.sandbox.state import DaemonRecord

_DAEMON_NAMES = ("munged", "slurmctld", "slurmd", "slurmstepd", "slurmdbd", "mariadbd")
# Whatever needs another daemon to shut down cleanly ends before it.
_ENDED_LAST = ("slurmdbd", "mariadbd", "munged")
# Tells the monitors from what jobs start, which have the name of the sandbox, too.
_MONITOR_VARIABLE = "HPCTRAIN_SANDBOX_MONITOR"
# Starts a program that does not become a daemon by itself; call() waits for its open files.
_IN_BACKGROUND = ("/bin/sh", "-c", 'exec setsid "$0" "$@" >/dev/null 2>&1 </dev/null &')
# The same for one that writes neither a PID file nor a log: their names are the first two words.
_WITH_FILES = (*("/bin/sh", "-c", 'echo $$ >"$0"; log=$1; shift; exec "$@" >>"$log" 2>&1'),)
_START_TIMEOUT_SECONDS = 120.0
# A daemon without a process for so long has died.
_ABSENT_SECONDS = 3.0
_SLURMDBD_TIMEOUT_SECONDS = 300.0
_STOP_GRACE_SECONDS = 5.0
_LOG_TAIL_LINES = 8


@dataclass(frozen=True)
class DaemonLauncher:
    """Starts daemons. All but mariadbd and monitors daemonize themselves; all have a PID file."""

    paths: SandboxPaths
    programs: Programs

    def munged(self) -> DaemonRecord:
        munge = self.paths.munge_key.parent
        argv = [
            self.programs["munged"],
            # --force: a parent directory that is open to others is a warning, not the end.
            "--force",
            f"--key-file={self.paths.munge_key}",
            f"--socket={self.paths.munge_socket}",
            f"--pid-file={self.paths.pid_file('munged')}",
            f"--log-file={self.paths.log('munged')}",
            f"--seed-file={munge / 'munge.seed'}",
            "--num-threads=4",
        ]
        return self._start("munged", argv)

    def mariadbd(self, user: str) -> DaemonRecord:
        argv = database_argv(self.paths, self.programs, user)
        self._launch("mariadbd", [*_IN_BACKGROUND, *argv])
        return self._await("mariadbd", argv)

    def slurmdbd(self, port: int) -> DaemonRecord:
        """Start slurmdbd and wait until it listens: its first start makes some fifty tables."""
        record = self._start("slurmdbd", [self.programs["slurmdbd"]])
        await_condition(
            lambda: is_served(port) or not is_alive(record.identity), _SLURMDBD_TIMEOUT_SECONDS
        )
        if not is_served(port):
            raise SlurmError(f"slurmdbd does not answer: {log_tail(self.paths.log('slurmdbd'))}")
        return record

    def monitor(self, name: str, ports: Ports, monitoring: Monitoring) -> DaemonRecord:
        """Start one of MONITORS and wait until it is ready."""
        argv = monitor_argv(name, MonitorFiles(self.paths), ports, monitoring)
        files = (str(self.paths.pid_file(name)), str(self.paths.log(name)))
        more = {_MONITOR_VARIABLE: name}
        if name == "exporter" and "PYTHONPATH" in os.environ:  # it is this very hpctrain
            more["PYTHONPATH"] = os.environ["PYTHONPATH"]
        # Where Alertmanager finds its templates (see `prometheus-from-debian`).
        directory = monitoring.programs / "root" / "usr" / "bin"
        self._launch(name, [*_IN_BACKGROUND, *_WITH_FILES, *files, *argv], more, directory)
        record = self._await(name, argv)
        page = ready_page(name, ports)
        await_condition(
            lambda: answers(page) or not is_alive(record.identity), _START_TIMEOUT_SECONDS
        )
        if not answers(page):
            raise SlurmError(f"{name} does not answer: {log_tail(self.paths.log(name))}")
        return record

    def slurmctld(self) -> DaemonRecord:
        argv = [self.programs["slurmctld"], "-f", str(self.paths.slurm_conf)]
        return self._start("slurmctld", argv)

    def slurmd(self, node: str, *, rebooted: bool = False) -> DaemonRecord:
        """Start the slurmd of a node; `rebooted` reports a fresh boot: slurmd(8), -b."""
        argv = [*self._slurmd_argv(node), "-b"] if rebooted else self._slurmd_argv(node)
        return self._start(slurmd_name(node), argv)

    def slurmds(self, nodes: tuple[str, ...]) -> list[DaemonRecord]:
        """Start many at once, and then wait for their PID files."""
        names = [slurmd_name(node) for node in nodes]
        commands = [self._slurmd_argv(node) for node in nodes]
        for name, argv in zip(names, commands, strict=True):
            self._launch(name, argv)
        return [self._await(name, argv) for name, argv in zip(names, commands, strict=True)]

    def _slurmd_argv(self, node: str) -> list[str]:
        argv = [self.programs["slurmd"], "-N", node, "-f", str(self.paths.slurm_conf)]
        if self.programs.plugins is None:
            return argv
        # slurmd(8): the path of slurmstepd is compiled in as well.
        return [*argv, "-d", self.programs["slurmstepd"]]

    def _start(self, name: str, argv: list[str]) -> DaemonRecord:
        self._launch(name, argv)
        return self._await(name, argv)

    def _launch(
        self,
        name: str,
        argv: list[str],
        more: Mapping[str, str] = MappingProxyType({}),
        directory: Path | None = None,
    ) -> None:
        # A killed daemon leaves its file behind, and another process may have that PID by now.
        self.paths.pid_file(name).unlink(missing_ok=True)
        environment = daemon_environment(self.paths.slurm_conf, self.programs)
        # libmariadb(3): how slurmdbd finds the socket of its database.
        environment["MYSQL_UNIX_PORT"] = str(self.paths.database_socket)
        call(argv, environment | dict(more), directory=directory or self.paths.directory)

    def _await(self, name: str, argv: list[str]) -> DaemonRecord:
        seen_at = clock.monotonic()

        def started_or_died() -> bool:
            # A daemon daemonizes first and reads most of its configuration later, so its exit code
            # proves little. One that dies then never writes a PID file. A process has its own
            # command line only after exec(2), which a busy machine may delay.
            nonlocal seen_at
            if read_record(self.paths, name) is not None:
                return True
            if any(read_command_line(process.pid) == tuple(argv) for process in all_processes()):
                seen_at = clock.monotonic()
            return clock.monotonic() - seen_at > _ABSENT_SECONDS

        await_condition(started_or_died, _START_TIMEOUT_SECONDS)
        record = read_record(self.paths, name)
        if record is None:
            raise SlurmError(f"{name} did not start: {log_tail(self.paths.log(name))}")
        return record


def slurmd_name(node: str) -> str:
    """Return the name of one node's slurmd in records and logs."""
    return f"slurmd-{node}"


def read_record(paths: SandboxPaths, name: str) -> DaemonRecord | None:
    """Return the running daemon that the PID file names; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        process = find_process(int(paths.pid_file(name).read_text()))
        if process is not None:
            return DaemonRecord(name, process.identity)
    return None


def log_tail(log: Path) -> str:
    """Return the last lines of a log file, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it wrote no log"
    return "\n".join(["its log ends with", *lines[-_LOG_TAIL_LINES:]])


def sandbox_daemons(paths: SandboxPaths) -> tuple[Process, ...]:
    """List every running daemon of this sandbox, also those without a record."""
    logs = f"{paths.log('slurmd').parent}/"

    def belongs(process: Process) -> bool:
        environment = read_environment(process.pid)
        if environment.get("SLURM_CONF") == str(paths.slurm_conf):
            named = process.name.startswith(_DAEMON_NAMES)
            return named or environment.get(_MONITOR_VARIABLE) in MONITORS
        # Since 24.11 a slurmstepd writes its title over its environment, and /proc shows no
        # SLURM_CONF; but it holds a log of the sandbox open.
        return process.name.startswith("slurmstepd") and any(
            name.startswith(logs) for name in open_files(process.pid)
        )

    return tuple(process for process in all_processes() if belongs(process))


def step_daemons(paths: SandboxPaths, node: str | None = None) -> tuple[Process, ...]:
    """List the slurmstepds of this sandbox, of one node or of all.

    They outlive their slurmd, and PID 1 adopts them. Their node is known only from the log file
    that they share with their slurmd.
    """
    log = None if node is None else str(paths.log(slurmd_name(node)))
    return tuple(
        daemon
        for daemon in sandbox_daemons(paths)
        if daemon.name.startswith("slurmstepd") and (log is None or log in open_files(daemon.pid))
    )


def stop_daemons(paths: SandboxPaths, records: Iterable[DaemonRecord]) -> None:
    """End every daemon, each before those that it needs to shut down cleanly."""
    known = {record.identity: record.name for record in records}
    known |= {daemon.identity: daemon.name for daemon in sandbox_daemons(paths)}
    last = [
        [identity for identity, found in known.items() if found.startswith(name)]
        for name in _ENDED_LAST
    ]
    needed = {identity for identities in last for identity in identities}
    kill(step.identity for step in step_daemons(paths))
    end([identity for identity in known if identity not in needed], _STOP_GRACE_SECONDS)
    # A slurmd that was just starting a step may have left one more.
    kill(daemon.identity for daemon in sandbox_daemons(paths) if daemon.identity not in needed)
    for identities in last:
        end(identities, _STOP_GRACE_SECONDS)


def stop_monitors(paths: SandboxPaths, records: Iterable[DaemonRecord]) -> None:
    """End what watches runs, and leave Slurm alone."""
    strays = (
        daemon.identity
        for daemon in sandbox_daemons(paths)
        if read_environment(daemon.pid).get(_MONITOR_VARIABLE) in MONITORS
    )
    end([*(record.identity for record in records), *strays], _STOP_GRACE_SECONDS)


# ----------------------------------------------------------------------------------------------
# Give a sandbox its accounting: a database, slurmdbd, and the records without which no job starts.


# What every user of the sandbox belongs to; sites call theirs by the name of a project.
ACCOUNT = "default"
_DATABASE_TIMEOUT_SECONDS = 300.0


def slurmdbd_conf(site: Site) -> str:
    """Generate the file of slurmdbd, which must be readable by its user only."""
    paths = site.paths
    plugins = f"PluginDir={quoted(site.plugins)}\n" if site.plugins else ""
    return f"""\
# Made by `hpctrain sandbox`; written anew by every start.
AuthType=auth/munge
AuthInfo={quoted(f"socket={paths.munge_socket}")}
DbdHost=localhost
DbdPort={site.ports.accounting}
SlurmUser={site.user}
# Otherwise it listens on all network devices.
CommunicationParameters=NoInAddrAny
{plugins}StorageType=accounting_storage/mysql
# By the socket that MYSQL_UNIX_PORT names; the database knows its user by that of the process.
StorageHost=localhost
StorageUser={site.user}
PidFile={quoted(paths.pid_file("slurmdbd"))}
LogFile={quoted(paths.log("slurmdbd"))}
"""


def database_argv(paths: SandboxPaths, programs: Programs, user: str) -> list[str]:
    """Build the command line of a small MariaDB without a network port."""
    return [
        programs["mariadbd"],
        "--no-defaults",
        f"--basedir={_base(programs)}",
        f"--datadir={paths.database}",
        # A mariadbd that starts removes temporary tables of any other one in the same directory.
        f"--tmpdir={paths.database_scratch}",
        f"--socket={paths.database_socket}",
        f"--pid-file={paths.pid_file('mariadbd')}",
        f"--log-error={paths.log('mariadbd')}",
        f"--user={user}",
        "--skip-networking",
        "--performance-schema=OFF",
        # Small: a sandbox has some hundred jobs. The lock timeout is what slurmdbd asks for.
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    ]


def create_database(paths: SandboxPaths, programs: Programs, user: str) -> None:
    """Make the system tables of MariaDB, once. Raises SlurmError with its message."""
    if (paths.database / "mysql").is_dir():
        return
    argv = [
        programs["mariadb-install-db"],
        "--no-defaults",
        f"--basedir={_base(programs)}",
        f"--datadir={paths.database}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={user}",
        "--skip-test-db",
        "--skip-name-resolve",
        f"--user={user}",
    ]
    paths.database_scratch.mkdir(mode=0o700, exist_ok=True)
    environment = daemon_environment(paths.slurm_conf, programs)
    environment["TMPDIR"] = str(paths.database_scratch)
    call(argv, environment, timeout_seconds=_DATABASE_TIMEOUT_SECONDS, directory=paths.directory)


def register(site: Site, programs: Programs, shape: SandboxShape) -> None:
    """Tell slurmdbd of the cluster, its accounts and QOS, and of the user if they are new.

    Raises SlurmError when slurmdbd refuses, SlurmUnreachableError when it does not answer.
    """
    user, cluster = site.user, shape.cluster_name
    environment = daemon_environment(site.paths.slurm_conf, programs)

    def sacctmgr(*words: str) -> str:
        return call([programs["sacctmgr"], *words], environment)

    known = sacctmgr("--noheader", "--parsable2", "show", "associations", "format=cluster,user")
    if f"{cluster}|{user}" in known.splitlines():
        return
    if cluster not in sacctmgr("-nP", "show", "cluster", "format=cluster").split():
        sacctmgr("-i", "add", "cluster", cluster)
    for account in dict.fromkeys((ACCOUNT, *shape.accounts)):
        sacctmgr("-i", "add", "account", account, f"cluster={cluster}", "Description=sandbox")
        sacctmgr("-i", "add", "user", user, f"account={account}", f"cluster={cluster}")
    # root has an account of the same name from the beginning, which would be the default one.
    sacctmgr("-i", "modify", "user", user, "set", f"DefaultAccount={ACCOUNT}")
    if shape.qos:
        known_qos = sacctmgr("-nP", "show", "qos", "format=name").split()
        for name in shape.qos:
            if name not in known_qos:
                sacctmgr("-i", "add", "qos", name)
        sacctmgr("-i", "modify", "user", user, "set", f"qos+={','.join(shape.qos)}")


def _base(programs: Programs) -> Path:
    """Return the directory that has MariaDB's bin, sbin and share: /usr, or that of an unpacked."""
    return Path(programs["mariadbd"]).resolve().parent.parent


# ----------------------------------------------------------------------------------------------
# Find the processes that jobs run on the nodes of a sandbox: batch shells, supervisors, ranks.


@dataclass(frozen=True)
class JobProcess:
    """One process of a job; `step_id` and `rank` are None in the batch step.

    For an agent that starts ranks, `rank` is the number of its task.
    """

    identity: ProcessId
    command_line: tuple[str, ...]
    job_id: str
    node: str
    step_id: str | None
    rank: int | None

    @property
    def pid(self) -> int:
        return self.identity.pid


def find_job_processes(paths: SandboxPaths, node_names: tuple[str, ...]) -> tuple[JobProcess, ...]:
    """List all job processes on these nodes, also those that have lost their slurmstepd.

    They are recognized by their environment: Slurm sets SLURM_CONF, SLURM_JOB_ID and
    SLURMD_NODENAME for all of them. A client outside of a job has no SLURMD_NODENAME of the
    sandbox.
    """
    slurm_conf, nodes = str(paths.slurm_conf), frozenset(node_names)
    processes = []
    for process in all_processes():
        environment = read_environment(process.pid)
        node = environment.get("SLURMD_NODENAME", "")
        job_id = environment.get("SLURM_JOB_ID")
        if environment.get("SLURM_CONF") == slurm_conf and job_id and node in nodes:
            # of a step of srun; the batch step has -5 in 26.05, and none before
            step_id = environment.get("SLURM_STEP_ID")
            step_id = step_id if step_id is not None and step_id.isdecimal() else None
            # The batch step has a SLURM_PROCID too, but it is no rank.
            task = environment.get("RANK", environment.get("SLURM_PROCID"))
            rank = None if step_id is None or task is None else int(task)
            command_line = read_command_line(process.pid)
            processes.append(
                JobProcess(process.identity, command_line, job_id, node, step_id, rank)
            )
    return tuple(processes)


def processes_of_nodes(
    paths: SandboxPaths, node_names: tuple[str, ...], node: str | None = None
) -> tuple[Process, ...]:
    """List what runs on `node`, or on all: slurmstepds, their descendants, and orphans.

    A process with a cleaned environment is found below its slurmstepd. One whose slurmstepd has
    died is found by its environment. A process to which both applies is not found.
    """
    everything = all_processes()
    steps = step_daemons(paths, node)
    below = descendants([step.pid for step in steps], everything)
    nodes = node_names if node is None else (node,)
    job_pids = {process.pid for process in find_job_processes(paths, nodes)}
    in_jobs = [process for process in everything if process.pid in job_pids]
    return tuple({process.pid: process for process in (*steps, *below, *in_jobs)}.values())
