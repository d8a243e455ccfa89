"""Inject faults into a sandbox, for rehearsals and tests.

Belongs here: crashes, hangs and returns of nodes, of the controller and of single processes.
Does not belong here: restoring a sandbox (see `repair`).

A crash here differs from a loss of power in one respect: the kernel keeps running and closes the
connections of killed processes, so peers see a reset at once. `freeze_node` is the case in which
connections stay open and nothing arrives.
"""

from __future__ import annotations

import signal

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.sandbox.daemons import (
    JobProcess,
    find_job_processes,
    processes_of_nodes,
    slurmd_name,
    step_daemons,
)
from hpctrain.sandbox.processes import (
    Process,
    ProcessId,
    all_processes,
    await_condition,
    find_process,
    is_alive,
    kill,
    read_command_line,
    send,
)
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.state import DaemonRecord
from hpctrain.slurm.settings import capabilities_of_release

_CONTROLLER_TIMEOUT_SECONDS = 120.0
# slurmctld compares boot time and last message in whole seconds: a node that returns within the
# same second does not count as rebooted.
_BOOT_SECONDS = 2.0
_SHUTDOWN_SECONDS = 120.0
_PROLOG = "prolog"


def crash_node(sandbox: Sandbox, node: str) -> None:
    """Kill slurmd, every slurmstepd and every job process on the node at once, like a power-off."""
    # Stopped first: a slurmstepd that saw its tasks die would still report it.
    freeze_node(sandbox, node)
    kill(_everything_on(sandbox, node))


def freeze_node(sandbox: Sandbox, node: str) -> None:
    """Hang the node: stop all its processes."""
    for _ in range(2):  # a process that was being forked in the first pass is seen in the second
        send(_everything_on(sandbox, node), signal.SIGSTOP)


def thaw_node(sandbox: Sandbox, node: str) -> None:
    """Let the processes of a frozen node continue."""
    send(_everything_on(sandbox, node), signal.SIGCONT)


def shut_down_node(sandbox: Sandbox, node: str) -> None:
    """Begin an orderly shutdown: SIGTERM to every process on the node, including slurmd.

    systemd sends SIGKILL to the rest 90 s later (systemd-system.conf(5), DefaultTimeoutStopSec);
    `crash_node` does that. `restart_node` with `rebooted` completes a reboot.
    """
    send(_everything_on(sandbox, node), signal.SIGTERM)
    daemon = slurmd_name(_known(sandbox, node))
    if not await_condition(lambda: not sandbox.daemon_is_alive(daemon), _SHUTDOWN_SECONDS):
        raise SlurmError(f"the slurmd of {node} got SIGTERM and is still running")


def kill_slurmd(sandbox: Sandbox, node: str) -> None:
    """SIGKILL the slurmd only: its steps keep running, as after a crash of the daemon."""
    kill(_daemon(sandbox, slurmd_name(_known(sandbox, node))))


def kill_stepd(sandbox: Sandbox, node: str) -> None:
    """SIGKILL every slurmstepd of the node: ranks keep running as orphans, unnoticed by Slurm."""
    kill(step.identity for step in step_daemons(sandbox.paths, _known(sandbox, node)))


def restart_node(sandbox: Sandbox, node: str, *, rebooted: bool) -> None:
    """Start the slurmd of a crashed node; with `rebooted` it reports a fresh boot.

    Raises UsageError when the slurmd is running.
    """
    if sandbox.daemon_is_alive(slurmd_name(_known(sandbox, node))):
        raise UsageError(f"the slurmd of {node} is running", "crash the node first")
    if rebooted:
        clock.sleep(_BOOT_SECONDS)
    sandbox.remember(sandbox.launcher.slurmd(node, rebooted=rebooted))


def has_rebooted(sandbox: Sandbox, node: str) -> bool:
    """Whether Slurm knows that a node which ran a job is back from its reboot, and keeps it down.

    Only then does `resume_node` last. A node that is resumed while Slurm has not heard from it yet
    (`down*`) is down again as soon as it registers (seen on 22.05.8).
    """
    return sandbox.node_states().get(_known(sandbox, node)) == "down"


def resume_node(sandbox: Sandbox, node: str) -> None:
    """Return a node that is down or drained to the scheduler: scontrol(1), State=RESUME.

    Raises SlurmError when the node is in use already.
    """
    sandbox.command("scontrol", "update", f"NodeName={_known(sandbox, node)}", "State=RESUME")


def break_prolog(sandbox: Sandbox, node: str) -> None:
    """Configure a job prolog that fails on this node: slurm.conf(5), Prolog."""
    script = sandbox.directory / _PROLOG
    script.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" != {_known(sandbox, node)} ]\n')
    script.chmod(0o700)
    set_option(sandbox, "Prolog", str(script))


