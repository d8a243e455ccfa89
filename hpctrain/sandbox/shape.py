"""The shape of a sandbox: nodes, GPUs, partitions, switches, and checks of their consistency.

Pure. Does not belong here: the text of slurm.conf (see `config`), paths (see `paths`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.base.errors import UsageError
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile

# With more slurmds on one machine, replies exceed Slurm's timeouts.
MAX_NODES = 1024


@dataclass(frozen=True)
class PartitionShape:
    """One partition; `max_walltime_seconds=None` is no limit, `nodes` is a Slurm node list."""

    name: str
    priority_tier: int = 1
    preempt_mode: Literal["OFF", "REQUEUE", "CANCEL"] = "OFF"
    grace_seconds: int = 0
    max_walltime_seconds: int | None = None
    default: bool = False
    nodes: str = "ALL"


@dataclass(frozen=True)
class SwitchShape:
    """One switch of a tree: a leaf names its nodes, a spine names the switches below it."""

    name: str
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class AlikeNodes:
    """A number of consecutive nodes that are alike; `first` is counted over all of a sandbox."""

    nodes: int
    prefix: str
    cpus: int
    threads_per_core: int
    memory_mib: int
    gpu_type: str
    gpus: int
    features: tuple[str, ...] = ()
    first: int = 0

    def names(self, most: int | None = None) -> str:
        """Return its nodes, or the first `most` of them, as a Slurm node list."""
        return self.prefix + bracket(self.first, min(self.nodes, most or self.nodes))


@dataclass(frozen=True)
class SiteShape:
    """What jobs and logins of a site find besides Slurm, and the sandbox stands in for.

    `modules` can be loaded; None: there is no module system. `launchers` start containers.
    `variables` are those of a login, each with a directory of its own; `directories` are those of
    the site's file systems.
    """

    modules: tuple[str, ...] | None = None
    launchers: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()


@dataclass(frozen=True)
class SandboxShape:
    """A whole sandbox. CPUs and memory may exceed those of this machine.

    `user_signal_on_preempt` makes a preemption send the job's own `--signal` at the start of the
    grace period. `groups` cover all nodes in order; without any, all nodes are alike. With
    `process_tracking: pgid` signals reach the tasks of a step but not children in sessions of
    their own, as with proctrack/cgroup; linuxproc reaches both. `accounting`: a text file of ended
    jobs, or a database with slurmdbd, associations and limits. `cluster_name` is Slurm's
    ClusterName, which must differ between sandboxes that share a file system. `binds_tasks`:
    task/affinity binds tasks to CPUs, which this machine must have (HWLOC_SYNTHETIC makes slurmd
    find more, and its tasks then fail). `leaves_are_blocks`: those of `switches` become blocks of
    topology/block where Slurm has it (23.11), else the tree. `topology_yaml`: they stand in
    topology.yaml where Slurm reads that (25.05), else in topology.conf. `accounts` and `qos` are
    those of a database; without one any account and QOS is accepted. `reserved_as` names a
    reservation of all nodes. `job_submit_lua` is the text of the plug-in's script.
    Raises UsageError when the parts are inconsistent.
    """

    nodes: int
    gpus_per_node: int
    gpu_type: str
    cpus_per_node: int
    memory_mib: int
    partitions: tuple[PartitionShape, ...]
    switches: tuple[SwitchShape, ...] = ()
    leaves_are_blocks: bool = False
    topology_yaml: bool = False
    preempt_type: Literal["partition_prio", "none"] = "partition_prio"
    user_signal_on_preempt: bool = False
    kill_wait_seconds: int = 5
    slurmd_timeout_seconds: int = 10
    requeue: bool = True
    accounting: Literal["none", "filetxt", "slurmdbd"] = "none"
    process_tracking: Literal["linuxproc", "pgid"] = "linuxproc"
    node_prefix: str = "n"
    groups: tuple[AlikeNodes, ...] = ()
    cluster_name: str = "sandbox"
    sockets_per_node: int = 1
    threads_per_core: int = 1
    binds_tasks: bool = False
    licenses: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    reserved_as: str | None = None
    job_submit_lua: str = ""
    site: SiteShape = SiteShape()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"a sandbox has 1 to {MAX_NODES} nodes, not {self.nodes}")
        if self.gpus_per_node < 0 or self.cpus_per_node < 1 or self.memory_mib < 1:
            message = "a node of a sandbox needs a CPU, memory, and no negative number of GPUs"
            raise UsageError(message)
        for group in self.node_groups:
            parts = self.sockets_per_node * group.threads_per_core
            if min(self.sockets_per_node, group.threads_per_core) < 1 or group.cpus % parts:
                raise UsageError(
                    f"{group.cpus} CPUs of a node do not divide into {self.sockets_per_node} "
                    f"sockets of cores with {group.threads_per_core} threads"
                )
        if sum(group.nodes for group in self.node_groups) != self.nodes:
            raise UsageError("the groups of a sandbox must be those of all its nodes")
        if self.preempt_type == "none" and self.user_signal_on_preempt:
            raise UsageError("a sandbox without preemption cannot signal it")
        # slurm.conf(5): Slurm lower-cases the name.
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.cluster_name):
            raise UsageError(
                f"`{self.cluster_name}` is not a name of a cluster: lower-case letters, digits, "
                "- and _"
            )
        _refuse_duplicates("partition", (partition.name for partition in self.partitions))
        if sum(partition.default for partition in self.partitions) != 1:
            raise UsageError("exactly one partition of a sandbox is the default one")
        switches = self.switches
        _refuse_duplicates("switch", (switch.name for switch in switches))
        known = set(self.node_names) | {switch.name for switch in switches}
        for switch in switches:
            below = switch.nodes + switch.switches
            if bool(switch.nodes) == bool(switch.switches):
                raise UsageError(f"switch {switch.name} needs either nodes or switches below it")
            if unknown := [name for name in below if name not in known]:
                raise UsageError(f"switch {switch.name} leads to unknown {', '.join(unknown)}")
        if switches:
            leaves = [name for switch in switches for name in switch.nodes]
            _refuse_duplicates("node below two switches:", leaves)
            if missing := sorted(set(self.node_names) - set(leaves)):
                raise UsageError(f"no switch leads to {', '.join(missing)}")

    @property
    def usual_nodes(self) -> AlikeNodes:
        """All nodes of a sandbox without groups."""
        return AlikeNodes(
            self.nodes,
            self.node_prefix,
            self.cpus_per_node,
            self.threads_per_core,
            self.memory_mib,
            self.gpu_type,
            self.gpus_per_node,
        )

    @property
    def node_groups(self) -> tuple[AlikeNodes, ...]:
        """All groups in their order, at least one."""
        found: list[AlikeNodes] = []
        for group in self.groups or (self.usual_nodes,):
            found.append(replace(group, first=sum(one.nodes for one in found)))
        return tuple(found)

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes: n0, n1, ..."""
        return tuple(
            f"{group.prefix}{group.first + index}"
            for group in self.node_groups
            for index in range(group.nodes)
        )

    @property
    def node_range(self) -> str:
        """All nodes as a Slurm node list: `n[0-3]`, or `n0` for a single node."""
        prefixes = {group.prefix for group in self.node_groups}
        if len(prefixes) == 1:
            return prefixes.pop() + bracket(0, self.nodes)
        return ",".join(group.names() for group in self.node_groups)


