"""How often this job will be stopped, from the profile where it says so, else from publications.

Belongs here: rates for one job of so many nodes. Does not belong here: what they lead to
(`attempts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.forecast.checkpoint import load_seconds
from hpctrain.plan.forecast.documents import CheckpointCost, Interruptions, RunFacts
from hpctrain.plan.forecast.published import (
    NODE_FAILURES_SOURCE,
    RESTART_SECONDS,
    RESTART_SOURCE,
    RSC1_FAILURES_PER_NODE_DAY,
    RSC_GPUS_PER_NODE,
    SECONDS_PER_DAY,
    SPOT_PREEMPTION_SECONDS,
    SPOT_SOURCE,
    SPOT_WAIT_SECONDS,
)
from hpctrain.spec.profile import ClusterProfile, PartitionProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import short_duration


@dataclass(frozen=True)
class _Said:
    """A number and, if it is not the site's own, the sentence that says so."""

    seconds: float
    assumption: str | None = None


def is_spot(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> bool:
    """Whether nodes may be taken away: as the facts say, else as the partition is."""
    if facts.spot is not None:
        return facts.spot
    partition = profile.slurm.partition(spec.resources.partition)
    return partition is not None and partition.preemption.mode != "off"


def interruptions(
    spec: RunSpec, profile: ClusterProfile, facts: RunFacts, checkpoint: CheckpointCost
) -> Interruptions:
    """Mean times between failures (of any of the nodes) and preemptions of this job.

    Failures of nodes are taken as independent, so their rates add up (Kokolis et al.:
    MTTF = 1 / (N r_f)).
    """
    node = _node_mtbf(profile)
    restart = _restart(profile, load_seconds(profile, facts, checkpoint.total_bytes))
    said = [node, restart]
    preemption: _Said | None = None
    if is_spot(spec, profile, facts):
        preemption = _preemption_mtbf(profile, facts)
        said.append(preemption)
    return Interruptions(
        failure_mtbf_seconds=node.seconds / facts.nodes,
        preemption_mtbf_seconds=preemption.seconds if preemption else None,
        restart_seconds=restart.seconds,
        warned=_can_save(spec, profile, facts, checkpoint),
        assumptions=tuple(one.assumption for one in said if one.assumption),
    )


def preemption_wait_seconds(profile: ClusterProfile, facts: RunFacts) -> float:
    """Mean wait for nodes after a preemption; published only where the rate is published too."""
    if facts.preemption_wait_seconds is not None:
        return facts.preemption_wait_seconds
    told = profile.reliability is not None and profile.reliability.preemption_mtbf is not None
    return 0.0 if told else SPOT_WAIT_SECONDS


def node_mtbf_seconds(profile: ClusterProfile) -> float:
    """Mean time between failures of one node: the site's, else the published one."""
    return _node_mtbf(profile).seconds


def _node_mtbf(profile: ClusterProfile) -> _Said:
    if profile.reliability is not None:
        return _Said(float(profile.reliability.node_mtbf))
    rate = RSC1_FAILURES_PER_NODE_DAY * profile.gpu.per_node / RSC_GPUS_PER_NODE
    scaled = "" if profile.gpu.per_node == RSC_GPUS_PER_NODE else ", by GPUs per node"
    sentence = f"node failures: {NODE_FAILURES_SOURCE}{scaled}"
    return _Said(SECONDS_PER_DAY / rate, sentence)


def _restart(profile: ClusterProfile, loading_seconds: float) -> _Said:
    """Never shorter than reading the checkpoint takes."""
    if profile.reliability is not None:
        return _Said(max(float(profile.reliability.restart), loading_seconds))
    seconds = max(RESTART_SECONDS, loading_seconds)
    return _Said(seconds, f"restart: {short_duration(seconds)} ({RESTART_SOURCE})")


def _preemption_mtbf(profile: ClusterProfile, facts: RunFacts) -> _Said:
    reliability = profile.reliability
    if reliability is not None and reliability.preemption_mtbf is not None:
        free = facts.preemption_wait_seconds is None
        sentence = "preemptions: other nodes are free at once" if free else None
        return _Said(float(reliability.preemption_mtbf), sentence)
    sentence = (
        f"preemptions: every {short_duration(SPOT_PREEMPTION_SECONDS)}, then "
        f"{short_duration(SPOT_WAIT_SECONDS)} without nodes ({SPOT_SOURCE})"
    )
    return _Said(SPOT_PREEMPTION_SECONDS, sentence)


def _can_save(
    spec: RunSpec, profile: ClusterProfile, facts: RunFacts, checkpoint: CheckpointCost
) -> bool:
    """Whether the grace time of the preemptible partition lasts for the running step and a save."""
    partition = _preemptible(spec, profile)
    grace = float(partition.preemption.grace) if partition else 0.0
    return grace >= facts.step_seconds + checkpoint.last_save_seconds


def _preemptible(spec: RunSpec, profile: ClusterProfile) -> PartitionProfile | None:
    """The spec's partition if it is preemptible, else the first one that is."""
    asked = profile.slurm.partition(spec.resources.partition)
    choices = [asked] if asked is not None else []
    for partition in (*choices, *profile.slurm.partitions):
        if partition.preemption.mode != "off":
            return partition
    return None