def mend_prolog(sandbox: Sandbox) -> None:
    """Remove the failing prolog, if there is one."""
    script = sandbox.directory / _PROLOG
    if script.exists():
        set_option(sandbox, "Prolog", None)
        script.unlink()


def kill_controller(sandbox: Sandbox) -> None:
    """SIGKILL slurmctld; jobs keep running, and commands fail after MessageTimeout.

    Events of the last 5 s are lost, even a submission: slurmctld saves its state in the background
    (seen on 22.05.8).
    """
    kill(_daemon(sandbox, "slurmctld"))


def restart_controller(sandbox: Sandbox) -> None:
    """Start slurmctld again from its saved state and wait until it answers.

    Raises UsageError when it is running, SlurmUnreachableError when it does not answer in time.
    """
    if sandbox.daemon_is_alive("slurmctld"):
        raise UsageError("slurmctld is running", "kill it first")
    sandbox.remember(sandbox.launcher.slurmctld())
    if not await_condition(lambda: bool(sandbox.node_states()), _CONTROLLER_TIMEOUT_SECONDS):
        raise SlurmUnreachableError("slurmctld was started again and does not answer")


def job_processes(sandbox: Sandbox, job_id: str, node: str | None = None) -> tuple[JobProcess, ...]:
    """List the processes of a job on one node or on all: batch shell, supervisor, srun, ranks."""
    nodes = sandbox.shape.node_names if node is None else (_known(sandbox, node),)
    processes = find_job_processes(sandbox.paths, nodes)
    return tuple(process for process in processes if process.job_id == job_id)


def _everything_on(sandbox: Sandbox, node: str) -> list[ProcessId]:
    below = processes_of_nodes(sandbox.paths, sandbox.shape.node_names, _known(sandbox, node))
    return _daemon(sandbox, slurmd_name(node)) + [process.identity for process in below]


def _daemon(sandbox: Sandbox, name: str) -> list[ProcessId]:
    return [record.identity for record in sandbox.state.daemons if record.name == name]


def _known(sandbox: Sandbox, node: str) -> str:
    if node not in sandbox.shape.node_names:
        raise UsageError(f"the sandbox has no node {node}, only {sandbox.shape.node_range}")
    return node


# -- Change the configuration of a running sandbox ----------------------------------------------


_REPLACED_TIMEOUT_SECONDS = 120.0


def set_option(sandbox: Sandbox, key: str, value: str | None) -> None:
    """Set or remove `key` in slurm.conf, and make all daemons read the file again.

    Raises SlurmError when slurmctld refuses it, SlurmUnreachableError when a daemon does not come
    back.
    """
    conf = sandbox.paths.slurm_conf
    lines = [line for line in conf.read_text().splitlines() if not line.startswith(f"{key}=")]
    if value is not None:
        lines.append(f"{key}={value}")
    conf.write_text("\n".join(lines) + "\n")
    running = []  # daemons of Slurm that are neither dead nor frozen
    for record in sandbox.state.daemons:
        process = find_process(record.identity.pid)
        if process is None or process.identity != record.identity or process.state == "T":
            continue
        if record.name.startswith(("slurmctld", "slurmd-")):
            running.append((record, read_command_line(process.pid)))
    sandbox.command("scontrol", "reconfigure")
    if capabilities_of_release(sandbox.state.version).replaces_daemons:
        for record, argv in running:
            sandbox.remember(_await_successor(record, argv))


def raise_job_ids(sandbox: Sandbox, first: int) -> None:
    """Make the next job get the id `first`, or a higher one if that is taken already.

    slurm.conf(5), FirstJobId. Raises SlurmError when slurmctld does not answer.
    """
    set_option(sandbox, "FirstJobId", str(first))


def _await_successor(record: DaemonRecord, argv: tuple[str, ...]) -> DaemonRecord:
    """Wait for the process that replaces a daemon: it has the same command line, and stays.

    The PID file tells nothing: a daemon that is held up removes it on leaving, after its successor
    has written it (seen with 24.11.5). Children of the successor come later than itself.
    """
    found: list[Process] = []

    def replaced() -> bool:
        if is_alive(record.identity):
            return False
        found[:] = (one for one in all_processes() if read_command_line(one.pid) == argv)
        return bool(found)

    if await_condition(replaced, _REPLACED_TIMEOUT_SECONDS):
        first = min(found, key=lambda process: process.identity.start_ticks)
        return DaemonRecord(record.name, first.identity)
    raise SlurmUnreachableError(f"{record.name} did not come back after `scontrol reconfigure`")
