"""One partition of a cluster profile: limits, preemption, and what differs from the cluster.

Belongs here: facts about the jobs of one partition. Does not belong here: options of all jobs
(`slurm`), the profile that results for such a job (`ClusterProfile.for_partition`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.base.units import Duration
from hpctrain.spec.document import Document
from hpctrain.spec.profile.hardware import GpuProfile, NodeProfile, NvlinkProfile
from hpctrain.spec.profile.limits import PriceProfile, ReliabilityProfile
from hpctrain.spec.profile.network import NetworkProfile
from hpctrain.spec.profile.software import FabricVariable


class PreemptionProfile(Document):
    """How jobs of a partition lose their nodes to others."""

    mode: Literal["off", "requeue", "cancel"] = Field(
        "off", description="What Slurm does with a preempted job (PreemptMode)"
    )
    grace: Duration = Field(Duration(0), description="GraceTime of the partition or QOS")
    user_signal: bool = Field(
        False, description="Site sets preempt_send_user_signal (22.05) or send_user_signal (23.02+)"
    )


class PartitionProfile(Document):
    """One partition and its limits."""

    name: str = Field(min_length=1, description="As Slurm knows it")
    default: bool = Field(False, description="Used when a spec names no partition")
    request: bool = Field(
        True,
        description="Ask for it by `--partition`; false where the site chooses it by account, QOS "
        "or features, so that its name is one of yours",
    )
    max_walltime: Duration | None = Field(None, description="MaxTime; absent: no limit")
    min_nodes: int | None = Field(None, ge=1, description="MinNodes; absent: no limit")
    max_nodes: int | None = Field(None, ge=1, description="MaxNodes; absent: no limit")
    max_gpus: int | None = Field(None, ge=1, description="Most GPUs of one run; absent: no limit")
    priority_tier: int = Field(1, ge=0, description="PriorityTier; jobs of a higher one preempt")
    preemption: PreemptionProfile = PreemptionProfile()
    account: str | None = Field(None, description="Instead of `slurm.account`; empty text: none")
    qos: str | None = Field(None, description="Instead of `slurm.qos`; empty text: none")
    constraint: str | None = Field(
        None, description="Instead of `slurm.constraint`; empty text: none"
    )
    nodes: NodeProfile | None = Field(
        None, description="Its nodes where they differ; what is left out is as in `nodes`"
    )
    gpu: GpuProfile | None = Field(
        None,
        description="Its GPUs where they differ; what is left out is as in `gpu`, but figures of "
        "another `type` are not",
    )
    nvlink: NvlinkProfile | None = Field(None, description="Where it differs from `nvlink`")
    network: NetworkProfile | None = Field(
        None, description="Where it differs from `network`; `islands` are never taken from there"
    )
    environment: tuple[FabricVariable, ...] = Field(
        (), description="Variables besides those of `environment`, or instead of one of that name"
    )
    prices: PriceProfile | None = Field(None, description="Instead of `prices`")
    reliability: ReliabilityProfile | None = Field(None, description="Instead of `reliability`")
