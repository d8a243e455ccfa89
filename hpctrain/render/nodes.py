"""Decides how many nodes the script requests, and whether the job survives a failed node. Pure.

The job may hold spare nodes, and may start with fewer nodes than planned if the spec allows it.
Belongs here: the options for that, and where Slurm cannot provide them. Does not belong
here: which nodes a launch then uses (`hpctrain.supervise.judge.launch_nodes`).
"""

from __future__ import annotations

from hpctrain.plan.job import Job


def node_options(job: Job) -> dict[str, str | None]:
    """Choose `--nodes`, and the tasks and CPUs per node.

    With a range of nodes there is no `--ntasks-per-node`: with it Slurm 22.05.8 may allocate the
    least number although more nodes are free. Then only srun gets the number of tasks, and sbatch
    requests one task per node with the CPUs of all.
    """
    least, most, cpus_per_gpu = job.least_nodes, job.most_nodes, job.cpus_per_gpu
    per_node = job.plan.nodes.gpus_per_node
    if least < most:
        return {"nodes": f"{least}-{most}", "cpus-per-task": str(cpus_per_gpu * per_node)}
    tasks = per_node if job.spec.launcher == "srun" else 1
    # A job without GPUs has the CPUs of one: `resources.cpus_per_gpu` is all that it asks for.
    return {
        "nodes": str(most),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(cpus_per_gpu * max(1, per_node) // tasks),
    }


def survives_node_failure(job: Job) -> bool:
    """Return True if the job continues when a node fails (sbatch(1), --no-kill).

    A spare node replaces it, or the next launch is smaller.
    """
    return job.spec.resources.spare_nodes > 0 or job.least_nodes < job.most_nodes


def node_problems(job: Job, constraint: str | None) -> list[str]:
    """List where spare nodes or a range of nodes meet options that need exact numbers.

    Segments divide all of them: the planner chooses no other (`plan.mesh.nvlink_domain`).
    """
    if not survives_node_failure(job):
        return []
    if constraint and "*" in constraint:
        return [
            f"resources.spare_nodes and min_nodes do not go together with the numbers of nodes in "
            f"`--constraint={constraint}`: plan the run on one island"
        ]
    return []
