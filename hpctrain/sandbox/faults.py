"""Breaking a sandbox on purpose, for rehearsals and tests.

Belongs here: crashes, hangs and returns of nodes, of the controller and of single processes.
Does not belong here: putting everything right again (see `repair`).

A crash here differs from a loss of power in one respect: the kernel lives on and closes the
connections of the dead, so peers see a reset at once. `freeze_node` is the case in which
connections stay open and nothing comes.
"""

from __future__ import annotations

import signal
import time

from hpctrain.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.sandbox.daemons import slurmd_name, step_daemons
from hpctrain.sandbox.job_processes import JobProcess, find_job_processes, processes_of_nodes
from hpctrain.sandbox.processes import ProcessId, await_condition, kill, send
from hpctrain.sandbox.reconfigure import set_option
from hpctrain.sandbox.sandbox import Sandbox

_CONTROLLER_TIMEOUT_SECONDS = 30.0
# slurmctld calls a node rebooted when it booted after its last message, in whole seconds: one that
# comes back within the same second passes for never gone.
_BOOT_SECONDS = 2.0
_SHUTDOWN_SECONDS = 30.0
_PROLOG = "prolog"


def crash_node(sandbox: Sandbox, node: str) -> None:
    """Power off: slurmd, every slurmstepd and every process of jobs on the node, at once."""
    # Stopped first: a slurmstepd that saw its tasks die would still report it.
    freeze_node(sandbox, node)
    kill(_everything_on(sandbox, node))


def freeze_node(sandbox: Sandbox, node: str) -> None:
    """Hang the node: all its processes are stopped, and nobody is told."""
    for _ in range(2):  # a process that was forking at the first look is seen at the second
        send(_everything_on(sandbox, node), signal.SIGSTOP)


def thaw_node(sandbox: Sandbox, node: str) -> None:
    """Let a frozen node go on."""
    send(_everything_on(sandbox, node), signal.SIGCONT)


def shut_down_node(sandbox: Sandbox, node: str) -> None:
    """What an orderly shutdown begins with: TERM to every process on the node, slurmd among them.

    systemd sends KILL to what is left 90 s later (systemd-system.conf(5), DefaultTimeoutStopSec):
    `crash_node`. `restart_node` with `rebooted` completes a reboot.
    """
    send(_everything_on(sandbox, node), signal.SIGTERM)
    daemon = slurmd_name(_known(sandbox, node))
    if not await_condition(lambda: not sandbox.daemon_is_alive(daemon), _SHUTDOWN_SECONDS):
        raise SlurmError(f"the slurmd of {node} was asked to end and lives on")


def kill_slurmd(sandbox: Sandbox, node: str) -> None:
    """SIGKILL the slurmd only: its steps run on, as after a crash of the daemon."""
    kill(_daemon(sandbox, slurmd_name(_known(sandbox, node))))


def kill_stepd(sandbox: Sandbox, node: str) -> None:
    """SIGKILL every slurmstepd of the node: the ranks run on as orphans, and Slurm sees nothing."""
    kill(step.identity for step in step_daemons(sandbox.paths, _known(sandbox, node)))


def restart_node(sandbox: Sandbox, node: str, *, rebooted: bool) -> None:
    """Start the slurmd of a crashed node; with `rebooted` it claims that the machine has booted.

    Raises UsageError when the slurmd lives.
    """
    if sandbox.daemon_is_alive(slurmd_name(_known(sandbox, node))):
        raise UsageError(f"the slurmd of {node} lives", "crash the node first")
    if rebooted:
        time.sleep(_BOOT_SECONDS)
    sandbox.remember(sandbox.launcher.slurmd(node, rebooted=rebooted))


def resume_node(sandbox: Sandbox, node: str) -> None:
    """Give a node that is down or drained back to the scheduler: scontrol(1), State=RESUME.

    Raises SlurmError when the node is in use already.
    """
    sandbox.command("scontrol", "update", f"NodeName={_known(sandbox, node)}", "State=RESUME")


def break_prolog(sandbox: Sandbox, node: str) -> None:
    """Have Slurm run a prolog before each job that fails on this node: slurm.conf(5), Prolog."""
    script = sandbox.directory / _PROLOG
    script.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" != {_known(sandbox, node)} ]\n')
    script.chmod(0o700)
    set_option(sandbox, "Prolog", str(script))


def mend_prolog(sandbox: Sandbox) -> None:
    """No prolog any more; nothing to do when none was broken."""
    script = sandbox.directory / _PROLOG
    if script.exists():
        set_option(sandbox, "Prolog", None)
        script.unlink()


def kill_controller(sandbox: Sandbox) -> None:
    """SIGKILL slurmctld; jobs run on, and commands fail after MessageTimeout.

    What happened in the last 5 s is forgotten, even a submission: slurmctld writes its state in
    the background (seen on 22.05.8).
    """
    kill(_daemon(sandbox, "slurmctld"))


def restart_controller(sandbox: Sandbox) -> None:
    """Start slurmctld again from its saved state and wait until it answers.

    Raises UsageError when it lives, SlurmUnreachableError when it does not answer in time.
    """
    if sandbox.daemon_is_alive("slurmctld"):
        raise UsageError("slurmctld lives", "kill it first")
    sandbox.remember(sandbox.launcher.slurmctld())
    if not await_condition(lambda: bool(sandbox.node_states()), _CONTROLLER_TIMEOUT_SECONDS):
        raise SlurmUnreachableError("slurmctld was started again and does not answer")


def job_processes(sandbox: Sandbox, job_id: str, node: str | None = None) -> tuple[JobProcess, ...]:
    """The processes of a job, of one node or of all: batch shell, supervisor, srun and ranks."""
    nodes = sandbox.shape.node_names if node is None else (_known(sandbox, node),)
    found = find_job_processes(sandbox.paths, nodes)
    return tuple(process for process in found if process.job_id == job_id)


def _everything_on(sandbox: Sandbox, node: str) -> list[ProcessId]:
    below = processes_of_nodes(sandbox.paths, sandbox.shape.node_names, _known(sandbox, node))
    return _daemon(sandbox, slurmd_name(node)) + [process.identity for process in below]


def _daemon(sandbox: Sandbox, name: str) -> list[ProcessId]:
    return [record.identity for record in sandbox.state.daemons if record.name == name]


def _known(sandbox: Sandbox, node: str) -> str:
    if node not in sandbox.shape.node_names:
        raise UsageError(f"the sandbox has no node {node}, only {sandbox.shape.node_range}")
    return node
