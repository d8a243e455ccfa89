"""Decides what srun starts: one task per GPU, or one torchelastic agent per node. Pure.

Belongs here: the numbers of tasks, the arguments of the trainer and the comment about both. Does
not belong here: how an agent works (`hpctrain.train.agent`), and how many nodes a launch gets
(`hpctrain.supervise.judge.launch_nodes`, which replaces the planned number).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from hpctrain.plan.documents import Plan
from hpctrain.render.nodes import least_nodes
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class SrunTasks:
    """Tasks of a launch at the planned size and the module that each of them runs.

    `task_kind` is `rank` or `node`, for the names of the logs that srun writes. `note` is the
    comment above the launch, wrapped.
    """

    tasks: int
    tasks_per_node: int
    gpus_per_task: int
    module: tuple[str, ...]
    task_kind: str
    note: str


def choose_tasks(spec: RunSpec, plan: Plan) -> SrunTasks:
    """Choose tasks and module according to `launcher` of the spec."""
    nodes, gpus = plan.nodes.nodes, plan.nodes.gpus_per_node
    if spec.launcher == "torchrun":
        processes = f"{gpus} processes, one per GPU," if gpus > 1 else "one process"
        return SrunTasks(
            tasks=nodes,
            tasks_per_node=1,
            gpus_per_task=gpus,
            module=("hpctrain.train.agent", f"--nnodes={nodes}", f"--nproc-per-node={gpus}"),
            task_kind="node",
            note=_wrapped(
                "One task per node: a torchelastic agent, as torchrun starts it. It starts "
                f"{processes} and hands signals on to them; it never restarts them: only the "
                f"supervisor starts launches.{_node_range(spec, plan, 'srun and agent')} Logs of "
                "each attempt are kept apart: of agents in step*-node*.log, of ranks in "
                "step*-rank*.log."
            ),
        )
    return SrunTasks(
        tasks=plan.layout.world_size,
        tasks_per_node=gpus,
        gpus_per_task=1,
        module=("hpctrain.train",),
        task_kind="rank",
        note=_wrapped(
            f"One task per GPU, no torchrun.{_node_range(spec, plan, 'srun')} "
            "Logs of each attempt and rank are kept apart."
        ),
    )


def _node_range(spec: RunSpec, plan: Plan, programs: str) -> str:
    """Explain that a launch may have fewer nodes than the script shows; empty if it may not."""
    nodes = plan.nodes.nodes
    least = min(least_nodes(spec, plan), nodes)
    if least == nodes:
        return ""
    return (
        f" A launch has {least} to {nodes} nodes: the supervisor puts the number into the options "
        f"of {programs}."
    )


def _wrapped(text: str) -> str:
    return "\n# ".join(textwrap.wrap(text, 98))
