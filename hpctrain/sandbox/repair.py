"""Repairs a sandbox after faults, so that the next rehearsal starts with idle nodes and no jobs.

Belongs here: cancelling remaining jobs, restarting dead daemons. Does not belong here: the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

    def is_idle() -> bool:
        states = sandbox.node_states()
        for node, state in states.items():
            if state.startswith(_UNUSABLE):
                # It may have resumed by itself meanwhile (ReturnToService=1).
                _unless_refused(partial(resume_node, sandbox, node))
        if _jobs(sandbox):
            cancel_all_jobs(sandbox)
            return False
        return bool(states) and all(state == "idle" for state in states.values())

    if not await_condition(is_idle, timeout_seconds):
        states = ", ".join(f"{node} {state}" for node, state in sandbox.node_states().items())
        raise SlurmUnreachableError(f"the nodes are not idle after {timeout_seconds:g} s: {states}")


def revive(sandbox: Sandbox) -> None:
    """Start dead daemons again and thaw frozen ones; jobs and processes are left alone."""
    if not sandbox.daemon_is_alive("slurmctld"):
        restart_controller(sandbox)
    frozen = {daemon.name for daemon in sandbox.status().daemons if daemon.frozen}
    for node in sandbox.shape.node_names:
        if slurmd_name(node) in frozen:
            thaw_node(sandbox, node)
        if not sandbox.daemon_is_alive(slurmd_name(node)):
            restart_node(sandbox, node, rebooted=False)


def cancel_all_jobs(sandbox: Sandbox) -> None:
    """Cancel every job for good, and do not wait for its processes."""
    for job in _jobs(sandbox):
        update = ("scontrol", "update", f"JobId={job}", "Requeue=0")
        for arguments in (update, ("scancel", "--quiet", job)):
            _unless_refused(partial(sandbox.command, *arguments))
    # Nobody needs the seconds of KillWait here.
    kill(
        process.identity for process in find_job_processes(sandbox.paths, sandbox.shape.node_names)
    )


def _jobs(sandbox: Sandbox) -> list[str]:
    # %A is the plain job id, also for tasks of an array.
    return sorted(set(sandbox.command("squeue", "--noheader", "--format=%A").split()))


def _unless_refused(command: Callable[[], object]) -> None:
    """Run a command and ignore that Slurm refuses it, because the state has just changed."""
    try:
        command()
    except SlurmUnreachableError:
        raise
    except SlurmError:
        return
