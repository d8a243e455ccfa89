"""Chooses the options that give the job nodes as close together as the plan assumes. Pure.

Rank order needs no option: Slurm numbers the ranks of `--distribution=block` along the nodes in
the order of their names, whatever slurm.conf and topology.conf say (22.05.8, tests/slurm/
test_rank_order.py), or along leaves and blocks where a site sets TopologyParam=SwitchAsNodeRank
(23.02) or BlockAsNodeRank. Where names cross leaves, the supervisor orders the nodes
(`hpctrain.judge.node_order`).
Which segment of blocks is requested, the planner decides (`hpctrain.plan.mesh.placement`).
Belongs here: features and leaves. Does not belong here: all other options (`script`).
"""

from __future__ import annotations

from hpctrain.base.units import Duration
from hpctrain.plan.job import Job
from hpctrain.plan.mesh.placement import eligible_islands

# slurm.conf(5), SchedulerParameters: max_switch_wait is 300 s unless the site raises it.
_SWITCH_WAIT = Duration(300)


def topology_options(job: Job) -> dict[str, str | None]:
    """Choose `--constraint`, `--switches` and `--segment`; None where the job does not need one."""
    names, segment = (job.profile.slurm.constraint, island_constraint(job)), job.plan.nodes.segment
    return {
        "constraint": "&".join(name for name in names if name) or None,
        "switches": switch_request(job),
        "segment": None if segment is None else str(segment),
    }


def island_constraint(job: Job) -> str | None:
    """Select islands by feature: `[a|b]` for all nodes on either, `[a*4&b*4]` for some of each.

    sbatch(1), --constraint: Matching OR, and Multiple Counts. None when the islands have no
    features, or when it makes no difference: all nodes of the cluster, or any single one.
    """
    profile, nodes = job.profile, job.plan.nodes.nodes
    islands, shares = profile.network.islands, job.plan.nodes.island_nodes
    features = [island.feature or "" for island in islands]
    if not any(shares) or not all(features) or nodes == profile.nodes.count:
        return None
    if sum(share > 0 for share in shares) == 1:
        alone = [features[i] for i in sorted(eligible_islands(nodes, profile))]
        if nodes == 1 and len(alone) == len(features):
            return None
        return alone[0] if len(alone) == 1 else f"[{'|'.join(alone)}]"
    counted = [f"{name}*{share}" for name, share in zip(features, shares, strict=True) if share]
    return f"[{'&'.join(counted)}]"


def switch_request(job: Job) -> str | None:
    """Request the fewest leaves that can hold the job, and the longest wait for them.

    sbatch(1), --switches: the job is pending until that many leaves can hold it, or until the time
    is over. None where any choice of nodes has so few leaves.
    """
    switches, planned = job.profile.network.switches, job.plan.nodes
    leaf = switches.usable_nodes
    if switches.plugin != "tree" or not switches.request or leaf is None or planned.nodes == 1:
        return None
    parts = [nodes for nodes in planned.island_nodes if nodes] or [planned.nodes]
    leaves = sum(-(-nodes // leaf) for nodes in parts)
    leaves = max(leaves, -(-job.most_nodes // leaf))
    if leaves >= -(-job.profile.nodes.count // (switches.nodes_per_leaf or leaf)):
        return None
    return f"{leaves}@{(switches.wait or _SWITCH_WAIT).slurm()}"
