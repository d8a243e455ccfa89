"""Starting and stopping the daemons of a sandbox, and telling which process is which.

Belongs here: munged, slurmctld, slurmd, and the slurmstepds and job processes they leave behind.
Does not belong here: the order in which a whole sandbox comes up (see `sandbox`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SlurmError
from hpctrain.sandbox.paths import SandboxPaths
from hpctrain.sandbox.processes import (
    Process,
    all_processes,
    await_condition,
    end,
    find_process,
    kill,
    open_files,
    read_command_line,
    read_environment,
)
from hpctrain.sandbox.programs import Programs, call, daemon_environment
from hpctrain.sandbox.state import DaemonRecord

_DAEMON_NAMES = ("munged", "slurmctld", "slurmd", "slurmstepd")
_START_TIMEOUT_SECONDS = 20.0
_STOP_GRACE_SECONDS = 5.0
_LOG_TAIL_LINES = 8


@dataclass(frozen=True)
class Launcher:
    """Starts daemons: all of them go into the background by themselves and leave a PID file."""

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

    def slurmctld(self) -> DaemonRecord:
        argv = [self.programs["slurmctld"], "-f", str(self.paths.slurm_conf)]
        return self._start("slurmctld", argv)

    def slurmd(self, node: str, *, rebooted: bool = False) -> DaemonRecord:
        """`rebooted` makes slurmctld believe that the machine has just booted: slurmd(8), -b."""
        argv = [*self._slurmd_argv(node), "-b"] if rebooted else self._slurmd_argv(node)
        return self._start(slurmd_name(node), argv)

    def slurmds(self, nodes: tuple[str, ...]) -> list[DaemonRecord]:
        """Many at once: the time they need to write their PID files passes only once."""
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

    def _launch(self, name: str, argv: list[str]) -> None:
        # One that was killed leaves its file behind, and its PID may be somebody else's by now.
        self.paths.pid_file(name).unlink(missing_ok=True)
        environment = daemon_environment(self.paths.slurm_conf, self.programs)
        call(argv, environment, directory=self.paths.directory)

    def _await(self, name: str, argv: list[str]) -> DaemonRecord:
        await_condition(
            lambda: read_record(self.paths, name) is not None or not _runs(argv),
            _START_TIMEOUT_SECONDS,
        )
        record = read_record(self.paths, name)
        if record is None:
            raise SlurmError(f"{name} did not start: {log_tail(self.paths.log(name))}")
        return record


def slurmd_name(node: str) -> str:
    """The name of the daemon of one node."""
    return f"slurmd-{node}"


def read_record(paths: SandboxPaths, name: str) -> DaemonRecord | None:
    """The living daemon that its PID file names; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        process = find_process(int(paths.pid_file(name).read_text()))
        if process is not None:
            return DaemonRecord(name, process.identity)
    return None


def log_tail(log: Path) -> str:
    """The last lines of a log file, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it wrote no log"
    return "\n".join(["its log ends with", *lines[-_LOG_TAIL_LINES:]])


def sandbox_daemons(paths: SandboxPaths) -> tuple[Process, ...]:
    """Every living daemon of this sandbox, also those that no record names."""
    return tuple(
        process
        for process in all_processes()
        if process.name.startswith(_DAEMON_NAMES) and _belongs_to(paths, process)
    )


def _belongs_to(paths: SandboxPaths, process: Process) -> bool:
    """By its environment, or by the log that it holds open.

    Since 24.11 a slurmstepd writes its title over its environment: /proc shows no SLURM_CONF then.
    """
    if read_environment(process.pid).get("SLURM_CONF") == str(paths.slurm_conf):
        return True
    logs = f"{paths.log('slurmd').parent}/"
    return process.name.startswith("slurmstepd") and any(
        name.startswith(logs) for name in open_files(process.pid)
    )


def step_daemons(paths: SandboxPaths, node: str | None = None) -> tuple[Process, ...]:
    """The slurmstepds of this sandbox, of one node or of all.

    They outlive their slurmd, are adopted by PID 1, and say nowhere which node they belong to:
    only the log file they share with their slurmd tells.
    """
    log = None if node is None else str(paths.log(slurmd_name(node)))
    return tuple(
        daemon
        for daemon in sandbox_daemons(paths)
        if daemon.name.startswith("slurmstepd") and (log is None or log in open_files(daemon.pid))
    )


def stop_daemons(paths: SandboxPaths, records: Iterable[DaemonRecord]) -> None:
    """End every daemon, munged last: the others cannot say goodbye without it."""
    known = {record.identity: record.name for record in records}
    known |= {daemon.identity: daemon.name for daemon in sandbox_daemons(paths)}
    munged = [identity for identity, name in known.items() if name.startswith("munged")]
    others = [identity for identity in known if identity not in munged]
    kill(step.identity for step in step_daemons(paths))
    end(others, _STOP_GRACE_SECONDS)
    # A slurmd that was just starting a step may have left one more.
    kill(daemon.identity for daemon in sandbox_daemons(paths) if daemon.identity not in munged)
    end(munged, _STOP_GRACE_SECONDS)


def _runs(argv: list[str]) -> bool:
    # A daemon goes into the background first and reads most of its configuration later, so its
    # exit code says little; and one that dies then never writes a PID file to wait for.
    return any(read_command_line(process.pid) == tuple(argv) for process in all_processes())
