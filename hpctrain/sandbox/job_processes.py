"""The processes that jobs run on the nodes of a sandbox: batch shells, supervisors, ranks.

Belongs here: finding them. Does not belong here: the daemons (see `daemons`), or what is done to
them (see `faults`).
"""

from __future__ import annotations

from collections.abc import Iterator
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

    An agent that starts ranks has the number of its task for a rank.
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
    """All job processes on these nodes, also those that have lost their slurmstepd.

    They are known by their environment: Slurm sets SLURM_CONF, SLURM_JOB_ID and SLURMD_NODENAME
    for all of them, and a client of ours outside of a job has no SLURMD_NODENAME of the sandbox.
    """
    return tuple(_job_processes(str(paths.slurm_conf), frozenset(node_names)))


def processes_of_nodes(
    paths: SandboxPaths, node_names: tuple[str, ...], node: str | None = None
) -> tuple[Process, ...]:
    """What runs on `node`, or on all nodes: slurmstepds, all below them, and what has left them.

    A process with a cleaned environment is found below its slurmstepd, one whose slurmstepd has
    died by its environment; one to which both applies is lost to us.
    """
    everything = all_processes()
    steps = step_daemons(paths, node)
    below = descendants([step.pid for step in steps], everything)
    nodes = node_names if node is None else (node,)
    stray = {process.pid for process in find_job_processes(paths, nodes)}
    left = [process for process in everything if process.pid in stray]
    return tuple({process.pid: process for process in (*steps, *below, *left)}.values())


def _job_processes(slurm_conf: str, node_names: frozenset[str]) -> Iterator[JobProcess]:
    for process in all_processes():
        environment = read_environment(process.pid)
        node = environment.get("SLURMD_NODENAME", "")
        job_id = environment.get("SLURM_JOB_ID")
        if environment.get("SLURM_CONF") == slurm_conf and job_id and node in node_names:
            step_id = environment.get("SLURM_STEP_ID")
            # The batch step has a SLURM_PROCID too, but it is no rank.
            task = environment.get("RANK", environment.get("SLURM_PROCID"))
            rank = task if step_id is not None else None
            yield JobProcess(
                process.identity,
                read_command_line(process.pid),
                job_id,
                node,
                step_id,
                None if rank is None else int(rank),
            )
