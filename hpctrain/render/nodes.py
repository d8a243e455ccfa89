"""How many nodes the script asks for, and what the job does when one of them fails. Pure.

The job may hold spare nodes beside those that train, and may begin with fewer where the spec
allows it. Belongs here: the options about that, and where they cannot be had. Does not belong
here: which nodes a launch then uses (`hpctrain.supervise.judge.launch_nodes`).
"""

from __future__ import annotations

from hpctrain.plan.documents import Plan
from hpctrain.spec.run import RunSpec


def most_nodes(spec: RunSpec, plan: Plan) -> int:
    """Nodes of the plan and the spare ones."""
    return plan.nodes.nodes + spec.resources.spare_nodes


def least_nodes(spec: RunSpec, plan: Plan) -> int:
    """The job starts with no fewer. Without `min_nodes` it waits for all, the spare ones too."""
    return spec.resources.min_nodes or most_nodes(spec, plan)


def node_options(spec: RunSpec, plan: Plan, cpus_per_gpu: int) -> dict[str, str | None]:
    """`--nodes`, tasks and CPUs.

    With a range of nodes there is no `--ntasks-per-node`: with it Slurm 22.05.8 may allocate the
    least number although more nodes are free. srun is told the tasks, and sbatch one task per node
    that has the CPUs of all.
    """
    least, most = least_nodes(spec, plan), most_nodes(spec, plan)
    per_node = plan.nodes.gpus_per_node
    if least < most:
        return {"nodes": f"{least}-{most}", "cpus-per-task": str(cpus_per_gpu * per_node)}
    tasks = 1 if spec.launcher == "torchrun" else per_node
    return {
        "nodes": str(most),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(cpus_per_gpu * per_node // tasks),
    }


def survives_node_failure(spec: RunSpec, plan: Plan) -> bool:
    """The job is to go on when a node fails (sbatch(1), --no-kill): another takes its place, or
    the launch gets smaller."""
    resources = spec.resources
    return resources.spare_nodes > 0 or least_nodes(spec, plan) < most_nodes(spec, plan)


def node_problems(
    spec: RunSpec, plan: Plan, constraint: str | None, segment: str | None
) -> list[str]:
    """Spare nodes or a range of nodes where Slurm wants exact numbers."""
    if not survives_node_failure(spec, plan):
        return []
    problems = []
    if constraint and "*" in constraint:
        problems.append(
            f"resources.spare_nodes and min_nodes do not go together with the numbers of nodes in "
            f"`--constraint={constraint}`: plan the run on one island"
        )
    if segment and (
        most_nodes(spec, plan) % int(segment) or least_nodes(spec, plan) % int(segment)
    ):
        problems.append(
            f"resources.spare_nodes and min_nodes must leave multiples of {segment} nodes, which "
            "have to share a block (`--segment`)"
        )
    return problems
