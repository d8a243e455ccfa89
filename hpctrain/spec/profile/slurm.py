"""How a site of a cluster profile wants jobs to be asked for: options and partitions.

Belongs here: facts about the Slurm of a site. Does not belong here: what a run may use at most
(`hardware`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from hpctrain.base.units import ByteSize, Duration
from hpctrain.spec.document import Document
from hpctrain.spec.job_text import SubmitText
from hpctrain.spec.profile.hardware import (
    GpuProfile,
    NetworkProfile,
    NodeProfile,
    NvlinkProfile,
    PriceProfile,
    ReliabilityProfile,
)
from hpctrain.spec.profile.software import FabricVariable
from hpctrain.spec.run import VariablePattern
from hpctrain.spec.slurm_options import SiteOptions, too_new_options

# -- One partition of a cluster profile: limits, preemption, and what differs from the cluster --


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


# ----------------------------------------------------------------------------------------------


GpuRequest = Literal[
    "gres", "gres-typed", "gpus-per-node", "gpus-per-node-typed", "gpus-per-task", "none"
]


class SlurmProfile(Document):
    """How this site wants jobs to be asked for."""

    gpu_request: GpuRequest = Field(
        "gres",
        description="Option that asks for GPUs at this site; the typed ones name `gpu.type`, too",
    )
    account: str | None = Field(None, description="Account when a spec names none")
    qos: str | None = Field(None, description="QOS when a spec names none")
    constraint: str | None = Field(None, description="Node features to ask for (`--constraint`)")
    export: Literal["clean", "all", "none"] = Field(
        "clean",
        description="What a job inherits from where it is submitted: clean (HOME, LANG, PATH, "
        "USER, `inherit` and `environment.inherit`), all, none (`--export=NONE`: the variables of "
        "a login instead)",
    )
    inherit: tuple[VariablePattern, ...] = Field(
        (),
        description="Variables of a login that every job needs here, such as SCRATCH, or patterns "
        "of their names, such as `*_proxy`: passed on from where it is submitted, like those of "
        "`environment.inherit` of a spec",
    )
    exclusive: bool | Literal["user", "topo"] = Field(
        True,
        description="Ask for whole nodes (`--exclusive`); user: for nodes without jobs of others "
        "(`--exclusive=user`); topo: for whole blocks of topology/block (`--exclusive=topo`)",
    )
    memory: Literal["auto", "all", "share", "none"] = Field(
        "auto",
        description="auto: all of whole nodes (`--mem=0`), the share of its GPUs in a part of one; "
        "all: whole nodes only, others are refused; share: always as a number; none: no option",
    )
    memory_per_gpu: ByteSize | None = Field(
        None, ge=2**20, description="Ask by `--mem-per-gpu` instead; needs an option for GPUs"
    )
    reservation: str | None = Field(None, description="Reservation when a spec names none")
    reservation_end: AwareDatetime | None = Field(
        None, description="When it ends, as 2026-12-24T18:00:00+01:00; later attempts are refused"
    )
    comment: bool = Field(
        True,
        description="Mark jobs by `--comment`; false where the site uses it: jobs are then found "
        "by name and directory",
    )
    options: SiteOptions = SiteOptions()
    template: SubmitText | None = Field(
        None,
        min_length=1,
        description="Directory of the site's `job.sbatch.j2`, or that file, relative to this "
        "profile; `--template-dir` replaces it (docs/templates.md); `$NAME` is put in where you "
        "submit",
    )
    version: str | None = Field(
        None,
        pattern=r"^\d\d\.\d\d$",
        description="Slurm's version, such as 24.11: newer `options` are refused; absent: unknown",
    )
    kill_wait: Duration = Field(Duration(30), description="KillWait of slurm.conf")
    partitions: tuple[PartitionProfile, ...] = Field(
        min_length=1, description="All partitions that runs may use"
    )

    data_partition: str | None = Field(
        None,
        description="Partition of `hpctrain data prepare --slurm`, which needs no GPU; it need not "
        "be one of `partitions`. Default: the default one",
    )

    @model_validator(mode="after")
    def _one_option_for_memory(self) -> Self:
        if self.memory_per_gpu is None:
            return self
        if self.memory != "auto":
            raise ValueError("`memory_per_gpu` and `memory` exclude each other: remove one")
        if self.gpu_request == "none":
            raise ValueError("`memory_per_gpu` needs a `gpu_request` other than none (sbatch(1))")
        return self

    @model_validator(mode="after")
    def _options_exist(self) -> Self:
        newer = too_new_options(self.options, self.version) if self.version else []
        if newer:
            raise ValueError(f"Slurm {self.version} does not have {', '.join(newer)}")
        return self

    @model_validator(mode="after")
    def _one_default(self) -> Self:
        if sum(partition.default for partition in self.partitions) != 1:
            raise ValueError("exactly one partition must have `default: true`")
        return self

    @property
    def asks_for_a_type(self) -> bool:
        """Whether the request for GPUs names their type, of which there is one for a job."""
        return self.gpu_request.endswith("-typed")

    def partition(self, name: str | None) -> PartitionProfile | None:
        """Find a partition by name, or the default one for None; None if there is no such name."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.default):
                return partition
        return None
