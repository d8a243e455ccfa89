"""One job of Slurm: its spec, the profile of its site, its plan, and what follows from the three.

A run's spec and plan contain all of it; a part of a service is described by `ServicePart`.
Belongs here: the record that rendering and the engines' documents take, quantities that need
several of its documents. Does not belong here: options of Slurm's commands (`hpctrain.job.render`),
planning, which has no plan yet (`request`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from hpctrain.base.errors import LimitError, Refusal
from hpctrain.base.units import Duration
from hpctrain.plan.documents import NodeRequest, Plan
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.spec.notify import NotifySpec, joined_notify
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile
from hpctrain.spec.run import ContainerSpec, EnvironmentSpec, ParallelSpec, ResourcesSpec, RunSpec
from hpctrain.spec.service import ServiceSpec
from hpctrain.spec.supervision import SuperviseSpec
from hpctrain.spec.trainer import TrainerRunSpec

# srun: a task for each GPU. torchrun: a task for each node, which starts one process for each GPU.
# node: a task for each node, whose program knows by itself what to start.
JobLauncher = Literal["srun", "torchrun", "node"]


class NamedEngine(Protocol):
    """What trains or serves: variables of a site may be for some engines only."""

    @property
    def name(self) -> str: ...


class JobSpec(Protocol):
    """What somebody wants of one job."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> NamedEngine: ...
    @property
    def launcher(self) -> JobLauncher: ...
    @property
    def resources(self) -> ResourcesSpec: ...
    @property
    def environment(self) -> EnvironmentSpec: ...
    @property
    def container(self) -> ContainerSpec | None: ...
    @property
    def notify(self) -> NotifySpec | None: ...
    @property
    def supervise(self) -> SuperviseSpec: ...


class JobPlan(Protocol):
    """How the GPUs of one job are spread over nodes."""

    @property
    def nodes(self) -> NodeRequest: ...


@dataclass(frozen=True)
class ServingProgram:
    """The engine of a service, or its router, by its name."""

    name: str


@dataclass(frozen=True)
class ServicePart:
    """One job of a service, as both the spec and the plan of a `Job`: a replica's, for example."""

    name: str
    engine: ServingProgram
    resources: ResourcesSpec
    environment: EnvironmentSpec
    nodes: NodeRequest
    supervise: SuperviseSpec = field(default_factory=SuperviseSpec)
    notify: NotifySpec | None = None
    container: ContainerSpec | None = None
    launcher: JobLauncher = "node"


@dataclass(frozen=True)
class Job:
    """What one job is made of; `profile` is the one for jobs in its partition."""

    spec: JobSpec
    profile: ClusterProfile
    plan: JobPlan

    @cached_property
    def partition(self) -> PartitionProfile:
        """The partition that the job is in. Raises LimitError if the site has none of its name."""
        name = self.spec.resources.partition
        found = self.profile.slurm.partition(name)
        if found is None:
            message = f"profile {self.profile.name} has no partition {name}"
            raise LimitError([Refusal(message, "resources.partition")])
        return found

    @property
    def walltime(self) -> Duration:
        """The time limit of one attempt: the spec's, else the tightest of partition and site."""
        if self.spec.resources.walltime is not None:
            return self.spec.resources.walltime
        both = (self.partition.max_walltime, self.profile.limits.max_walltime)
        return min((limit for limit in both if limit), default=Duration(86400))

    @property
    def notify(self) -> NotifySpec | None:
        """Whom the job tells about its events: as the spec says, else as the site does."""
        return joined_notify(self.spec.notify, self.profile.notify)

    @property
    def most_nodes(self) -> int:
        """The nodes of the plan and the spare ones."""
        return self.plan.nodes.nodes + self.spec.resources.spare_nodes

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that the job starts with: all, spare ones included, by default."""
        return self.spec.resources.min_nodes or self.most_nodes

    @property
    def has_whole_nodes(self) -> bool:
        """Whether the job has all GPUs of its nodes."""
        return self.plan.nodes.gpus_per_node == self.profile.gpu.per_node

    @property
    def cpus_per_gpu(self) -> int:
        """CPUs for each GPU: the spec's number, else the share of a GPU in its node's CPUs.

        Slurm's default of 1 would bind all threads of a rank (NCCL's, the data loader's) to one
        core.
        """
        share = self.profile.cpus_for_tasks // self.profile.gpu.per_node
        return self.spec.resources.cpus_per_gpu or max(1, share)


@dataclass(frozen=True)
class TrainingJob(Job):
    """The job of a run."""

    spec: RunSpec
    plan: Plan

    @property
    def peak_flops_per_gpu(self) -> float | None:
        """The dense peak of a GPU in FLOP/s at the precision of the plan; None: not known."""
        peak = self.profile.gpu.peak.get(self.plan.precision)
        return float(peak) if peak else None


@dataclass(frozen=True)
class TrainerJob(Job):
    """The job of a run with a trainer of its own."""

    spec: TrainerRunSpec
    plan: TrainerPlan


# -- What a GPU-hour of a run or a service costs: spot where its partition can be preempted -------


class GpuPrice(NamedTuple):
    """The price of one GPU-hour, in a currency."""

    per_gpu_hour: float
    currency: str


def gpu_price(
    spec: RunSpec | TrainerRunSpec | ServiceSpec, profile: ClusterProfile
) -> GpuPrice | None:
    """Return the price that a profile has for the partition of a spec; None without prices."""
    prices = profile.for_partition(spec.resources.partition).prices
    if prices is None:
        return None
    partition = profile.slurm.partition(spec.resources.partition)
    preemptible = partition is not None and partition.preemption.mode != "off"
    amount = prices.spot if preemptible and prices.spot else prices.on_demand
    return GpuPrice(amount, prices.currency)


# -- A spec as it was planned, so that nothing else can be planned for it again -------------------


def spec_as_planned(spec: RunSpec, plan: Plan) -> RunSpec:
    """Fix layout, micro-batch, recomputation, offload and sharding of a spec to its plan."""
    optimizer = {
        "zero": plan.zero,
        "shard_gpus": plan.shard_gpus,
        "offload": plan.offload,
    }
    return spec.model_copy(
        update={
            "parallel": parallel_as_planned(spec, plan),
            "batch": spec.batch.model_copy(update={"micro": plan.batch.micro_batch}),
            "recompute": plan.recompute,
            "recompute_modules": plan.recompute_modules or spec.recompute_modules,
            "recompute_layers": plan.recompute_layers or spec.recompute_layers,
            "activation_offload_layers": plan.activation_offload_layers or spec.offloaded_layers,
            "optimizer": spec.optimizer.model_copy(update=optimizer),
            "resources": spec.resources.model_copy(update={"gpus": plan.layout.world_size}),
        }
    )


def parallel_as_planned(spec: RunSpec, plan: Plan) -> ParallelSpec:
    """Write the layout of a plan as a spec would, with its stages where they are uneven."""
    layout, given = plan.layout, spec.parallel
    if given == "auto":
        given = ParallelSpec(pp=layout.pp, vpp=layout.vpp, stages=_listed_stages(plan))
    sizes = layout.model_dump(exclude={"dp"})
    if layout.tp == 1:
        sizes["sequence_parallel"] = None
    return given.model_copy(update=sizes)


def _listed_stages(plan: Plan) -> tuple[int, ...] | None:
    """List the layers of uneven chunks in the order of the model; None where all are alike."""
    chunks = [
        plan.stages[stage].chunk_layers[chunk]
        for chunk in range(plan.layout.vpp)
        for stage in range(plan.layout.pp)
    ]
    return tuple(chunks) if len(set(chunks)) > 1 else None
