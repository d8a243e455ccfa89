"""The cluster profile: hardware, Slurm, software and rules of a site, one document per YAML file.

Belongs here: the whole document and the rules that join its parts, which stand in the modules of
this package. Does not belong here: results of planning (the planner contacts no cluster), facts
about a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import PurePath
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from hpctrain.spec.calibration import SiteCalibration
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.notify import NotifySpec
from hpctrain.spec.profile.hardware import (
    FilesystemProfile,
    GpuProfile,
    LimitsProfile,
    NetworkProfile,
    NodeProfile,
    NvlinkProfile,
    PriceProfile,
    ReliabilityProfile,
    port_range,
)
from hpctrain.spec.profile.slurm import SlurmProfile
from hpctrain.spec.profile.software import FabricVariable, SoftwareProfile
from hpctrain.spec.run import Name, RunSpec
from hpctrain.spec.slurm_options import left_out_options, restricting_option

Continuation = Literal["requeue", "chain", "singleton", "array", "none"]
# Variables that name the interface of TCP traffic, to NCCL and to gloo.
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class MetricsProfile(Document):
    """How metrics of jobs reach the Prometheus of a site."""

    textfile: str | None = Field(
        None,
        pattern=r"^/",
        description="Directory of node_exporter's textfile collector, in which users may write; "
        "absent: none",
    )
    ports: str | None = Field(
        None,
        description="Ports that endpoints of jobs may take, such as 9400-9499; default: any",
    )
    address: str | None = Field(
        None, description="Address that endpoints listen on; default: every address of the node"
    )

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str | None) -> str | None:
        if ports is not None:
            port_range(ports)
        return ports


Sentence = Annotated[str, Field(min_length=3)]


class SiteFacts(Document):
    """Where the values of a named cluster are from, and what its profile cannot say.

    What a profile that `extends` it changes is not in it.
    """

    sources: tuple[Sentence, ...] = Field(
        min_length=1,
        description="Pages and files that the figures are from: addresses, or repository and path",
    )
    as_of: date = Field(description="When they were read, as 2026-11-28")
    tried: date | None = Field(
        None, description="When a run of this profile trained there; absent: not tried there"
    )
    assumed: tuple[str, ...] = Field(
        (),
        description="Fields that no source has, such as `nodes.prefix`, or sections of them: "
        "compare them with the cluster (`hpctrain profile check`)",
    )
    expressed: tuple[Sentence, ...] = Field(
        (), description="What scripts of this site use, and jobs of this profile have"
    )
    refused: tuple[Sentence, ...] = Field(
        (), description="What they use, and hpctrain does otherwise, with the reason"
    )
    missing: tuple[Sentence, ...] = Field((), description="What they use, and no field expresses")

    @field_validator("assumed")
    @classmethod
    def _assumed_fields_exist(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not has_field(ClusterProfile, path):
                raise ValueError(f"`{path}` is no field of a profile")
        return paths


class ClusterProfile(Document):
    """A cluster: hardware, Slurm, software, rules."""

    extends: str | None = Field(
        None,
        description="Name or file of a profile whose values count where this file has none. Lists "
        "of things with a `name` are joined by it, `null` removes a value, and `remove: true` "
        "beside the name such a thing",
    )
    name: Name = Field(description="Name for `--profile`")
    description: str = Field("", description="One line for `hpctrain profiles`")
    site: SiteFacts | None = Field(
        None, description="Absent: nothing is said about where the values are from"
    )
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
    run_access: Literal["private", "group", "group-control"] = Field(
        "private",
        description="Who may read run directories: their user (private), or also the group of the "
        "directory of runs, such as a project's (group). With group-control its members may save, "
        "stop and hold the runs, too",
    )
    speed_check: Literal["off", "report", "exclude"] | None = Field(
        None,
        description="What `supervise.speed_check.mode: auto` means here; absent: report, or off "
        "where GPUs are emulated. `locked: [supervise.speed_check.mode]` forces it",
    )
    notify: NotifySpec | None = Field(
        None, description="Whom runs tell about their events when a spec does not say otherwise"
    )
    metrics: MetricsProfile = MetricsProfile()
    limits: LimitsProfile = LimitsProfile()
    prices: PriceProfile | None = Field(None, description="Absent: no costs are printed")
    reliability: ReliabilityProfile | None = Field(
        None, description="Absent: the forecast assumes published failure rates and says so"
    )
    calibration: str | SiteCalibration | None = Field(
        None,
        description="Measured rates of this cluster, which the planner takes in place of published "
        "ones: a file of `hpctrain calibrate`, relative to this one, or its content; absent: "
        "NAME.calibration.yaml beside the profile NAME, if there is one",
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
        network = info.data.get("network")
        if network is None:
            return slurm
        # sbatch(1), --constraint: one set of brackets for each job, and islands need it
        features = any(island.feature for island in network.islands)
        if features and set(slurm.constraint or "") & set("[]()|*"):
            raise ValueError(
                f"constraint `{slurm.constraint}` cannot be joined with the features of "
                "network.islands: use names joined by `&` only"
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
            if interface is None or variable.value is None:
                continue
            if variable.name not in INTERFACE_VARIABLES:
                continue
            # NCCL: `=eth0` is exact, `eth` is a prefix, `^docker0` excludes
            names = variable.value.lstrip("=").split(",")
            # the field's too, but one with a number is a whole name
            selected = any(
                name and (own.startswith(name) or (own[-1].isalpha() and name.startswith(own)))
                for name in names
                for own in interface.lstrip("=").split(",")
            )
            if not selected and not variable.value.startswith("^"):
                raise Contradiction(
                    ("environment", number, "value"),
                    f"{variable.name} is {variable.value}, but network.interface is {interface}",
                    f"remove one of the two; `interface` alone sets {variable.name}",
                )
        return environment

    @field_validator("continuation")
    @classmethod
    def _options_say_the_same(cls, mode: Continuation, info: ValidationInfo) -> Continuation:
        slurm = info.data.get("slurm")
        if slurm is not None and mode == "requeue" and "open-mode" in slurm.directives.omit:
            raise Contradiction(
                ("slurm", "directives", "omit", slurm.directives.omit.index("open-mode")),
                "--open-mode cannot be left out with `continuation: requeue`",
                "a requeued job would overwrite its log: another `continuation`, such as chain",
            )
        contrary = "no-requeue" if mode == "requeue" else "requeue"
        if slurm is not None and contrary in slurm.options.sbatch:
            raise Contradiction(
                ("slurm", "options", "sbatch", contrary),
                f"sbatch --{contrary}: `continuation` is {mode}",
                "`continuation: requeue` asks for `--requeue`, every other one for `--no-requeue`",
            )
        return mode

    @field_validator("locked")
    @classmethod
    def _locked_fields_exist(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not has_field(RunSpec, path):
                raise ValueError(f"`{path}` is no field of a run spec")
        return paths

    def for_partition(self, name: str | None) -> ClusterProfile:
        """Return the profile of a job in one partition: its own parts in place of the cluster's.

        None is the default partition. The result is the same again for that partition, and the
        profile itself where there is no partition of that name. Islands are all nodes of the
        cluster: a partition with nodes of its own has only those of its own `network`.
        """
        partition = self.slurm.partition(name)
        if partition is None:
            return self
        parts = ("nodes", "gpu", "nvlink", "network", "prices", "reliability")
        own = {part: getattr(partition, part) for part in parts}
        changes = {part: value for part, value in own.items() if value is not None}
        if partition.nodes is not None and partition.network is None and self.network.islands:
            changes["network"] = self.network.model_copy(update={"islands": ()})
        options = {name: getattr(partition, name) for name in ("account", "qos", "constraint")}
        given = {name: value or None for name, value in options.items() if value is not None}
        if any(getattr(self.slurm, name) != value for name, value in given.items()):
            changes["slurm"] = self.slurm.model_copy(update=given)
        if partition.environment:
            named = {variable.name: variable for variable in self.environment}
            named |= {variable.name: variable for variable in partition.environment}
            changes["environment"] = tuple(named.values())
        return self.model_copy(update=changes) if changes else self

    def filesystem_of(self, path: PurePath) -> FilesystemProfile | None:
        """Find the shared file system that an absolute path lies on: the longest mount wins."""
        above = [
            one for one in self.filesystems if one.kind != "local" and path.is_relative_to(one.path)
        ]
        return max(above, key=lambda one: len(one.path), default=None)

    @property
    def cpus_for_tasks(self) -> int:
        """CPUs of a node that its tasks can have: cores, where options leave one thread of each.

        sbatch(1), --threads-per-core: only such threads are counted then. Seen on 22.05.8: 4 tasks
        with 4 CPUs on 8 cores with 2 threads are refused with it, and run without.
        """
        threads = self.nodes.threads_per_core or 1
        return self.nodes.cpus // threads * self._threads_used[1]

    def allocated_cpus(self, cpus: int) -> int:
        """Return what sbatch has to ask for, so that steps can have so many CPUs.

        An option of srun alone leaves threads out that the job has all the same.
        """
        of_job, of_step = self._threads_used
        return -(-cpus * of_job // of_step)

    @property
    def _threads_used(self) -> tuple[int, int]:
        """Threads of each core that count for the job and for its steps, which inherit options."""
        every, found = self.nodes.threads_per_core or 1, self.restrictions
        of_job = min([every, *(threads for path, threads in found if ".sbatch." in path)])
        return of_job, min([of_job, *(threads for _, threads in found)])

    @property
    def restrictions(self) -> tuple[tuple[str, int], ...]:
        """Where the site leaves only some threads of each core: path, and how many."""
        given = {one.name: one.value for one in self.environment}
        names = {"hint": "SLURM_HINT", "threads-per-core": "SLURM_THREADS_PER_CORE"}
        places: dict[str, Mapping[str, object]] = {
            "slurm.options.sbatch": self.slurm.options.sbatch,
            "slurm.options.srun": self.slurm.options.srun,
            "environment": {option: given.get(name) for option, name in names.items()},
        }
        found = [(place, restricting_option(options)) for place, options in places.items()]
        return tuple((f"{place}.{one[0]}", one[1]) for place, one in found if one is not None)

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


def profile_remarks(profile: ClusterProfile) -> tuple[tuple[str, str], ...]:
    """List what is to be known of a profile before it is used, each with the path of its value."""
    left_out = [
        (path, f"`{path}` is left out: {reason}")
        for path, reason in left_out_options(profile.slurm.options)
    ]
    if profile.nodes.threads_per_core is None and profile.restrictions:
        path, threads = profile.restrictions[0]
        cpus = profile.nodes.cpus
        left_out.append(
            (
                path,
                f"`{path}` leaves {threads} thread of each core, and `nodes.threads_per_core` is "
                f"absent: the {cpus} of `nodes.cpus` are taken as cores. Where they are threads "
                "jobs ask for more than there is, and are refused or wait for ever",
            )
        )
    return tuple(left_out)


def has_field(document: type[BaseModel], path: str) -> bool:
    """Whether a dotted path such as `resources.qos` names a field of a document class."""
    part, _, rest = path.partition(".")
    for name, field in document.model_fields.items():
        if part == (field.alias or name):
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind]
            sections = [k for k in inner if isinstance(k, type) and issubclass(k, BaseModel)]
            return not rest or any(has_field(section, rest) for section in sections)
    return False
