"""Chooses the options that ask for nodes, tasks, GPUs and memory, as the site wants them. Pure.

The job may hold spare nodes, and may start with fewer nodes than planned if the spec allows it.
Belongs here: these options, and where Slurm cannot provide them. Does not belong here: which nodes
a launch then uses (`hpctrain.judge.launch_nodes`), how much memory a run needs
(`hpctrain.plan.cost`).
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


def exclusive_option(job: Job) -> tuple[str, ...]:
    """Return the option that keeps others away; plain --exclusive would cost more than a part."""
    wanted = job.profile.slurm.exclusive
    if isinstance(wanted, str):
        return (f"--exclusive={wanted}",)
    return ("--exclusive",) if wanted and job.has_whole_nodes else ()


def gpu_request(job: Job, *, counts_tasks: bool) -> dict[str, str | None]:
    """Choose the site's option that requests GPUs; `--gpus-per-task` needs a number of tasks.

    A job without GPUs, such as a router's, asks for none.
    """
    count, kind = job.plan.nodes.gpus_per_node, job.profile.gpu.type
    if count == 0:
        return {}
    way = job.profile.slurm.gpu_request
    per_task = way == "gpus-per-task"
    per_node = {"gpus-per-node": f"{count}", "gpus-per-node-typed": f"{kind}:{count}"}.get(
        way, str(count) if per_task and not counts_tasks else None
    )
    return {
        "gres": {"gres": f"gpu:{count}", "gres-typed": f"gpu:{kind}:{count}"}.get(way),
        "gpus-per-node": per_node,
        "gpus-per-task": "1" if per_task and counts_tasks else None,
    }


def memory_options(job: Job) -> dict[str, str | None]:
    """Choose `--mem` or `--mem-per-gpu`, None where the site wants neither; a spec's number counts.

    sbatch(1), --mem: 0 is all memory of each node. In a part of a node it would leave the other
    GPUs without any, so such a job asks for the share of its GPUs.
    """
    profile, wanted = job.profile, job.spec.resources.memory_per_node
    per_gpu = profile.slurm.memory_per_gpu
    kind, mebibyte = profile.slurm.memory, 2**20
    memory = None
    if wanted is not None:
        memory = f"{int(wanted) // mebibyte}M"
    elif per_gpu is None and kind != "none":
        share = int(profile.nodes.memory) * job.plan.nodes.gpus_per_node // profile.gpu.per_node
        whole = kind != "share" and job.has_whole_nodes
        memory = "0" if whole else f"{share // mebibyte}M"
    asked_per_gpu = per_gpu is not None and wanted is None
    return {
        "mem": memory,
        "mem-per-gpu": f"{int(per_gpu or 0) // mebibyte}M" if asked_per_gpu else None,
    }


def memory_problems(job: Job) -> list[str]:
    """List why the run cannot have all memory of its nodes where the site wants that."""
    profile, wanted = job.profile, job.spec.resources.memory_per_node
    if profile.slurm.memory != "all" or wanted is not None or job.has_whole_nodes:
        return []
    return [
        f"jobs take all memory of a node at {profile.name} (slurm.memory all), and this run has "
        f"{job.plan.nodes.gpus_per_node} of its {profile.gpu.per_node} GPUs: ask for whole nodes, "
        "or for a part of the memory by resources.memory_per_node"
    ]
