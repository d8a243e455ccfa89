"""Records of what a Slurm says about its cluster: nodes, partitions, topology, rights of a user.

Belongs here: typed values without Slurm's spelling. Does not belong here: records of jobs (see
`records`), reading the commands (see `cluster_queries`), judging (`site`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpctrain.slurm.records import SlurmConfig

PreemptionMode = Literal["off", "requeue", "cancel", "suspend"]


# `1g.10gb`, `a100_3g.20gb`, `nvidia_h100_80gb_hbm3_1g.10gb`, `2g.12gb+me`: what Slurm's AutoDetect
# and sites call slices of a GPU (NVIDIA's MIG user guide, "Supported MIG Profiles").
_SLICE = re.compile(r"(?i)(?:(.+)[_-])?(\d)g\.?(\d+)gb(?:[+.-].*)?")


@dataclass(frozen=True)
class GpuSlice:
    """A slice of a GPU (MIG): `gpu` is "" where the type does not name it."""

    gpu: str
    sevenths: int
    gigabytes: int


def gpu_slice(kind: str) -> GpuSlice | None:
    """Read a type of Gres that is a slice of a GPU; None for a whole one."""
    found = _SLICE.fullmatch(kind)
    return GpuSlice(found[1] or "", int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True)
class NodeFacts:
    """One node; `gpus` are (type, count), the type "" where Gres names none, slices among them.

    `reserved_mib` is MemSpecLimit, which no job gets. `state` is scontrol's in lower case, such
    as `idle+drain` or `down*`. `threads_per_core`: how many of `cpus` share a core.
    """

    name: str
    address: str = ""
    arch: str = ""
    cpus: int = 0
    threads_per_core: int = 1
    memory_mib: int = 0
    reserved_mib: int = 0
    gpus: tuple[tuple[str, int], ...] = ()
    features: frozenset[str] = frozenset()
    partitions: tuple[str, ...] = ()
    state: str = ""

    @property
    def whole_gpus(self) -> tuple[tuple[str, int], ...]:
        return tuple(pair for pair in self.gpus if gpu_slice(pair[0]) is None)

    @property
    def slices(self) -> tuple[tuple[str, int], ...]:
        return tuple(pair for pair in self.gpus if gpu_slice(pair[0]) is not None)

    @property
    def gpu_count(self) -> int:
        return sum(count for _, count in self.whole_gpus)

    @property
    def job_memory_mib(self) -> int:
        """Memory that jobs may have: slurm.conf(5), RealMemory minus MemSpecLimit."""
        return self.memory_mib - self.reserved_mib

    @property
    def is_out_of_service(self) -> bool:
        """True if no job starts on it: down, drained, failed, reserved for maintenance."""
        return any(word in self.state for word in ("down", "drain", "fail", "maint", "error"))


@dataclass(frozen=True)
class PartitionFacts:
    """One partition; None is no limit, and an empty list of names allows everybody.

    `submit_hosts` are the nodes whose users may submit to it (AllocNodes); empty: all.
    """

    name: str
    default: bool = False
    is_up: bool = True
    hidden: bool = False
    max_seconds: float | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    preemption: PreemptionMode = "off"
    grace_seconds: int = 0
    priority_tier: int = 1
    whole_nodes: bool = False
    reservation_only: bool = False
    root_only: bool = False
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] = ()
    submit_hosts: tuple[str, ...] = ()
    qos: str | None = None


@dataclass(frozen=True)
class Leaf:
    """A leaf switch or a block, and the nodes below it."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Association:
    """What the user may charge: an account, and there a partition (None: all) and QOS."""

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    max_seconds: float | None = None
    limits: Mapping[str, str] = field(default_factory=dict)


def tres_counts(text: str) -> dict[str, int]:
    """Parse resources with their numbers: `node=4,gres/gpu=8,mem=1000G`, memory in MiB."""
    found = {}
    for entry in filter(None, text.split(",")):
        name, _, value = entry.rpartition("=")
        match = re.fullmatch(r"(\d+)(?:\.\d+)?([KMGTP]?)", value)
        if name and match:
            power = "MGTP".find(match[2]) if match[2] else 0
            found[name] = int(match[1]) * 1024**power if power >= 0 else int(match[1]) // 1024
    return found


@dataclass(frozen=True)
class Qos:
    """A quality of service; `limits` holds what sacctmgr prints, by its own names.

    `flags` are in lower case, such as `overpartqos` (sacctmgr(1)).
    """

    name: str
    preempts: tuple[str, ...] = ()
    preemption: PreemptionMode | None = None
    grace_seconds: int = 0
    max_seconds: float | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Accounting:
    """The rights of one user in the accounting database."""

    default_account: str | None
    associations: tuple[Association, ...]
    qos: tuple[Qos, ...] = ()

    @property
    def accounts(self) -> tuple[str, ...]:
        """Accounts of the user, the default one first."""
        names = dict.fromkeys(one.account for one in self.associations)
        first = [self.default_account] if self.default_account in names else []
        return tuple(dict.fromkeys([*(name for name in first if name), *names]))


@dataclass(frozen=True)
class License:
    """A license that jobs may ask for (`--licenses`)."""

    name: str
    total: int


@dataclass(frozen=True)
class Reservation:
    """Nodes that are set aside for some time, in seconds since the epoch; None is unknown."""

    name: str
    start_time: float | None
    end_time: float | None
    node_count: int
    is_maintenance: bool
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


TopologyKind = Literal["none", "tree", "block", "other"]


@dataclass(frozen=True)
class ClusterFacts:
    """Everything that one pass of queries has found.

    `accounting` is None without a database, or where it did not answer. `unanswered` has the
    reason by command. `clock_ahead_seconds`: the controller's clock less ours; None: unknown.
    """

    config: SlurmConfig
    nodes: tuple[NodeFacts, ...]
    partitions: tuple[PartitionFacts, ...]
    topology: TopologyKind = "none"
    leaves: tuple[Leaf, ...] = ()
    accounting: Accounting | None = None
    licenses: tuple[License, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    unanswered: Mapping[str, str] = field(default_factory=dict)
    queries: int = 0
    config_seconds: float = 0.0
    clock_ahead_seconds: float | None = None

    def partition(self, name: str | None) -> PartitionFacts | None:
        """Find a partition by name, or the default one for None."""
        for one in self.partitions:
            if one.name == name or (name is None and one.default):
                return one
        return None

    def nodes_of(self, partition: str) -> tuple[NodeFacts, ...]:
        """List the nodes of a partition."""
        return tuple(node for node in self.nodes if partition in node.partitions)
