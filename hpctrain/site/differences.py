"""Compare a profile with its cluster: each difference with both values, and what it leads to.

Belongs here: comparing. Does not belong here: judging a cluster without a profile (`doctor`),
changing profiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from hpctrain.base.frozen import Frozen
from hpctrain.base.units import ByteSize, Duration
from hpctrain.site.detected_slurm import (
    CONFIG_SHOWN,
    PARTITION_SHOWN,
    Preemption,
    preemption_of,
    refusal,
)
from hpctrain.site.facts import SiteFacts, mount_of
from hpctrain.site.hardware import NODES_SHOWN, NodeGroup, groups_of
from hpctrain.site.job_limits import job_limits
from hpctrain.slurm.cluster_records import PartitionFacts, gpu_slice
from hpctrain.slurm.settings import seconds_of, words_of
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile

Severity = Literal["refused", "loses work", "slower", "harmless"]
_TOPOLOGY_SHOWN = "scontrol show topology"


class Difference(Frozen):
    """One difference. `refused`: Slurm takes no such job, or it never starts; `loses work`: a stop
    comes earlier or otherwise than the run expects; `slower`: resources stay unused, or nodes are
    further apart. `field` is the dotted path in the profile.
    """

    field: str
    in_profile: str
    on_cluster: str
    source: str
    severity: Severity
    consequence: str

    @property
    def matters(self) -> bool:
        return self.severity != "harmless"

    @property
    def sentence(self) -> str:
        return (
            f"`{self.field}` is {self.in_profile} in the profile and {self.on_cluster} on the "
            f"cluster ({self.source}): {self.consequence}"
        )


def differences(profile: ClusterProfile, facts: SiteFacts) -> tuple[Difference, ...]:
    """Find all differences, those that matter most first."""
    order: dict[Severity, int] = {"refused": 0, "loses work": 1, "slower": 2, "harmless": 3}
    found = [
        *_partitions(profile, facts),
        *_hardware(profile, facts),
        *_options(profile, facts),
        *_rights(profile, facts),
        *_switches(profile, facts),
        *_filesystems(profile, facts),
    ]
    return tuple(sorted(found, key=lambda one: order[one.severity]))


def _differs(
    field: str,
    in_profile: object,
    on_cluster: object,
    source: str,
    severity: Severity,
    consequence: str,
) -> Difference:
    return Difference(
        field=field,
        in_profile=str(in_profile),
        on_cluster=str(on_cluster),
        source=source,
        severity=severity,
        consequence=consequence,
    )


def _partitions(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Difference]:
    for index, one in enumerate(profile.slurm.partitions):
        path = f"slurm.partitions[{index}]"
        real = facts.cluster.partition(one.name)
        if real is None:
            known = ", ".join(other.name for other in facts.cluster.partitions)
            words = "jobs for it are refused"
            yield _differs(
                f"{path}.name", one.name, f"not there (but {known})", PARTITION_SHOWN, "refused",
                words,
            )  # fmt: skip
            continue
        if reason := refusal(real, facts.login, facts.cluster.accounting):
            words = f"jobs of {facts.login.user} are refused there"
            yield _differs(
                f"{path}.name", one.name, f"closed: {reason}", PARTITION_SHOWN, "refused", words
            )
        yield from _partition_limits(path, profile, one, real, facts)
        yield from _preemption(path, one, preemption_of(facts.cluster, real))
        if one.default and not real.default:
            default = facts.cluster.partition(None)
            yield _differs(
                f"{path}.default", one.name, default.name if default else "none", PARTITION_SHOWN,
                "harmless", "scripts name their partition",
            )  # fmt: skip
        nodes = {node.name for node in facts.cluster.nodes_of(real.name)}
        if (
            profile.continuation == "chain"
            and real.submit_hosts
            and not nodes & set(real.submit_hosts)
        ):
            yield _differs(
                "continuation", "chain", f"{', '.join(real.submit_hosts[:3])} only may submit",
                f"AllocNodes of {real.name}, {PARTITION_SHOWN}", "refused",
                "a job cannot submit the next one: use requeue or singleton",
            )  # fmt: skip


def _partition_limits(
    path: str,
    profile: ClusterProfile,
    one: PartitionProfile,
    real: PartitionFacts,
    facts: SiteFacts,
) -> Iterator[Difference]:
    """Compare what jobs may ask for: by the partition, and by the QOS of the profile or user."""
    own = profile.for_partition(one.name)
    limits = job_limits(
        facts.cluster, real, own.gpu.gres or own.gpu.type, own.gpu.per_node, own.slurm.qos
    )
    longest = None if one.max_walltime is None else float(one.max_walltime)
    real_longest = limits.max_seconds.value if limits.max_seconds is not None else None
    if longest != real_longest:
        shorter = real_longest is not None and (longest is None or longest > real_longest)
        yield _differs(
            f"{path}.max_walltime",
            "no limit" if longest is None else Duration(longest),
            "no limit" if real_longest is None else Duration(real_longest),
            limits.max_seconds.source if limits.max_seconds else f"MaxTime of {PARTITION_SHOWN}",
            "refused" if shorter else "harmless",
            "longer jobs are refused or wait for ever" if shorter else "jobs could ask for more",
        )
    rows = (
        ("max_nodes", one.max_nodes, limits.max_nodes, f"MaxNodes of {PARTITION_SHOWN}"),
        ("max_gpus", one.max_gpus, limits.max_gpus, "QOS and association"),
    )
    for field, told, limit, shown in rows:
        most = limit.count if limit is not None else None
        if told == most or (field == "max_gpus" and most is None):
            continue
        fewer = most is not None and (told is None or told > most)
        yield _differs(
            f"{path}.{field}",
            told or "no limit",
            most or "no limit",
            limit.source if limit is not None else shown,
            "refused" if fewer else "harmless",
            "larger jobs are refused or wait for ever" if fewer else "jobs could ask for more",
        )
    least = one.min_nodes or 0
    if limits.min_nodes is not None and least < limits.min_nodes.value:
        yield _differs(
            f"{path}.min_nodes", least or "no limit", limits.min_nodes.count,
            limits.min_nodes.source, "refused", "smaller jobs are refused",
        )  # fmt: skip
    if one.priority_tier != real.priority_tier:
        yield _differs(
            f"{path}.priority_tier", one.priority_tier, real.priority_tier,
            f"PriorityTier of {PARTITION_SHOWN}", "harmless", "only a sandbox is made from it",
        )  # fmt: skip


def _preemption(path: str, one: PartitionProfile, real: Preemption) -> Iterator[Difference]:
    told, path = one.preemption, f"{path}.preemption"
    if told.mode != real.mode:
        severity: Severity = "harmless"
        words = "a run is ready for what does not happen"
        if real.mode in ("requeue", "cancel"):
            severity = "loses work"
            words = "jobs lose their nodes, and the plan does not say so"
            if told.mode == "requeue":
                words = "a preempted job ends in place of waiting again"
        elif real.mode == "suspend":
            severity, words = "slower", "jobs are stopped where they are, and keep their GPUs"
        yield _differs(f"{path}.mode", told.mode, real.mode, real.source, severity, words)
    if "off" in (told.mode, real.mode):
        return
    grace = float(told.grace)
    if grace != real.grace_seconds:
        less = real.grace_seconds < grace
        yield _differs(
            f"{path}.grace", told.grace, f"{real.grace_seconds}s", real.source,
            "loses work" if less else "harmless",
            "less time for the last checkpoint than the plan counts on" if less
            else "there is more time than the plan counts on",
        )  # fmt: skip
    if told.user_signal != real.user_signal:
        yield _differs(
            f"{path}.user_signal", _yes(told.user_signal), _yes(real.user_signal),
            f"PreemptParameters, SlurmctldParameters of {CONFIG_SHOWN}",
            "loses work" if told.user_signal else "harmless",
            "the supervisor learns of a preemption from its ranks only" if told.user_signal
            else "the supervisor is told as well",
        )  # fmt: skip


def _hardware(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Difference]:
    """Compare the nodes of each partition; what several share is said once."""
    said: set[tuple[str, str]] = set()
    for index, one in enumerate(profile.slurm.partitions):
        if facts.cluster.partition(one.name) is None:
            continue
        for found in _partition_hardware(profile, index, facts):
            if (found.field, found.on_cluster) not in said:
                said.add((found.field, found.on_cluster))
                yield found


def _partition_hardware(
    profile: ClusterProfile, index: int, facts: SiteFacts
) -> Iterator[Difference]:
    partition = profile.slurm.partitions[index]
    real = profile.for_partition(partition.name)
    path = f"slurm.partitions[{index}]."
    places = {part: path if getattr(partition, part) is not None else "" for part in _PARTS}
    wanted = set(re.split(r"&", real.slurm.constraint or "")) - {""}
    simple = not set(real.slurm.constraint or "") & set("[]()|*!,")
    nodes = [
        node
        for node in facts.cluster.nodes_of(partition.name)
        if not simple or wanted <= node.features
    ]
    kind: Literal["gpus", "slices"] = "gpus"
    asked_type = real.gpu.gres or real.gpu.type
    if gpu_slice(asked_type) is not None:
        kind = "slices"
    groups, source = groups_of(nodes, kind), f"{NODES_SHOWN}, nodes of {partition.name}"
    if not groups and nodes and real.slurm.gpu_request == "none":
        # nobody asks for GPUs, and Gres need not list them: the profile's number counts
        unlisted = NodeGroup((("", real.gpu.per_node),), tuple(nodes), "undeclared")
        yield from _node_sizes(real, [unlisted], places, source)
        return
    if not groups:
        if not wanted:
            yield _differs(
                f"{places['gpu']}gpu.per_node", real.gpu.per_node, 0, source, "refused",
                "no node of this partition has GPUs",
            )  # fmt: skip
        return
    typed = [one for one in groups if asked_type in {name for name, _ in one.gpus}]
    if not typed and groups[0].type:
        kinds = ", ".join(sorted({one.type for one in groups}))
        asked = real.slurm.asks_for_a_type
        yield _differs(
            f"{places['gpu']}gpu.{'gres' if real.gpu.gres else 'type'}", asked_type, kinds, source,
            "refused" if asked else "slower",
            "jobs ask for a type that is not there" if asked else "plans are for another GPU",
        )  # fmt: skip
    yield from _node_sizes(real, typed or [groups[0]], places, source)


_PARTS = ("nodes", "gpu")


def _node_sizes(
    profile: ClusterProfile, groups: list[NodeGroup], places: Mapping[str, str], source: str
) -> Iterator[Difference]:
    nodes = [node for group in groups for node in group.nodes]
    gpus, cpus = min(group.per_node for group in groups), min(node.cpus for node in nodes)
    rows: tuple[tuple[str, int, int, str, str, Severity], ...] = (
        (f"{places['nodes']}nodes.count", profile.nodes.count, len(nodes),
         "jobs of all nodes can never start", "plans leave nodes out", "harmless"),
        (f"{places['gpu']}gpu.per_node", profile.gpu.per_node, gpus,
         "jobs ask for GPUs that a node does not have", "GPUs of a node stay unused", "slower"),
        (f"{places['nodes']}nodes.cpus", profile.nodes.cpus, cpus,
         "jobs ask for CPUs that a node does not have", "CPUs of a node stay unused", "slower"),
    )  # fmt: skip
    for field, told, real, more, less, severity in rows:
        if told > real:
            yield _differs(field, told, real, source, "refused", more)
        elif told < real:
            yield _differs(field, told, real, source, severity, less)
    told_threads, threads = (
        profile.nodes.threads_per_core or 1,
        min(n.threads_per_core for n in nodes),
    )
    if told_threads != threads:
        yield _differs(
            f"{places['nodes']}nodes.threads_per_core", told_threads, threads,
            f"ThreadsPerCore of {source}", "slower",
            "jobs that ask for whole cores get another number of CPUs than they ask for",
        )  # fmt: skip
    memory, told_memory = min(node.job_memory_mib for node in nodes), profile.nodes.memory
    if int(told_memory) // 2**20 != memory:
        above = int(told_memory) // 2**20 > memory
        yield _differs(
            f"{places['nodes']}nodes.memory", told_memory, ByteSize(memory * 2**20),
            f"RealMemory minus MemSpecLimit of {source}", "refused" if above else "harmless",
            "jobs that ask for it can never start" if above else "the rest stays unused",
        )  # fmt: skip


def _options(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Difference]:
    config = facts.cluster.config
    kill_wait = seconds_of(config, "KillWait")
    told = float(profile.slurm.kill_wait)
    if kill_wait is not None and told != kill_wait:
        less = kill_wait < told
        yield _differs(
            "slurm.kill_wait", profile.slurm.kill_wait, f"{kill_wait}s", f"KillWait of "
            f"{CONFIG_SHOWN}", "loses work" if less else "harmless",
            "the supervisor is killed before its last words" if less else "there is more time",
        )  # fmt: skip
    features = frozenset().union(*(node.features for node in facts.cluster.nodes))
    constraints = {"slurm.constraint": profile.slurm.constraint}
    for index, one in enumerate(profile.slurm.partitions):
        constraints[f"slurm.partitions[{index}].constraint"] = one.constraint
    for field, words in constraints.items():
        for name in re.findall(r"[A-Za-z_][\w.:-]*", words or ""):
            if name not in features:
                yield _differs(
                    field, name, "no node has it", f"ActiveFeatures of {NODES_SHOWN}",
                    "refused", "jobs that ask for it are refused",
                )  # fmt: skip
    for index, island in enumerate(profile.network.islands):
        if island.feature is not None and island.feature not in features:
            yield _differs(
                f"network.islands[{index}].feature", island.feature, "no node has it",
                f"ActiveFeatures of {NODES_SHOWN}", "refused", "jobs that ask for it are refused",
            )  # fmt: skip
    longest = words_of(config, "SchedulerParameters").get("max_switch_wait", "300")
    wait = profile.network.switches.wait
    if wait is not None and longest.isdecimal() and float(wait) > int(longest):
        yield _differs(
            "network.switches.wait", wait, f"{longest}s", f"max_switch_wait of {CONFIG_SHOWN}",
            "slower", "jobs start earlier, on more leaves",
        )  # fmt: skip


def _rights(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Difference]:
    accounting = facts.cluster.accounting
    if accounting is None or not accounting.associations:
        return
    shown = f"sacctmgr show user {facts.login.user} withassoc"
    enforced = facts.cluster.config.get("AccountingStorageEnforce").lower()
    mine = ", ".join(accounting.accounts)
    told: dict[str, str | None] = {"slurm.account": profile.slurm.account}
    asked_qos: dict[str, str | None] = {"slurm.qos": profile.slurm.qos}
    for index, one in enumerate(profile.slurm.partitions):
        told[f"slurm.partitions[{index}].account"] = one.account
        asked_qos[f"slurm.partitions[{index}].qos"] = one.qos
    for index, account in enumerate(profile.limits.accounts):
        told[f"limits.accounts[{index}]"] = account
    for field, named in told.items():
        if named and named not in accounting.accounts:
            strict = "associations" in enforced
            yield _differs(
                field, named, f"{mine} for {facts.login.user}", shown,
                "refused" if strict and field.startswith("slurm") else "harmless",
                "jobs that name it are refused" if strict else "Slurm does not enforce it",
            )  # fmt: skip
    qos = {name for one in accounting.associations for name in one.qos}
    strict = "qos" in enforced
    for field, named in asked_qos.items():
        if named and qos and named not in qos:
            yield _differs(
                field, named, ", ".join(sorted(qos)), shown,
                "refused" if strict else "harmless",
                "jobs that name it are refused" if strict else "Slurm does not enforce it",
            )  # fmt: skip


def _switches(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Difference]:
    switches, real = profile.network.switches, facts.cluster.topology
    told = switches.plugin
    if told != real:
        severity: Severity = "slower"
        words = "jobs do not ask for nodes that are near each other"
        if told == "block" and switches.request:
            severity, words = "refused", "jobs that ask for a segment are refused"
        elif told == "tree":
            words = "Slurm ignores the wish for few leaves"
        name = facts.cluster.config.get("TopologyPlugin") or "none"
        yield _differs(
            "network.switches.plugin", told, real if real != "other" else name,
            f"TopologyPlugin of {CONFIG_SHOWN}", severity, words,
        )  # fmt: skip
        return
    names = {name.name for name in facts.cluster.nodes if name.gpu_count}
    sizes = sorted({len(names & set(leaf.nodes)) for leaf in facts.cluster.leaves} - {0})
    leaf = switches.nodes_per_leaf
    if leaf is not None and sizes and leaf not in sizes:
        yield _differs(
            "network.switches.nodes_per_leaf", leaf, " or ".join(map(str, sizes)),
            _TOPOLOGY_SHOWN, "refused" if told == "block" and leaf > sizes[-1] else "slower",
            "groups of ranks are planned into leaves of another size",
        )  # fmt: skip


def _filesystems(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Difference]:
    for index, one in enumerate(profile.filesystems):
        mount = mount_of(one.path, facts.login.mounts)
        if mount is not None and one.kind != "other" and mount.kind != one.kind:
            yield _differs(
                f"filesystems[{index}].kind", f"{one.kind} at {one.path}",
                f"{mount.kind} at {mount.path} of {facts.login.host}", "/proc/mounts", "harmless",
                "nodes may mount what this machine does not",
            )  # fmt: skip


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
