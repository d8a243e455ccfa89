"""Find the processes that jobs run on the nodes of a sandbox: batch shells, supervisors, ranks.

Does not belong here: the daemons (see `daemons`), or signals to these processes (see `faults`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.sandbox.daemons import step_daemons
from hpctrain.sandbox.paths import SandboxPaths
from hpctrain.sandbox.processes import (
    Process,
    ProcessId,
    all_processes,
    descendants,
    read_command_line,
    read_environment,
)


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
            step_id = _launched_step(environment.get("SLURM_STEP_ID"))
            # The batch step has a SLURM_PROCID too, but it is no rank.
            task = environment.get("RANK", environment.get("SLURM_PROCID"))
            rank = None if step_id is None or task is None else int(task)
            command_line = read_command_line(process.pid)
            processes.append(
                JobProcess(process.identity, command_line, job_id, node, step_id, rank)
            )
    return tuple(processes)


def _launched_step(step_id: str | None) -> str | None:
    """Return the id of a step of srun; the batch step has -5 in 26.05, and none before."""
    return step_id if step_id is not None and step_id.isdecimal() else None


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
