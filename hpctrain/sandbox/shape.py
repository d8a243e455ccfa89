"""What a sandbox looks like: nodes, GPUs, partitions, switches.

Belongs here: frozen descriptions and the checks that they make sense. Pure. Does not belong here:
the words of slurm.conf (see `config`), or where the sandbox lies (see `paths`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import UsageError

# More slurmds than this on one machine answer too late for each other's time-outs.
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
    """So many consecutive nodes with one Slurm feature."""

    name: str
    nodes: int


@dataclass(frozen=True)
class SandboxShape:
    """A whole sandbox; all nodes are alike. CPUs and memory may exceed those of this machine.

    `user_signal_on_preempt` makes a preemption send the job's own `--signal` at the start of the
    grace period. `features` are of all nodes, in their order. With `process_tracking: pgid` signals
    reach the tasks of a step and not what these have started in sessions of their own, as with
    proctrack/cgroup; linuxproc also finds these. `cluster_name` is Slurm's ClusterName: two
    sandboxes that share a file system need two. Raises UsageError when the parts do not fit
    together.
    """

    nodes: int
    gpus_per_node: int
    gpu_type: str
    cpus_per_node: int
    memory_mib: int
    partitions: tuple[PartitionShape, ...]
    switches: tuple[SwitchShape, ...] = ()
    preempt_type: Literal["partition_prio", "none"] = "partition_prio"
    user_signal_on_preempt: bool = False
    kill_wait_seconds: int = 5
    slurmd_timeout_seconds: int = 10
    requeue: bool = True
    accounting: Literal["none", "filetxt"] = "none"
    process_tracking: Literal["linuxproc", "pgid"] = "linuxproc"
    node_prefix: str = "n"
    features: tuple[FeatureShape, ...] = ()
    cluster_name: str = "sandbox"

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_cluster_name(self.cluster_name)
        _check_partitions(self.partitions)
        _check_switches(self.switches, self.node_names)

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes: n0, n1, ..."""
        return tuple(f"{self.node_prefix}{index}" for index in range(self.nodes))

    @property
    def node_range(self) -> str:
        """All nodes in the short form of Slurm: `n[0-3]`, or `n0` for a single node."""
        return self.node_prefix + bracket(0, self.nodes)


def default_shape(
    nodes: int = 4,
    gpus_per_node: int = 2,
    *,
    grace_seconds: int = 20,
    user_signal_on_preempt: bool = False,
) -> SandboxShape:
    """A small cluster: jobs of `urgent` preempt those of the default partition `train`."""
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
    """`count` consecutive numbers as Slurm writes them: `[3-5]`, or `3` when it is one."""
    return f"[{first}-{first + count - 1}]" if count > 1 else str(first)


def _check_numbers(shape: SandboxShape) -> None:
    if not 1 <= shape.nodes <= MAX_NODES:
        raise UsageError(f"a sandbox has 1 to {MAX_NODES} nodes, not {shape.nodes}")
    if shape.gpus_per_node < 0 or shape.cpus_per_node < 1 or shape.memory_mib < 1:
        raise UsageError("a node of a sandbox needs a CPU, memory, and no negative number of GPUs")
    if shape.features and sum(feature.nodes for feature in shape.features) != shape.nodes:
        raise UsageError("the features of a sandbox must be those of all its nodes")
    if shape.preempt_type == "none" and shape.user_signal_on_preempt:
        raise UsageError("a sandbox without preemption cannot signal it")


def _check_cluster_name(name: str) -> None:
    # slurm.conf(5): Slurm writes the name in lower case, whatever the file says.
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise UsageError(f"`{name}` is no name of a cluster: lower-case letters, digits, - and _")


def _check_partitions(partitions: tuple[PartitionShape, ...]) -> None:
    _refuse_duplicates("partition", (partition.name for partition in partitions))
    if sum(partition.default for partition in partitions) != 1:
        raise UsageError("exactly one partition of a sandbox is the default one")


def _check_switches(switches: tuple[SwitchShape, ...], node_names: tuple[str, ...]) -> None:
    _refuse_duplicates("switch", (switch.name for switch in switches))
    known = set(node_names) | {switch.name for switch in switches}
    for switch in switches:
        below = switch.nodes + switch.switches
        if bool(switch.nodes) == bool(switch.switches):
            raise UsageError(f"switch {switch.name} needs either nodes or switches below it")
        if unknown := [name for name in below if name not in known]:
            raise UsageError(f"switch {switch.name} leads to unknown {', '.join(unknown)}")
    if switches:
        leaves = [name for switch in switches for name in switch.nodes]
        _refuse_duplicates("node below two switches:", leaves)
        if missing := sorted(set(node_names) - set(leaves)):
            raise UsageError(f"no switch leads to {', '.join(missing)}")


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{what} {twice[0]} occurs twice")
