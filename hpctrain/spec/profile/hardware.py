"""Hardware of a cluster profile: nodes, GPUs, NVLink and file systems.

Belongs here: facts about machines. Does not belong here: links between nodes (`network`), what
Slurm calls things (`slurm`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.base.units import Bandwidth, ByteSize, FlopRate
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import Precision

_STRIPE_UNIT_BYTES = 64 << 10


class NodeProfile(Document):
    """Everything on a node that is not a GPU."""

    count: int = Field(ge=1, le=1_000_000, description="Number of nodes")
    cpus: int = Field(ge=1, description="As Slurm counts them (CPUs=)")
    memory: ByteSize = Field(gt=0, description="Main memory that jobs may use")
    prefix: str = Field("n", description="Host names are prefix + number")


class GpuProfile(Document):
    """The accelerators of one node."""

    type: str = Field(description="Name in Slurm's GRES, for example a100")
    per_node: int = Field(ge=1, le=1_000, description="GPUs of one node")
    memory: ByteSize = Field(gt=0, description="As the driver reports it")
    reserved: ByteSize | None = Field(
        None,
        description="CUDA context, NCCL's buffers and library workspaces; default: counted",
    )
    peak: dict[Precision, FlopRate] = Field(
        {}, description="Dense peak rate per precision; empty when unknown (no MFU then)"
    )
    memory_bandwidth: Bandwidth | None = Field(
        None, gt=0, description="Of the GPU's memory; default: the catalogue's"
    )
    model: str | None = Field(
        None, description="Name in the GPU catalogue; default: found by `type` and `memory`"
    )
    emulated: bool = Field(
        False,
        description="Slurm counts GPUs that do not exist (a sandbox): processes train on CPUs",
    )


class NvlinkProfile(Document):
    """The fast domain inside which tensor parallelism belongs."""

    domain: int = Field(ge=1, description="GPUs that reach each other over NVLink")
    bandwidth: Bandwidth = Field(gt=0, description="Per GPU and direction")


class FilesystemProfile(Document):
    """A shared file system that checkpoints or data may live on."""

    name: str = Field(description="Name in plans and messages")
    path: str = Field(description="Where it is mounted")
    kind: Literal["lustre", "gpfs", "nfs", "weka", "local", "other"] = Field(
        description="Kind of file system"
    )
    write_bandwidth: Bandwidth = Field(
        gt=0, description="For one job that writes from all its nodes"
    )
    read_bandwidth: Bandwidth = Field(gt=0, description="The same for reading")
    stripe_count: int | None = Field(
        None,
        ge=-1,
        description="lustre: servers (OSTs) that each file of a checkpoint is spread over, -1 for "
        "all; absent: as the directory of runs has it",
    )
    stripe_size: ByteSize | None = Field(
        None, gt=0, description="lustre: bytes on one server before the next, such as 4MiB"
    )

    @model_validator(mode="after")
    def _stripes_are_lustre(self) -> Self:
        """As lfs-setstripe(1) takes them: multiples of 64 KiB; 0 servers stand for a default."""
        given = self.stripe_count is not None or self.stripe_size is not None
        if given and self.kind != "lustre":
            raise ValueError(f"stripes are set on file systems of kind lustre, not {self.kind}")
        if self.stripe_count is None and self.stripe_size is not None:
            raise ValueError("`stripe_size` needs `stripe_count`")
        if self.stripe_count == 0:
            raise ValueError("`stripe_count` is a number of servers, or -1 for all")
        if self.stripe_size is not None and int(self.stripe_size) % _STRIPE_UNIT_BYTES:
            raise ValueError(f"`stripe_size` {self.stripe_size} is no multiple of 64KiB")
        return self
