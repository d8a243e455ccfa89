"""Hardware of a cluster profile and its limits: nodes, GPUs, links, file systems, prices.

Belongs here: facts about machines, and what a run may use at most. Does not belong here: what
Slurm calls things (`slurm`).
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.base.units import Bandwidth, ByteSize, Duration, FlopRate
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import Precision
from hpctrain.spec.job_text import SubmitText
from hpctrain.spec.run import Name

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
    path: SubmitText = Field(description="Where it is mounted; `$NAME` is put in where you submit")
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


# ----------------------------------------------------------------------------------------------
# What a run may ask for at a site of a cluster profile, what it costs, and how often it fails.


class LimitsProfile(Document):
    """What the site allows a run to ask for; checked at plan time, exit code 4.

    `max_inodes`, `max_bytes` and `max_rpc_per_hour` are compared with a prediction (`footprint`):
    `submit` only warns of them.
    """

    max_nodes: int | None = Field(None, ge=1, description="Most nodes of one run")
    max_gpus: int | None = Field(None, ge=1, description="Most GPUs of one run")
    max_walltime: Duration | None = Field(None, description="Longest time limit of one attempt")
    max_gpu_hours: float | None = Field(
        None,
        gt=0,
        description="Most GPU-hours of one run: those that the plan predicts, or of one attempt of "
        "`resources.walltime` where no time is predicted",
    )
    max_submit: int | None = Field(
        None, ge=1, description="MaxSubmitJobs of one user; singleton and array submit many at once"
    )
    grp_gpus: int | None = Field(
        None, ge=1, description="GPUs that an account may have at once (GrpTRES); others would wait"
    )
    accounts: tuple[str, ...] = Field(
        (), description="Accounts that may be charged, and one must be given; empty: any"
    )
    account_required: bool = Field(False, description="Refuse runs without an account")
    qos: tuple[str, ...] = Field((), description="QOS that runs may ask for; empty: any")
    poll: Duration = Field(
        Duration(10),
        gt=0,
        description="Least time between two queries of Slurm by a command that waits",
    )
    max_inodes: int | None = Field(
        None, ge=1, description="Most files and directories in one run directory"
    )
    max_bytes: ByteSize | None = Field(
        None, gt=0, description="Most bytes of checkpoints of one run at a time"
    )
    max_rpc_per_hour: int | None = Field(
        None, ge=1, description="Most RPCs of one run to slurmctld in any hour"
    )


class PriceProfile(Document):
    """What a GPU-hour costs. Currency is the site's; messages print it as given."""

    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="ISO 4217 code")
    on_demand: float = Field(gt=0, description="Per GPU-hour that is not taken away")
    spot: float | None = Field(None, gt=0, description="Per GPU-hour of preemptible partitions")


class ReliabilityProfile(Document):
    """How often things fail; used for the forecast and the checkpoint interval."""

    node_mtbf: Duration = Field(gt=0, description="Mean time between failures of one node")
    restart: Duration = Field(
        Duration(600), description="From a failure to the first new step, without queueing"
    )
    repair: Duration | None = Field(
        None,
        gt=0,
        description="From the loss of a node until it works again, for which a run on all nodes "
        "waits; absent: a day is assumed",
    )
    preemption_mtbf: Duration | None = Field(
        None, gt=0, description="Mean time between preemptions of one job on preemptible nodes"
    )


# -- Links between the nodes of a cluster profile: fabric, switches, islands --------------------


