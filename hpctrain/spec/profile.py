"""The cluster profile: hardware, Slurm, software and rules of a site, one document per YAML file.

Belongs here: facts about nodes, links, partitions, file systems and the site's rules. Does not
belong here: results of planning (the planner contacts no cluster), facts about a model.
"""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from hpctrain.spec.calibration import SiteCalibration
from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import EngineName
from hpctrain.spec.run import Name, Precision, RunSpec, VariableName
from hpctrain.units import Bandwidth, ByteSize, Duration, FlopRate

Continuation = Literal["requeue", "chain", "singleton", "array", "none"]
# Variables that name the interface of TCP traffic; both take the start of a name.
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


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


class SwitchProfile(Document):
    """Topology above the node, as Slurm's topology plugins know it."""

    plugin: Literal["none", "tree", "block"] = Field("none", description="Slurm's topology plugin")
    nodes_per_leaf: int | None = Field(None, ge=1, description="Nodes under one leaf or block")
    oversubscription: float = Field(1.0, ge=1, description="Leaf down-link to up-link ratio")
    request: bool = Field(
        True, description="Ask for few leaves (tree: `--switches`) or whole blocks (`--segment`)"
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
        return self


class IslandProfile(Document):
    """A group of nodes behind one link to the others, such as a building or a rack row.

    Slurm numbers ranks along the names of nodes, so an island has to be consecutive names.
    """

    nodes: int = Field(ge=1, description="Nodes of this island, in the order of their names")
    uplink: Bandwidth = Field(gt=0, description="Of the whole island to the others, per direction")
    feature: Name | None = Field(None, description="Slurm feature of its nodes, for `--constraint`")
    gpu: str | None = Field(None, description="GPU type if it differs from `gpu.type`")


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
    switches: SwitchProfile = SwitchProfile()
    islands: tuple[IslandProfile, ...] = Field(
        (), description="Groups of nodes with slower links between them; empty: all alike"
    )

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
    preemption_mtbf: Duration | None = Field(
        None, gt=0, description="Mean time between preemptions of one job on preemptible nodes"
    )


class NodeProfile(Document):
    """Everything on a node that is not a GPU."""

    count: int = Field(ge=1, description="Number of nodes")
    cpus: int = Field(ge=1, description="As Slurm counts them (CPUs=)")
    memory: ByteSize = Field(gt=0, description="Main memory that jobs may use")
    prefix: str = Field("n", description="Host names are prefix + number")


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


class ContainerProfile(Document):
    """Image and launcher; the options go on the `srun` line, never on sbatch."""

    launcher: Literal["pyxis", "apptainer"] = Field(description="What starts the container")
    image: str = Field(description="Image as the launcher takes it")
    mounts: tuple[str, ...] = Field((), description="SOURCE:TARGET[:OPTIONS] for each mount")
    python: str = Field("python3", description="Interpreter inside the image")


class ModulesProfile(Document):
    """Environment modules (Lmod or Tcl)."""

    init: str | None = Field(None, description="File to source first if shells lack `module`")
    purge: bool = Field(False, description="Run `module purge` first")
    load: tuple[str, ...] = Field((), description="Modules to load, in this order")


class SoftwareProfile(Document):
    """Where hpctrain and the engine live on the compute nodes."""

    python: str | None = Field(None, description="Interpreter; default: the submitting one")
    container: ContainerProfile | None = Field(None, description="Absent: no container")
    modules: ModulesProfile | None = Field(None, description="Absent: no environment modules")
    transformer_engine: bool = Field(
        True,
        description="TransformerEngine is installed there: `engine.implementation: auto` uses it",
    )


class FabricVariable(Document):
    """One environment variable of the fabric and why the site sets it."""

    name: VariableName = Field(description="Name of the variable")
    value: str = Field(description="Text, so put numbers in quotes")
    reason: str = Field(min_length=3, description="Why the site sets it")
    engines: tuple[EngineName, ...] = Field(
        (), description="Only for runs of these engines; default: for all"
    )

    def concerns(self, engine: EngineName) -> bool:
        """Whether the site sets it for runs of this engine."""
        return not self.engines or engine in self.engines


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


class LimitsProfile(Document):
    """What the site allows a run to ask for; checked at plan time, exit code 4."""

    max_nodes: int | None = Field(None, ge=1, description="Most nodes of one run")
    max_walltime: Duration | None = Field(None, description="Longest time limit of one attempt")
    accounts: tuple[str, ...] = Field((), description="Accounts that may be charged; empty: any")


class ClusterProfile(Document):
    """A cluster: hardware, Slurm, software, rules."""

    name: Name = Field(description="Name for `--profile`")
    description: str = Field("", description="One line for `hpctrain profiles`")
    nodes: NodeProfile
    gpu: GpuProfile
    nvlink: NvlinkProfile
    network: NetworkProfile
    filesystems: tuple[FilesystemProfile, ...] = Field(
        min_length=1, description="File systems that data or checkpoints may live on"
    )
    slurm: SlurmProfile
    software: SoftwareProfile = SoftwareProfile()
    environment: tuple[FabricVariable, ...] = Field(
        (), description="Variables of the fabric, each with its reason"
    )
    continuation: Continuation = Field(
        "requeue",
        description="How a stopped attempt goes on: requeue (the same job again), chain (a job "
        "behind it), singleton or array (jobs submitted at once), none (by hand)",
    )
    continuation_jobs: int = Field(
        8, ge=2, le=1000, description="singleton, array: so many jobs are submitted at once"
    )
    speed_check: Literal["off", "report", "exclude"] | None = Field(
        None,
        description="What `supervise.speed_check.mode: auto` means here; absent: report, or off "
        "where GPUs are emulated. `locked: [supervise.speed_check.mode]` forces it",
    )
    limits: LimitsProfile = LimitsProfile()
    prices: PriceProfile | None = Field(None, description="Absent: no costs are printed")
    reliability: ReliabilityProfile | None = Field(
        None, description="Absent: the forecast assumes published failure rates and says so"
    )
    calibration: str | SiteCalibration | None = Field(
        None,
        description="Measured rates of this cluster, which the planner takes in place of published "
        "ones: a file of `hpctrain calibrate`, relative to this one, or its content",
    )
    locked: tuple[str, ...] = Field(
        (), description="Spec fields that a spec may not set here, such as `resources.qos`"
    )

    @field_validator("network")
    @classmethod
    def _islands_are_the_cluster(
        cls, network: NetworkProfile, info: ValidationInfo
    ) -> NetworkProfile:
        nodes = info.data.get("nodes")
        if nodes is None or not network.islands:
            return network
        sizes = [island.nodes for island in network.islands]
        if sum(sizes) != nodes.count:
            added = " + ".join(map(str, sizes))
            raise ValueError(f"islands add up to {added} = {sum(sizes)} nodes, not {nodes.count}")
        for number, island in enumerate(network.islands):
            cards = island.nodes * network.nics_per_node * network.nic_bandwidth
            if island.uplink > cards:
                raise ValueError(
                    f"islands.{number}: uplink {island.uplink / 1e9:g} GB/s is more than all "
                    f"network cards of its nodes send, {cards / 1e9:g} GB/s"
                )
        return network

    @field_validator("slurm")
    @classmethod
    def _islands_can_be_asked_for(cls, slurm: SlurmProfile, info: ValidationInfo) -> SlurmProfile:
        network, gpu = info.data.get("network"), info.data.get("gpu")
        if network is None or gpu is None:
            return slurm
        # sbatch(1), --constraint: one set of brackets for each job, and islands need it
        features = any(island.feature for island in network.islands)
        if features and set(slurm.constraint or "") & set("[]()|*"):
            raise ValueError(
                f"constraint `{slurm.constraint}` cannot be joined with the features of "
                "network.islands: use names joined by `&` only"
            )
        others = {island.gpu for island in network.islands} - {None, gpu.type}
        if others and slurm.gpu_request == "gres-typed":
            raise ValueError(
                f"gpu_request gres-typed asks for {gpu.type} only, but network.islands has "
                f"{', '.join(sorted(others))}: use `gres`"
            )
        return slurm

    @field_validator("environment")
    @classmethod
    def _one_interface(
        cls, environment: tuple[FabricVariable, ...], info: ValidationInfo
    ) -> tuple[FabricVariable, ...]:
        network = info.data.get("network")
        interface = network.interface if network is not None else None
        for number, variable in enumerate(environment):
            if interface is None or variable.name not in INTERFACE_VARIABLES:
                continue
            # NCCL: `=eth0` is exact, `eth` is a prefix, `^docker0` excludes
            names = variable.value.lstrip("=").split(",")
            selected = any(name and interface.startswith(name) for name in names)
            if not selected and not variable.value.startswith("^"):
                raise Contradiction(
                    ("environment", number, "value"),
                    f"{variable.name} is {variable.value}, but network.interface is {interface}",
                    f"remove one of the two; `interface` alone sets {variable.name}",
                )
        return environment

    @field_validator("locked")
    @classmethod
    def _locked_fields_exist(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not has_field(RunSpec, path):
                raise ValueError(f"`{path}` is no field of a run spec")
        return paths

    @property
    def gpu_count(self) -> int:
        return self.nodes.count * self.gpu.per_node

    @property
    def usual_speed_check(self) -> Literal["off", "report", "exclude"]:
        """The check before training of a spec that leaves the choice to the site.

        Processes that share the CPUs of a sandbox do not compute alike: it is off there.
        """
        if self.speed_check is not None:
            return self.speed_check
        return "off" if self.gpu.emulated else "report"

    @property
    def accelerator(self) -> Literal["cuda", "cpu"]:
        """The device that ranks train on."""
        return "cpu" if self.gpu.emulated else "cuda"


def has_field(document: type[BaseModel], path: str) -> bool:
    """Whether a dotted path such as `resources.qos` names a field of a document class."""
    part, _, rest = path.partition(".")
    for name, field in document.model_fields.items():
        if part == (field.alias or name):
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind]
            sections = [k for k in inner if isinstance(k, type) and issubclass(k, BaseModel)]
            return not rest or any(has_field(section, rest) for section in sections)
    return False
