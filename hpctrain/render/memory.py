"""Chooses the option that asks for the memory of nodes, as the site wants it. Pure.

Belongs here: the option and its value. Does not belong here: how much memory a run needs
(`hpctrain.plan.cost`).
"""

from __future__ import annotations

from hpctrain.plan.job import Job


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
