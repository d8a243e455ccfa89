"""How a site of a cluster profile wants jobs to be asked for: options, partitions, preemption.

Belongs here: facts about the Slurm of a site. Does not belong here: what a run may use at most
(`limits`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.document import Document
from hpctrain.units import Duration


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

    name: str = Field(description="As Slurm knows it")
    default: bool = Field(False, description="Used when a spec names no partition")
    max_walltime: Duration | None = Field(None, description="MaxTime; absent: no limit")
    max_nodes: int | None = Field(None, ge=1, description="MaxNodes; absent: no limit")
    priority_tier: int = Field(1, ge=0, description="PriorityTier; jobs of a higher one preempt")
    preemption: PreemptionProfile = PreemptionProfile()


class SlurmProfile(Document):
    """How this site wants jobs to be asked for."""

    gpu_request: Literal["gres", "gres-typed", "gpus-per-node", "gpus-per-task", "none"] = Field(
        "gres", description="Option that asks for GPUs at this site"
    )
    account: str | None = Field(None, description="Account when a spec names none")
    qos: str | None = Field(None, description="QOS when a spec names none")
    constraint: str | None = Field(None, description="Node features to ask for (`--constraint`)")
    exclusive: bool = Field(True, description="Ask for whole nodes (`--exclusive`)")
    all_memory: bool = Field(True, description="`--mem=0`; some sites reject --mem")
    kill_wait: Duration = Field(Duration(30), description="KillWait of slurm.conf")
    partitions: tuple[PartitionProfile, ...] = Field(
        min_length=1, description="All partitions that runs may use"
    )

    @model_validator(mode="after")
    def _one_default(self) -> Self:
        if sum(partition.default for partition in self.partitions) != 1:
            raise ValueError("exactly one partition must have `default: true`")
        return self

    def partition(self, name: str | None) -> PartitionProfile | None:
        """Find a partition by name, or the default one for None; None if there is no such name."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.default):
                return partition
        return None