def default_shape(
    nodes: int = 4,
    gpus_per_node: int = 2,
    *,
    grace_seconds: int = 20,
    user_signal_on_preempt: bool = False,
) -> SandboxShape:
    """Describe a small cluster: jobs of `urgent` preempt those of the default partition `train`."""
    return SandboxShape(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_type="a100",
        cpus_per_node=8,
        memory_mib=16000,
        partitions=(
            PartitionShape(
                "train", preempt_mode="REQUEUE", grace_seconds=grace_seconds, default=True
            ),
            PartitionShape("urgent", priority_tier=10),
        ),
        user_signal_on_preempt=user_signal_on_preempt,
    )


def bracket(first: int, count: int) -> str:
    """Format `count` consecutive numbers as Slurm does: `[3-5]`, or `3` for one number."""
    return f"[{first}-{first + count - 1}]" if count > 1 else str(first)


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{what} {twice[0]} occurs twice")


# ----------------------------------------------------------------------------------------------
# Derive a sandbox's shape from a cluster profile, so that its jobs can be started locally.
# Everything that Slurm schedules by is copied: nodes, CPUs, threads, memory, GRES, features,
# partitions, limits, preemption, switches, licences, a reservation; accounts and QOS of a database.
# Hardware that a single machine lacks (GPUs, NVLink, InfiniBand) is left out. Pure.


