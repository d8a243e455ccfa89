"""Derive a sandbox's shape from a cluster profile, so that its scripts can be checked locally.

Everything that Slurm schedules by is copied: nodes, CPUs, memory, GRES, partitions, limits,
preemption, switches. Hardware that a single machine lacks (GPUs, NVLink, InfiniBand) is left out.
Pure.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.sandbox.shape import FeatureShape, PartitionShape, SandboxShape, SwitchShape
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.partition import PartitionProfile


def shape_from_profile(profile: ClusterProfile) -> SandboxShape:
    """Copy the profile's nodes, islands, partitions and switches.

    Raises UsageError for more than 1024 nodes.
    """
    partitions = profile.slurm.partitions
    # Scripts request the features of islands; either all islands have one or none has.
    features = tuple(
        FeatureShape(island.feature, island.nodes)
        for island in profile.network.islands
        if island.feature is not None
    )
    preemption = any(partition.preemption.mode != "off" for partition in partitions)
    return SandboxShape(
        nodes=profile.nodes.count,
        gpus_per_node=profile.gpu.per_node,
        gpu_type=profile.gpu.type,
        cpus_per_node=profile.nodes.cpus,
        memory_mib=int(profile.nodes.memory) // 2**20,
        partitions=tuple(_partition(partition) for partition in partitions),
        switches=_switches(profile),
        leaves_are_blocks=profile.network.switches.plugin == "block",
        preempt_type="partition_prio" if preemption else "none",
        user_signal_on_preempt=any(p.preemption.user_signal for p in partitions),
        kill_wait_seconds=round(float(profile.slurm.kill_wait)),
        requeue=profile.continuation == "requeue",
        node_prefix=profile.nodes.prefix,
        features=features,
    )


def _partition(partition: PartitionProfile) -> PartitionShape:
    modes: dict[str, Literal["OFF", "REQUEUE", "CANCEL"]] = {
        "off": "OFF",
        "requeue": "REQUEUE",
        "cancel": "CANCEL",
    }
    limit = partition.max_walltime
    return PartitionShape(
        name=partition.name,
        priority_tier=partition.priority_tier,
        preempt_mode=modes[partition.preemption.mode],
        grace_seconds=round(float(partition.preemption.grace)),
        max_walltime_seconds=None if limit is None else round(float(limit)),
        default=partition.default,
    )


def _switches(profile: ClusterProfile) -> tuple[SwitchShape, ...]:
    """Build leaves of `nodes_per_leaf` nodes under one spine."""
    size = profile.network.switches.nodes_per_leaf
    if size is None:
        return ()
    names = [f"{profile.nodes.prefix}{index}" for index in range(profile.nodes.count)]
    groups = [tuple(names[start : start + size]) for start in range(0, len(names), size)]
    leaves = [SwitchShape(f"leaf{number}", nodes=group) for number, group in enumerate(groups)]
    spine = SwitchShape("spine", switches=tuple(leaf.name for leaf in leaves))
    return (*leaves, spine)
