"""Decides what srun starts: one task per GPU, or one torchelastic agent per node. Pure.

Belongs here: the numbers of tasks, the arguments of the trainer, the names of the logs and the
comment about all of it. Does not belong here: how an agent works (`hpctrain.train.agent`), and how
many nodes a launch gets (`hpctrain.judge.launch_nodes`, which replaces the planned
number).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from hpctrain.plan.job import TrainingJob

# Up to so many ranks each has a log of its own, which is easier to read. Above, most of them have
# the same warnings or nothing, and a launch would leave thousands of files.
_MOST_LOGS_OF_RANKS = 64
_LOGS_OF_NODES = (
    "Logs of each attempt and node are kept apart, in step*-node*.log; each line of a rank begins "
    "with its number"
)


@dataclass(frozen=True)
class SrunTasks:
    """Tasks of a launch at the planned size and the module that each of them runs.

    `task_kind` and `log_number` name the logs that srun writes: `rank` and `%4t`, one per task, or
    `node` and `%4n`, one per node. `labelled`: srun puts the number of the task before each line.
    `note` is the comment above the launch, wrapped.
    """

    tasks: int
    tasks_per_node: int
    gpus_per_task: int
    module: tuple[str, ...]
    task_kind: Literal["rank", "node"]
    log_number: Literal["%4t", "%4n"]
    labelled: bool
    note: str


def logs_by(job: TrainingJob) -> Literal["rank", "node"]:
    """Choose whether each rank or each node has a log, according to `logging.files`."""
    if job.spec.logging.files != "auto":
        return job.spec.logging.files
    return "rank" if job.plan.layout.world_size <= _MOST_LOGS_OF_RANKS else "node"


def log_files(job: TrainingJob) -> int:
    """Count the logs of one launch: of ranks or nodes, and of agents beside those of ranks."""
    nodes, ranks = job.plan.nodes.nodes, job.plan.layout.world_size
    if logs_by(job) == "node":
        return nodes
    return ranks + (nodes if job.spec.launcher == "torchrun" else 0)


def choose_tasks(job: TrainingJob) -> SrunTasks:
    """Choose tasks, module and logs according to `launcher` and `logging.files` of the spec."""
    nodes, gpus = job.plan.nodes.nodes, job.plan.nodes.gpus_per_node
    by_node = logs_by(job) == "node"
    if job.spec.launcher == "torchrun":
        processes = f"{gpus} processes, one per GPU," if gpus > 1 else "one process"
        return SrunTasks(
            tasks=nodes,
            tasks_per_node=1,
            gpus_per_task=gpus,
            module=(
                "hpctrain.train.agent",
                f"--nnodes={nodes}",
                f"--nproc-per-node={gpus}",
                *(["--logs=node"] if by_node else []),
            ),
            task_kind="node",
            log_number="%4n" if by_node else "%4t",
            labelled=False,  # the agent puts the rank before each line itself
            note=_wrapped(
                "One task per node: a torchelastic agent, as torchrun starts it. It starts "
                f"{processes} and hands signals on to them; it never restarts them: only the "
                f"supervisor starts launches.{_node_range(job, 'srun and agent')} "
                + (
                    f"{_LOGS_OF_NODES}."
                    if by_node
                    else "Logs of each attempt are kept apart: of agents in step*-node*.log, of "
                    "ranks in step*-rank*.log."
                )
            ),
        )
    return SrunTasks(
        tasks=job.plan.layout.world_size,
        tasks_per_node=gpus,
        gpus_per_task=1,
        module=("hpctrain.train",),
        task_kind="node" if by_node else "rank",
        log_number="%4n" if by_node else "%4t",
        labelled=by_node,
        note=_wrapped(
            f"One task per GPU, no torchrun.{_node_range(job, 'srun')} "
            + (f"{_LOGS_OF_NODES}." if by_node else "Logs of each attempt and rank are kept apart.")
        ),
    )


def _node_range(job: TrainingJob, programs: str) -> str:
    """Explain that a launch may have fewer nodes than the script shows; empty if it may not."""
    nodes = job.plan.nodes.nodes
    least = min(job.least_nodes, nodes)
    if least == nodes:
        return ""
    return (
        f" A launch has {least} to {nodes} nodes: the supervisor puts the number into the options "
        f"of {programs}."
    )


def _wrapped(text: str) -> str:
    return "\n# ".join(textwrap.wrap(text, 98))