# sbatch(1), --constraint: names joined by these, and counts such as `*4`.
_CONSTRAINT_MARKS = re.compile(r"\*\d+|[&|,()\[\]]")
_LICENSES_OF_A_NAME = 1000


def shape_from_profile(profile: ClusterProfile, nodes: int | None = None) -> SandboxShape:
    """Copy the profile's nodes, islands, partitions and switches.

    `nodes`: at most so many of each kind of nodes. Raises UsageError for more than 1024 nodes.
    """
    slurm = profile.slurm
    preemption = any(partition.preemption.mode != "off" for partition in slurm.partitions)
    groups, lists = _groups(profile, nodes)
    partitions = [_partition(one, lists[one.name]) for one in slurm.partitions]
    if slurm.data_partition is not None and slurm.data_partition not in lists:
        partitions.append(PartitionShape(slurm.data_partition))
    sections = [slurm, *(profile.for_partition(one.name).slurm for one in slurm.partitions)]
    accounts = [*(section.account for section in sections), *profile.limits.accounts]
    qos = [*(section.qos for section in sections), *profile.limits.qos]
    shape = SandboxShape(
        nodes=sum(group.nodes for group in groups),
        gpus_per_node=profile.gpu.per_node,
        gpu_type=profile.gpu.gres_type,
        cpus_per_node=profile.nodes.cpus,
        threads_per_core=profile.nodes.threads_per_core or 1,
        memory_mib=int(profile.nodes.memory) // 2**20,
        partitions=tuple(partitions),
        switches=_switches(profile, groups),
        leaves_are_blocks=profile.network.switches.plugin == "block",
        preempt_type="partition_prio" if preemption else "none",
        user_signal_on_preempt=any(p.preemption.user_signal for p in slurm.partitions),
        kill_wait_seconds=round(float(slurm.kill_wait)),
        requeue=profile.continuation == "requeue",
        node_prefix=profile.nodes.prefix,
        licenses=_licenses(profile),
        accounts=tuple(dict.fromkeys(name for name in accounts if name)),
        qos=tuple(dict.fromkeys(name for name in qos if name)),
        reserved_as=slurm.reservation,
        site=_site(profile),
    )
    return shape if groups == (shape.usual_nodes,) else replace(shape, groups=groups)


