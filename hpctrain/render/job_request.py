"""What rendering reads of a spec and a plan, whatever the job runs: a run or a part of a service.

A run's spec and plan have all of it by themselves; a part of a service says it by `ServicePart`.
Belongs here: these views. Does not belong here: what only training has (steps, layout, launchers'
programs), which `script` and `srun_tasks` read from the run's own documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from hpctrain.plan.documents import NodeRequest
from hpctrain.spec.notify import NotifySpec
from hpctrain.spec.run import ContainerSpec, EnvironmentSpec, ResourcesSpec

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
    """One job of a service, as a spec and a plan for rendering: a replica's, for example."""

    name: str
    engine: ServingProgram
    resources: ResourcesSpec
    environment: EnvironmentSpec
    nodes: NodeRequest
    notify: NotifySpec | None = None
    container: ContainerSpec | None = None
    launcher: JobLauncher = "node"
