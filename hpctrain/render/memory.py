"""Chooses the option that asks for the memory of nodes, as the site wants it. Pure.

Belongs here: the option and its value. Does not belong here: how much memory a run needs
(`hpctrain.plan.cost`).
"""

from __future__ import annotations

from hpctrain.render.job_request import JobPlan, JobSpec
from hpctrain.spec.profile import ClusterProfile


def memory_options(spec: JobSpec, profile: ClusterProfile, plan: JobPlan) -> dict[str, str | None]:
    """Choose `--mem` or `--mem-per-gpu`, None where the site wants neither; a spec's number counts.

    sbatch(1), --mem: 0 is all memory of each node. In a part of a node it would leave the other
    GPUs without any, so such a job asks for the share of its GPUs.
    """
    per_gpu, wanted = profile.slurm.memory_per_gpu, spec.resources.memory_per_node
    kind, mebibyte = profile.slurm.memory, 2**20
    memory = None
    if wanted is not None:
        memory = f"{int(wanted) // mebibyte}M"
    elif per_gpu is None and kind != "none":
        share = int(profile.nodes.memory) * plan.nodes.gpus_per_node // profile.gpu.per_node
        whole = kind != "share" and _whole_nodes(profile, plan)
        memory = "0" if whole else f"{share // mebibyte}M"
    asked_per_gpu = per_gpu is not None and wanted is None
    return {
        "mem": memory,
        "mem-per-gpu": f"{int(per_gpu or 0) // mebibyte}M" if asked_per_gpu else None,
    }


def memory_problems(spec: JobSpec, profile: ClusterProfile, plan: JobPlan) -> list[str]:
    """List why the run cannot have all memory of its nodes where the site wants that."""
    if profile.slurm.memory != "all" or spec.resources.memory_per_node is not None:
        return []
    if _whole_nodes(profile, plan):
        return []
    return [
        f"jobs take all memory of a node at {profile.name} (slurm.memory all), and this run has "
        f"{plan.nodes.gpus_per_node} of its {profile.gpu.per_node} GPUs: ask for whole nodes, or "
        "for a part of the memory by resources.memory_per_node"
    ]


def _whole_nodes(profile: ClusterProfile, plan: JobPlan) -> bool:
    return plan.nodes.gpus_per_node == profile.gpu.per_node