def island_sizes(profile: ClusterProfile, nodes: int | None = None) -> tuple[int, ...]:
    """Cut the profile's islands to `nodes` in all, each to one node at least.

    None are left where there are fewer nodes than islands.
    """
    islands = profile.network.islands
    count = profile.nodes.count if nodes is None else min(nodes, profile.nodes.count)
    if not islands or count < len(islands):
        return ()
    sizes = [max(1, island.nodes * count // profile.nodes.count) for island in islands]
    while sum(sizes) > count:
        sizes[sizes.index(max(sizes))] -= 1
    for index in range(count - sum(sizes)):
        sizes[index % len(sizes)] += 1
    return tuple(sizes)


def _groups(
    profile: ClusterProfile, most: int | None
) -> tuple[tuple[AlikeNodes, ...], dict[str, str]]:
    """Put the nodes of partitions into groups that are alike, and list those of each partition."""
    kinds: dict[AlikeNodes, list[tuple[str, ClusterProfile]]] = {}
    for partition in profile.slurm.partitions:
        own = profile.for_partition(partition.name)
        kinds.setdefault(_kind(own), []).append((partition.name, own))
    groups: list[AlikeNodes] = []
    lists: dict[str, str] = {}
    for kind, partitions in kinds.items():
        counts = {name: min(own.nodes.count, most or MAX_NODES + 1) for name, own in partitions}
        asked = [own.slurm.constraint or "" for _, own in partitions]
        features = dict.fromkeys(name for text in asked for name in _CONSTRAINT_MARKS.split(text))
        whole = replace(
            kind,
            nodes=max(counts.values()),
            features=tuple(name for name in features if name),
            first=sum(group.nodes for group in groups),
        )
        for name, count in counts.items():
            all_nodes = len(kinds) == 1 and count == whole.nodes
            lists[name] = "ALL" if all_nodes else whole.names(count)
        whole = replace(whole, first=0)
        sizes = island_sizes(profile, most)
        if kind != _kind(profile) or sum(sizes) != whole.nodes:
            groups.append(whole)
            continue
        for island, size in zip(profile.network.islands, sizes, strict=True):
            own_feature = () if island.feature is None else (island.feature,)
            groups.append(replace(whole, nodes=size, features=(*whole.features, *own_feature)))
    return tuple(groups), lists


def _kind(profile: ClusterProfile) -> AlikeNodes:
    """Describe what is alike on nodes of one kind, but not how many there are."""
    nodes, gpu = profile.nodes, profile.gpu
    threads, memory_mib = nodes.threads_per_core or 1, int(nodes.memory) // 2**20
    return AlikeNodes(0, nodes.prefix, nodes.cpus, threads, memory_mib, gpu.gres_type, gpu.per_node)


def _licenses(profile: ClusterProfile) -> tuple[str, ...]:
    """Name the licences that every job asks for, and give the sandbox enough of them."""
    given = profile.slurm.options.sbatch.get("licenses", ())
    texts = given if isinstance(given, tuple) else (given,)
    names = [re.split(r"[:@=]", one)[0] for text in texts for one in re.split("[,;|]", str(text))]
    return tuple(f"{name}:{_LICENSES_OF_A_NAME}" for name in dict.fromkeys(names) if name)


def _site(profile: ClusterProfile) -> SiteShape:
    software = profile.software
    container = software.container
    launcher = container.launcher if container is not None else None
    return SiteShape(
        modules=software.modules.load if software.modules is not None else None,
        launchers=(launcher,) if launcher in ("apptainer", "singularity") else (),
        variables=inherited_variables(profile),
        directories=tuple(one.name for one in profile.filesystems),
    )


def inherited_variables(profile: ClusterProfile) -> tuple[str, ...]:
    """List the variables that jobs inherit by name; a pattern names none."""
    return tuple(name for name in profile.slurm.inherit if "*" not in name)


def _partition(partition: PartitionProfile, nodes: str) -> PartitionShape:
    modes: dict[str, Literal["OFF", "REQUEUE", "CANCEL"]] = {
        "off": "OFF",
        "requeue": "REQUEUE",
        "cancel": "CANCEL",
    }
    limit = partition.max_walltime
    return PartitionShape(
        name=partition.name,
        priority_tier=partition.priority_tier,
        preempt_mode=modes[partition.preemption.mode],
        grace_seconds=round(float(partition.preemption.grace)),
        max_walltime_seconds=None if limit is None else round(float(limit)),
        default=partition.default,
        nodes=nodes,
    )


def _switches(profile: ClusterProfile, groups: tuple[AlikeNodes, ...]) -> tuple[SwitchShape, ...]:
    """Build leaves of `nodes_per_leaf` nodes under one spine."""
    size = profile.network.switches.nodes_per_leaf
    if size is None:
        return ()
    prefixes = [group.prefix for group in groups for _ in range(group.nodes)]
    names = [f"{prefix}{index}" for index, prefix in enumerate(prefixes)]
    leaves = [
        SwitchShape(f"leaf{number}", nodes=tuple(names[start : start + size]))
        for number, start in enumerate(range(0, len(names), size))
    ]
    spine = SwitchShape("spine", switches=tuple(leaf.name for leaf in leaves))
    return (*leaves, spine)