class SwitchProfile(Document):
    """Topology above the node, as Slurm's topology plugins know it."""

    plugin: Literal["none", "tree", "block"] = Field("none", description="Slurm's topology plugin")
    nodes_per_leaf: int | None = Field(None, ge=1, description="Nodes under one leaf or block")
    usable_per_leaf: int | None = Field(
        None,
        ge=1,
        description="How many of them one job may count on, such as 16 of the 18 of a rack; "
        "default: all",
    )
    oversubscription: float = Field(1.0, ge=1, description="Leaf down-link to up-link ratio")
    request: bool = Field(
        True, description="Ask for few leaves (tree: `--switches`) or whole blocks (`--segment`)"
    )
    segment: Literal["auto", "force", "forbid"] = Field(
        "auto",
        description="block: `--segment` where the plan relies on it, for every job, or never "
        "(as `request: false`)",
    )
    wait: Duration | None = Field(
        None,
        ge=60,
        description="tree: how long a job waits for few leaves; default: 5 min, Slurm's own limit",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.plugin == "none") != (self.nodes_per_leaf is None):
            raise ValueError("`nodes_per_leaf` goes together with plugin `tree` or `block`")
        if self.wait is not None and (self.plugin != "tree" or not self.request):
            raise ValueError("`wait` goes together with plugin `tree` and `request: true`")
        if self.segment != "auto" and self.plugin != "block":
            raise ValueError("`segment` goes together with plugin `block`")
        if self.segment == "force" and not self.request:
            raise ValueError("`segment: force` contradicts `request: false`")
        if self.usable_per_leaf is not None and self.usable_per_leaf > (self.nodes_per_leaf or 0):
            raise ValueError("`usable_per_leaf` is at most `nodes_per_leaf`")
        return self

    @property
    def usable_nodes(self) -> int | None:
        """Nodes under one leaf or block that one job may count on; None where they are unknown."""
        return self.usable_per_leaf or self.nodes_per_leaf

    @property
    def segment_policy(self) -> Literal["auto", "force", "forbid"]:
        """Whether jobs request segments; none without the plugin, or with `request: false`."""
        return self.segment if self.plugin == "block" and self.request else "forbid"


class IslandProfile(Document):
    """A group of nodes behind one link to the others, such as a building or a rack row.

    Slurm numbers ranks along the names of nodes, so an island has to be consecutive names.
    """

    nodes: int = Field(ge=1, description="Nodes of this island, in the order of their names")
    uplink: Bandwidth = Field(gt=0, description="Of the whole island to the others, per direction")
    feature: Name | None = Field(None, description="Slurm feature of its nodes, for `--constraint`")


class NetworkProfile(Document):
    """Links between nodes."""

    fabric: Literal["infiniband", "roce", "efa", "slingshot", "ethernet"] = Field(
        description="Kind of network that NCCL uses between nodes"
    )
    nics_per_node: int = Field(ge=1, description="Cards of one node that NCCL may use")
    nic_bandwidth: Bandwidth = Field(gt=0, description="Per card and direction")
    interface: str | None = Field(
        None,
        min_length=1,
        description="For TCP traffic between nodes: value of NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME where `environment` does not set them",
    )
    master_address: str | None = Field(
        None,
        description="MASTER_ADDR: `ip`, or a name with `{node}`, such as `{node}i`; default: the "
        "address at which Slurm reaches the node",
    )
    ports: str | None = Field(
        None, description="MASTER_PORT is one of these, such as 20000-21000; default: 20000-29999"
    )
    switches: SwitchProfile = SwitchProfile()
    islands: tuple[IslandProfile, ...] = Field(
        (), description="Groups of nodes with slower links between them; empty: all alike"
    )

    @field_validator("master_address")
    @classmethod
    def _names_the_node(cls, address: str | None) -> str | None:
        if address is None or address == "ip":
            return address
        rest = address.replace("{node}", "", 1)
        if rest == address or not re.fullmatch(r"[A-Za-z0-9.-]*", rest):
            raise ValueError("expected `ip`, or a host name with `{node}` once, such as `{node}i`")
        return address

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str | None) -> str | None:
        if ports is not None:
            port_range(ports)
        return ports

    @field_validator("islands")
    @classmethod
    def _islands_differ(cls, islands: tuple[IslandProfile, ...]) -> tuple[IslandProfile, ...]:
        if len(islands) == 1:
            raise ValueError("a single island has nobody behind its uplink: list all, or none")
        features = [island.feature for island in islands if island.feature is not None]
        if len(features) not in (0, len(islands)):
            raise ValueError("give every island a `feature`, or none of them")
        if len(set(features)) != len(features):
            raise ValueError(f"two islands have one feature: {', '.join(features)}")
        return islands


def port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range such as `20000-21000`.

    Raises ValueError for another form. Ports below 1024 are those of the system (RFC 6335).
    """
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise ValueError("expected two ports between 1024 and 65535, such as 20000-21000")
    return first, last
