"""Restore a sandbox after faults, so that the next rehearsal starts with an empty, idle one.

Belongs here: cancelling jobs, restarting daemons. Does not belong here: the faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from hpctrain.base.errors import SlurmError, SlurmUnreachableError
from hpctrain.sandbox.daemons import find_job_processes, slurmd_name
from hpctrain.sandbox.faults import (
    mend_prolog,
    restart_controller,
    restart_node,
    resume_node,
    thaw_node,
)
from hpctrain.sandbox.monitoring import MONITORS
from hpctrain.sandbox.processes import await_condition, kill
from hpctrain.sandbox.sandbox import Sandbox

_UNUSABLE = ("down", "drain", "fail")
_IDLE_TIMEOUT_SECONDS = 45.0


def repair(sandbox: Sandbox, timeout_seconds: float = _IDLE_TIMEOUT_SECONDS) -> None:
    """Restart dead daemons, thaw frozen ones, cancel all jobs, and wait until nodes are idle.

    Raises SlurmUnreachableError with the states of the nodes when that takes too long.
    """
    revive(sandbox)
    mend_prolog(sandbox)
    cancel_all_jobs(sandbox)
    if not await_condition(lambda: _resume_and_check_idle(sandbox), timeout_seconds):
        states = ", ".join(f"{node} {state}" for node, state in sandbox.node_states().items())
        raise SlurmUnreachableError(f"the nodes are not idle after {timeout_seconds:g} s: {states}")


def revive(sandbox: Sandbox, *, rebooted: bool = False) -> tuple[str, ...]:
    """Restart dead daemons and thaw frozen ones; jobs and their processes are not touched.

    With `rebooted` nodes that were dead report a fresh boot, as after a loss of power. Returns the
    nodes that were dead or frozen.
    """
    revived = []
    if not sandbox.daemon_is_alive("slurmctld"):
        restart_controller(sandbox)
    frozen = {daemon.name for daemon in sandbox.status().daemons if daemon.frozen}
    for node in sandbox.shape.node_names:
        if slurmd_name(node) in frozen:
            thaw_node(sandbox, node)
            revived.append(node)
        if not sandbox.daemon_is_alive(slurmd_name(node)):
            restart_node(sandbox, node, rebooted=rebooted)
            revived.append(node)
    state = sandbox.state
    if state.monitoring is not None:
        for name in MONITORS:
            if not sandbox.daemon_is_alive(name):
                sandbox.remember(sandbox.launcher.monitor(name, state.ports, state.monitoring))
    return tuple(revived)


def bring_back(sandbox: Sandbox) -> tuple[str, ...]:
    """Revive as after a reboot, and return the nodes to the scheduler; jobs are not touched.

    A node that rebooted under a job stays down until an administrator resumes it (slurm.conf(5),
    ReturnToService). Returns the nodes that are back. Raises SlurmUnreachableError when Slurm does
    not have them in time.
    """
    revived = revive(sandbox, rebooted=True)
    return_nodes(sandbox, revived)
    return revived


def return_nodes(sandbox: Sandbox, nodes: Collection[str]) -> None:
    """Return nodes to the scheduler that are down, and wait until Slurm has heard from them.

    One that is resumed is a node without an answer (`*`) until it registers again, and that answer
    may look like a second reboot, because times of boots are whole seconds: it is down again ("Node
    n1 unexpectedly rebooted", once in six tries on 22.05.8). So it is resumed until it stays.
    Raises SlurmUnreachableError when Slurm does not have all of them in time.
    """

    def are_back() -> bool:
        states = {node: sandbox.node_states().get(node, "down") for node in nodes}
        for node, state in states.items():
            if state.startswith(_UNUSABLE):
                with _tolerating_slurm_errors():
                    resume_node(sandbox, node)
        return not any(one.startswith(_UNUSABLE) or one.endswith("*") for one in states.values())

    if not await_condition(are_back, _IDLE_TIMEOUT_SECONDS):
        names = ", ".join(nodes)
        raise SlurmUnreachableError(f"not back after {_IDLE_TIMEOUT_SECONDS:g} s: {names}")


def cancel_all_jobs(sandbox: Sandbox) -> None:
    """Cancel every job without requeue, and kill its processes."""
    for job in _jobs(sandbox):
        # A job that ended since the list was read is no error.
        with _tolerating_slurm_errors():
            sandbox.command("scontrol", "update", f"JobId={job}", "Requeue=0")
        with _tolerating_slurm_errors():
            sandbox.command("scancel", "--quiet", job)
    # Nobody waits for KillWait here.
    kill(
        process.identity for process in find_job_processes(sandbox.paths, sandbox.shape.node_names)
    )


def _resume_and_check_idle(sandbox: Sandbox) -> bool:
    """Resume unusable nodes, cancel remaining jobs, and return whether all nodes are idle."""
    states = sandbox.node_states()
    for node, state in states.items():
        if state.startswith(_UNUSABLE):
            # It may have returned by itself (ReturnToService=1) since the states were read.
            with _tolerating_slurm_errors():
                resume_node(sandbox, node)
    try:
        if _jobs(sandbox):
            cancel_all_jobs(sandbox)
            return False
    except SlurmError:  # asked again until the time limit
        return False
    return bool(states) and all(state == "idle" for state in states.values())


def _jobs(sandbox: Sandbox) -> list[str]:
    # %A is the plain job id, also for tasks of an array.
    return sorted(set(sandbox.command("squeue", "--noheader", "--format=%A").split()))


@contextlib.contextmanager
def _tolerating_slurm_errors() -> Iterator[None]:
    """Ignore that Slurm refuses a command; raise SlurmUnreachableError."""
    try:
        yield
    except SlurmUnreachableError:
        raise
    except SlurmError:
        return
