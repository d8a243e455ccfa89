"""Mean times between failures and preemptions of a job: the profile's, else published ones.

Belongs here: rates for one job on a number of nodes. Does not belong here: the work that
interruptions cost (`attempts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.base.units import short_duration
from hpctrain.plan.forecast.checkpoint import load_seconds
from hpctrain.plan.forecast.documents import Assumption, CheckpointCost, Interruptions, RunFacts
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
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class _Figure:
    """Seconds and, if they are not the site's own, the assumption behind them."""

    seconds: float
    assumption: Assumption | None = None


def is_spot(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> bool:
    """Tell whether nodes can be preempted: from the facts, else from the partition."""
    if facts.spot is not None:
        return facts.spot
    partition = profile.slurm.partition(spec.resources.partition)
    return partition is not None and partition.preemption.mode != "off"


def interruptions(
    spec: RunSpec, profile: ClusterProfile, facts: RunFacts, checkpoint: CheckpointCost
) -> Interruptions:
    """Compute mean times between failures (of any of the nodes) and preemptions of this job.

    Failures of nodes are taken as independent, so their rates add up (Kokolis et al.:
    MTTF = 1 / (N r_f)). A restart is never shorter than reading the checkpoint. The job survives
    a preemption without loss if the grace time lasts for the running step and a save.
    """
    node = _node_mtbf(profile)
    loading = load_seconds(profile, facts, checkpoint.total_bytes)
    if profile.reliability is not None:
        restart = _Figure(max(float(profile.reliability.restart), loading))
    else:
        seconds = max(RESTART_SECONDS, loading)
        text = f"{short_duration(seconds)} ({RESTART_SOURCE})"
        restart = _Figure(seconds, Assumption(kind="restart", text=text))
    preemption = _preemption_mtbf(profile, facts) if is_spot(spec, profile, facts) else None
    # the spec's partition if it is preemptible, else the first one that is
    chosen = profile.slurm.partition(spec.resources.partition)
    partitions = (*([chosen] if chosen else []), *profile.slurm.partitions)
    graces = [float(p.preemption.grace) for p in partitions if p.preemption.mode != "off"]
    grace = graces[0] if graces else 0.0
    figures = [node, restart, *([preemption] if preemption else [])]
    return Interruptions(
        failure_mtbf_seconds=node.seconds / facts.nodes,
        preemption_mtbf_seconds=preemption.seconds if preemption else None,
        restart_seconds=restart.seconds,
        warned=grace >= facts.step_seconds + checkpoint.last_save_seconds,
        assumptions=tuple(figure.assumption for figure in figures if figure.assumption),
    )


def preemption_wait_seconds(profile: ClusterProfile, facts: RunFacts) -> float:
    """Return the mean wait for nodes after a preemption.

    The published wait belongs to the published rate: it is used only together with it.
    """
    if facts.preemption_wait_seconds is not None:
        return facts.preemption_wait_seconds
    known = profile.reliability is not None and profile.reliability.preemption_mtbf is not None
    return 0.0 if known else SPOT_WAIT_SECONDS


def node_mtbf_seconds(profile: ClusterProfile) -> float:
    """Return the mean time between failures of one node: the site's, else the published one."""
    return _node_mtbf(profile).seconds


def _node_mtbf(profile: ClusterProfile) -> _Figure:
    if profile.reliability is not None:
        return _Figure(float(profile.reliability.node_mtbf))
    rate = RSC1_FAILURES_PER_NODE_DAY * profile.gpu.per_node / RSC_GPUS_PER_NODE
    scaled = "" if profile.gpu.per_node == RSC_GPUS_PER_NODE else ", by GPUs per node"
    assumption = Assumption(kind="node failures", text=f"{NODE_FAILURES_SOURCE}{scaled}")
    return _Figure(SECONDS_PER_DAY / rate, assumption)


def _preemption_mtbf(profile: ClusterProfile, facts: RunFacts) -> _Figure:
    reliability = profile.reliability
    if reliability is not None and reliability.preemption_mtbf is not None:
        text = (
            "replacement nodes are available immediately"
            if facts.preemption_wait_seconds is None
            else None
        )
        seconds = float(reliability.preemption_mtbf)
    else:
        text = (
            f"every {short_duration(SPOT_PREEMPTION_SECONDS)}, then "
            f"{short_duration(SPOT_WAIT_SECONDS)} without nodes ({SPOT_SOURCE})"
        )
        seconds = SPOT_PREEMPTION_SECONDS
    return _Figure(seconds, Assumption(kind="preemptions", text=text) if text else None)
