"""Hardware of a cluster profile: nodes, GPUs, NVLink and file systems.

Belongs here: facts about machines. Does not belong here: links between nodes (`network`), what
Slurm calls things (`slurm`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.spec.document import Document
from hpctrain.spec.run import Precision
from hpctrain.units import Bandwidth, ByteSize, FlopRate


class NodeProfile(Document):
    """Everything on a node that is not a GPU."""

    count: int = Field(ge=1, description="Number of nodes")
    cpus: int = Field(ge=1, description="As Slurm counts them (CPUs=)")
    memory: ByteSize = Field(gt=0, description="Main memory that jobs may use")
    prefix: str = Field("n", description="Host names are prefix + number")


class GpuProfile(Document):
    """The accelerators of one node."""

    type: str = Field(description="Name in Slurm's GRES, for example a100")
    per_node: int = Field(ge=1, description="GPUs of one node")
    memory: ByteSize = Field(gt=0, description="As the driver reports it")
    reserved: ByteSize = Field(
        ByteSize(2 * 2**30), description="CUDA context, NCCL and library workspaces"
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
