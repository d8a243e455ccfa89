"""Find out how jobs of a partition lose their nodes: by partition or by QOS, with which notice.

slurm.conf(5): PreemptType, PreemptMode, PreemptParameters, SlurmctldParameters, GraceTime;
sacctmgr(1): Preempt, PreemptMode and GraceTime of a QOS. Belongs here: what a user's job in a
partition has to expect. Does not belong here: what a run does about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.slurm.cluster_records import (
    ClusterFacts,
    PartitionFacts,
    PreemptionMode,
    Qos,
)
from hpctrain.slurm.settings import preempts_by_qos, sends_user_signal

_PARTITION_SHOWN = "scontrol show partition"


@dataclass(frozen=True)
class Preemption:
    """What a job of a partition has to expect, and the source; `by` may take its nodes."""

    mode: PreemptionMode
    grace_seconds: int
    user_signal: bool
    source: str
    by: tuple[str, ...] = ()
    is_guess: bool = False


def preemption_of(cluster: ClusterFacts, partition: PartitionFacts) -> Preemption:
    """Combine partition, QOS and configuration for a job of the user's default QOS."""
    signal = sends_user_signal(cluster.config)
    if preempts_by_qos(cluster.config):
        return _by_qos(cluster, partition, signal)
    higher = tuple(
        other.name
        for other in cluster.partitions
        if other.priority_tier > partition.priority_tier
        and any({other.name, partition.name} <= set(node.partitions) for node in cluster.nodes)
    )
    if partition.preemption == "off" or not higher:
        reason = f"PreemptMode of {_PARTITION_SHOWN}"
        if partition.preemption != "off":
            reason = f"no partition with its nodes has a higher PriorityTier in {_PARTITION_SHOWN}"
        return Preemption("off", 0, False, reason)
    return Preemption(
        partition.preemption,
        partition.grace_seconds,
        signal,
        f"PreemptMode and GraceTime of {_PARTITION_SHOWN}",
        higher,
    )


def _by_qos(cluster: ClusterFacts, partition: PartitionFacts, signal: bool) -> Preemption:
    own = _qos_of(cluster, partition)
    accounting = cluster.accounting
    if accounting is None or own is None:
        reason = "preemption is by QOS, and sacctmgr has named none of yours"
        return Preemption(
            partition.preemption, partition.grace_seconds, signal, reason, is_guess=True
        )
    by = tuple(other.name for other in accounting.qos if own.name in other.preempts)
    source = f"sacctmgr show qos, for QOS {own.name}"
    if not by:
        return Preemption("off", 0, False, f"{source}: none preempts it")
    mode = own.preemption or partition.preemption
    return Preemption(mode, own.grace_seconds, signal, source, by)


def _qos_of(cluster: ClusterFacts, partition: PartitionFacts) -> Qos | None:
    """Find the QOS of a job that names none: the association's, else the partition's."""
    accounting = cluster.accounting
    if accounting is None:
        return None
    default = next(
        (
            one.default_qos or (one.qos[0] if len(one.qos) == 1 else None)
            for account in accounting.accounts[:1]
            for one in accounting.associations
            if one.account == account and one.partition in (None, partition.name)
        ),
        None,
    )
    name = default or partition.qos
    return next((one for one in accounting.qos if one.name == name), None)
