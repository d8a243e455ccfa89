"""What srun starts: one task per GPU, or one torchelastic agent per node. Pure.

Belongs here: the numbers of tasks, the words of the trainer's command and what the script says
about both. Does not belong here: how an agent works (`hpctrain.train.agent`), and how many nodes a
launch gets (`hpctrain.supervise.judge.launch_nodes`, which puts that number in for the planned
one).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from hpctrain.plan.documents import Plan
from hpctrain.render.nodes import least_nodes
from hpctrain.spec.run import RunSpec

_WIDTH = 98


@dataclass(frozen=True)
class Starting:
    """Tasks of a launch at the planned size and the module that each of them runs.

    `logs_of` is what a task is, in the names of the logs that srun writes.
    """

    tasks: int
    tasks_per_node: int
    gpus_per_task: int
    module: tuple[str, ...]
    logs_of: str
    words: str


def starting(spec: RunSpec, plan: Plan) -> Starting:
    """As `launcher` of the spec says."""
    return _agents(spec, plan) if spec.launcher == "torchrun" else _ranks(spec, plan)


def _ranks(spec: RunSpec, plan: Plan) -> Starting:
    return Starting(
        tasks=plan.layout.world_size,
        tasks_per_node=plan.nodes.gpus_per_node,
        gpus_per_task=1,
        module=("hpctrain.train",),
        logs_of="rank",
        words=_wrapped(
            f"One task per GPU, no torchrun.{_range_of_nodes(spec, plan, 'srun')} "
            "Logs of each attempt and rank are kept apart."
        ),
    )


def _agents(spec: RunSpec, plan: Plan) -> Starting:
    nodes, gpus = plan.nodes.nodes, plan.nodes.gpus_per_node
    return Starting(
        tasks=nodes,
        tasks_per_node=1,
        gpus_per_task=gpus,
        module=("hpctrain.train.agent", f"--nnodes={nodes}", f"--nproc-per-node={gpus}"),
        logs_of="node",
        words=_words_on_agents(spec, plan),
    )


def _words_on_agents(spec: RunSpec, plan: Plan) -> str:
    gpus = plan.nodes.gpus_per_node
    processes = f"{gpus} processes, one per GPU," if gpus > 1 else "one process"
    return _wrapped(
        "One task per node: a torchelastic agent, as torchrun starts it. It starts "
        f"{processes} and hands signals on to them; it never starts them again, for each launch "
        f"is the supervisor's.{_range_of_nodes(spec, plan, 'srun and agent')} Logs of each attempt "
        "are kept apart: of agents in step*-node*.log, of ranks in step*-rank*.log."
    )


def _range_of_nodes(spec: RunSpec, plan: Plan, programs: str) -> str:
    """Why the numbers that the script shows are not always those of a launch."""
    nodes = plan.nodes.nodes
    least = min(least_nodes(spec, plan), nodes)
    if least == nodes:
        return ""
    return (
        f" A launch has {least} to {nodes} nodes: the supervisor puts the number into the options "
        f"of {programs}."
    )


def _wrapped(text: str) -> str:
    return "\n# ".join(textwrap.wrap(text, _WIDTH))
