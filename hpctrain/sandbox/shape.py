"""The shape of a sandbox: nodes, GPUs, partitions, switches, and checks of their consistency.

Pure. Does not belong here: the text of slurm.conf (see `config`), paths (see `paths`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
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
class FeatureShape:
    """A number of consecutive nodes with one Slurm feature."""

    name: str
    nodes: int


@dataclass(frozen=True)
class SandboxShape:
    """A whole sandbox; all nodes are alike. CPUs and memory may exceed those of this machine.

    `user_signal_on_preempt` makes a preemption send the job's own `--signal` at the start of the
    grace period. `features` cover all nodes in order. With `process_tracking: pgid` signals reach
    the tasks of a step but not children in sessions of their own, as with proctrack/cgroup;
    linuxproc reaches both. `accounting`: a text file of ended jobs, or a database with slurmdbd,
    associations and limits. `cluster_name` is Slurm's ClusterName, which must differ between
    sandboxes that share a file system. `binds_tasks`: task/affinity binds tasks to CPUs,
    which this machine must have (HWLOC_SYNTHETIC makes slurmd find more, and its tasks then fail).
    `leaves_are_blocks`: those of `switches` become blocks of topology/block where Slurm has it
    (23.11), else the tree. `topology_yaml`: they stand in topology.yaml where Slurm reads that
    (25.05), else in topology.conf.
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
    features: tuple[FeatureShape, ...] = ()
    cluster_name: str = "sandbox"
    sockets_per_node: int = 1
    threads_per_core: int = 1
    binds_tasks: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"a sandbox has 1 to {MAX_NODES} nodes, not {self.nodes}")
        if self.gpus_per_node < 0 or self.cpus_per_node < 1 or self.memory_mib < 1:
            message = "a node of a sandbox needs a CPU, memory, and no negative number of GPUs"
            raise UsageError(message)
        parts = self.sockets_per_node * self.threads_per_core
        if min(self.sockets_per_node, self.threads_per_core) < 1 or self.cpus_per_node % parts:
            raise UsageError(
                f"{self.cpus_per_node} CPUs of a node do not divide into {self.sockets_per_node} "
                f"sockets of cores with {self.threads_per_core} threads"
            )
        if self.features and sum(feature.nodes for feature in self.features) != self.nodes:
            raise UsageError("the features of a sandbox must be those of all its nodes")
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
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes: n0, n1, ..."""
        return tuple(f"{self.node_prefix}{index}" for index in range(self.nodes))

    @property
    def node_range(self) -> str:
        """All nodes as a Slurm node list: `n[0-3]`, or `n0` for a single node."""
        return self.node_prefix + bracket(0, self.nodes)


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
# Derive a sandbox's shape from a cluster profile, so that its scripts can be checked locally.
# Everything that Slurm schedules by is copied: nodes, CPUs, memory, GRES, partitions, limits,
# preemption, switches. Hardware that a single machine lacks (GPUs, NVLink, InfiniBand) is left out.
# Pure.


def shape_from_profile(profile: ClusterProfile) -> SandboxShape:
    """Copy the profile's nodes, islands, partitions and switches.

    Raises UsageError for more than 1024 nodes.
    """
    partitions = profile.slurm.partitions
    # Scripts request the features of islands; either all islands have one or none has.
    features = tuple(
        FeatureShape(island.feature, island.nodes)
        for island in profile.network.islands
        if island.feature is not None
    )
    preemption = any(partition.preemption.mode != "off" for partition in partitions)
    return SandboxShape(
        nodes=profile.nodes.count,
        gpus_per_node=profile.gpu.per_node,
        gpu_type=profile.gpu.gres_type,
        cpus_per_node=profile.nodes.cpus,
        threads_per_core=profile.nodes.threads_per_core or 1,
        memory_mib=int(profile.nodes.memory) // 2**20,
        partitions=tuple(_partition(partition) for partition in partitions),
        switches=_switches(profile),
        leaves_are_blocks=profile.network.switches.plugin == "block",
        preempt_type="partition_prio" if preemption else "none",
        user_signal_on_preempt=any(p.preemption.user_signal for p in partitions),
        kill_wait_seconds=round(float(profile.slurm.kill_wait)),
        requeue=profile.continuation == "requeue",
        node_prefix=profile.nodes.prefix,
        features=features,
    )


def _partition(partition: PartitionProfile) -> PartitionShape:
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
    )


def _switches(profile: ClusterProfile) -> tuple[SwitchShape, ...]:
    """Build leaves of `nodes_per_leaf` nodes under one spine."""
    size = profile.network.switches.nodes_per_leaf
    if size is None:
        return ()
    names = [f"{profile.nodes.prefix}{index}" for index in range(profile.nodes.count)]
    groups = [tuple(names[start : start + size]) for start in range(0, len(names), size)]
    leaves = [SwitchShape(f"leaf{number}", nodes=group) for number, group in enumerate(groups)]
    spine = SwitchShape("spine", switches=tuple(leaf.name for leaf in leaves))
    return (*leaves, spine)
