"""Putting a sandbox right again after faults, so that the next rehearsal finds it empty and idle.

Belongs here: cancelling what is left, reviving what is dead. Does not belong here: the faults.
"""

from __future__ import annotations

from hpctrain.errors import SlurmError, SlurmUnreachableError
from hpctrain.sandbox.daemons import slurmd_name
from hpctrain.sandbox.faults import (
    mend_prolog,
    restart_controller,
    restart_node,
    resume_node,
    thaw_node,
)
from hpctrain.sandbox.job_processes import find_job_processes
from hpctrain.sandbox.processes import await_condition, kill
from hpctrain.sandbox.sandbox import Sandbox

_UNUSABLE = ("down", "drain", "fail")
_IDLE_TIMEOUT_SECONDS = 45.0


def repair(sandbox: Sandbox, timeout_seconds: float = _IDLE_TIMEOUT_SECONDS) -> None:
    """Revive dead or frozen daemons, cancel all jobs, and wait until every node is idle.

    Raises SlurmUnreachableError with the states of the nodes when that takes too long.
    """
    revive(sandbox)
    mend_prolog(sandbox)
    cancel_all_jobs(sandbox)
    if not await_condition(lambda: _settle(sandbox), timeout_seconds):
        states = ", ".join(f"{node} {state}" for node, state in sandbox.node_states().items())
        raise SlurmUnreachableError(f"the nodes are not idle after {timeout_seconds:g} s: {states}")


def revive(sandbox: Sandbox) -> None:
    """Start dead daemons again and thaw frozen ones; jobs and processes are left alone."""
    if not sandbox.daemon_is_alive("slurmctld"):
        restart_controller(sandbox)
    _revive_nodes(sandbox)


def cancel_all_jobs(sandbox: Sandbox) -> None:
    """Cancel every job for good, and do not wait for its processes."""
    for job in _jobs(sandbox):
        _try(sandbox, "scontrol", "update", f"JobId={job}", "Requeue=0")
        _try(sandbox, "scancel", "--quiet", job)
    # KillWait gives them seconds that nobody needs here.
    kill(
        process.identity for process in find_job_processes(sandbox.paths, sandbox.shape.node_names)
    )


def _settle(sandbox: Sandbox) -> bool:
    """Whether all is quiet; on the way, resume what has been set down meanwhile."""
    states = sandbox.node_states()
    for node, state in states.items():
        if state.startswith(_UNUSABLE):
            _try_resume(sandbox, node)
    if _jobs(sandbox):
        cancel_all_jobs(sandbox)
        return False
    return bool(states) and all(state == "idle" for state in states.values())


def _revive_nodes(sandbox: Sandbox) -> None:
    frozen = {daemon.name for daemon in sandbox.status().daemons if daemon.frozen}
    for node in sandbox.shape.node_names:
        if slurmd_name(node) in frozen:
            thaw_node(sandbox, node)
        if not sandbox.daemon_is_alive(slurmd_name(node)):
            restart_node(sandbox, node, rebooted=False)


def _jobs(sandbox: Sandbox) -> list[str]:
    # %A is the plain job id, also for tasks of an array.
    return sorted(set(sandbox.command("squeue", "--noheader", "--format=%A").split()))


def _try(sandbox: Sandbox, name: str, *arguments: str) -> None:
    """A job that ends between the look and the command is no error."""
    try:
        sandbox.command(name, *arguments)
    except SlurmUnreachableError:
        raise
    except SlurmError:
        return


def _try_resume(sandbox: Sandbox, node: str) -> None:
    try:
        resume_node(sandbox, node)
    except SlurmUnreachableError:
        raise
    except SlurmError:
        # It came back by itself (ReturnToService=1) since we looked.
        return
