"""State the partitions that the user may use: limits, preemption, their own hardware.

Belongs here: `slurm.partitions` of a profile, and why a partition refuses a user. Does not belong
here: options of all jobs (`detected_slurm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.base.units import Duration
from hpctrain.site.detected_hardware import gpu_section, nodes_section
from hpctrain.site.detected_network import network, nvlink
from hpctrain.site.facts import LoginFacts, SiteFacts
from hpctrain.site.hardware import NodeGroup, groups_of, known_gpu
from hpctrain.site.preemption import preemption_of
from hpctrain.site.profile_text import Stated, Tree, guess
from hpctrain.slurm.cluster_records import Accounting, PartitionFacts
from hpctrain.spec.catalogue import GpuCatalogue

CONFIG_SHOWN = "scontrol show config"
PARTITION_SHOWN = "scontrol show partition"


@dataclass(frozen=True)
class UsablePartition:
    """A partition, and its nodes of one kind; other kinds in it are not described."""

    partition: PartitionFacts
    group: NodeGroup


def usable_partitions(
    facts: SiteFacts, main: NodeGroup, wanted: str | None
) -> tuple[list[UsablePartition], list[str]]:
    """List the partitions with GPUs that the user may use, the default one of the profile first.

    It is the one that was `wanted`, Slurm's own, or any with nodes of the main group. With `wanted`
    only partitions with nodes of that group are listed. Also returns why others are left out.
    """
    usable, left_out = [], []
    for partition in facts.cluster.partitions:
        groups = groups_of(facts.cluster.nodes_of(partition.name))
        alike = next((one for one in groups if one.gpus == main.gpus), None)
        if not groups or (wanted is not None and alike is None):
            continue
        reason = refusal(partition, facts.login, facts.cluster.accounting)
        if reason is not None and partition.name != wanted:
            left_out.append(f"partition `{partition.name}` is left out: {reason}")
        else:
            usable.append(UsablePartition(partition, alike or groups[0]))
    if not any(one.group.gpus == main.gpus for one in usable):
        return [], left_out
    order = {
        one.partition.name: (
            one.partition.name != wanted,
            one.group.gpus != main.gpus,
            not one.partition.default,
        )
        for one in usable
    }
    return sorted(usable, key=lambda one: order[one.partition.name]), left_out


def refusal(
    partition: PartitionFacts, login: LoginFacts, accounting: Accounting | None
) -> str | None:
    """Say why a user's job is refused there; None if nothing that is known speaks against it."""
    accounts = accounting.accounts if accounting is not None else ()
    allowed, denied = partition.allow_accounts, partition.deny_accounts
    if not partition.is_up:
        return "it is not up"
    if partition.root_only:
        return "only root may submit to it (RootOnly)"
    if partition.reservation_only:
        return "it takes jobs in reservations only (ReqResv)"
    if accounts and allowed and not set(accounts) & set(allowed):
        return f"it is for accounts {', '.join(allowed)}, and yours are {', '.join(accounts)}"
    if accounts and set(accounts) <= set(denied):
        return f"it is closed to accounts {', '.join(denied)}"
    groups = partition.allow_groups
    if groups and login.groups and not set(groups) & set(login.groups):
        return f"it is for groups {', '.join(groups)}"
    return None


def partition_sections(
    facts: SiteFacts,
    catalogue: GpuCatalogue,
    usable: Sequence[UsablePartition],
    hardware: Mapping[str, Mapping[str, Tree]],
) -> tuple[list[Tree], list[str]]:
    """State all partitions, the first of which is the default; `hardware` is the cluster's.

    A partition whose nodes differ has its own figures. One whose GPU nobody knows is left out.
    """
    sections: list[Tree] = []
    remarks = []
    for one in usable:
        own: Mapping[str, Tree] = {}
        if one is not usable[0]:
            found = _own_hardware(facts, catalogue, one, usable[0].group, hardware)
            if found is None:
                name, words = one.partition.name, one.group.words
                remarks.append(
                    f"partition `{name}` is left out: the catalogue does not know its {words}; "
                    f"`--partition {name} --gpu MODEL` describes it"
                )
                continue
            own = found
        elif len(one.group.nodes) != _count(hardware):
            own = {"nodes": _differing(nodes_section(one.group), hardware["nodes"])}
        remarks += _other_kinds(facts, one)
        section = _limits(facts, one.partition, is_default=one is usable[0])
        sections.append({**section, **dict(_rights(facts, one)), **own})
    return sections, remarks


def _other_kinds(facts: SiteFacts, usable: UsablePartition) -> Iterator[str]:
    name = usable.partition.name
    for other in groups_of(facts.cluster.nodes_of(name)):
        if other.gpus != usable.group.gpus:
            count = len(other.nodes)
            yield f"partition `{name}` has {count} other nodes, not described: {other.words} each"


def _count(hardware: Mapping[str, Mapping[str, Tree]]) -> object:
    count = hardware["nodes"]["count"]
    assert isinstance(count, Stated)
    return count.value


def _own_hardware(
    facts: SiteFacts,
    catalogue: GpuCatalogue,
    usable: UsablePartition,
    main: NodeGroup,
    hardware: Mapping[str, Mapping[str, Tree]],
) -> dict[str, Tree] | None:
    """State what differs from the cluster's hardware; None for a GPU that nobody knows."""
    group = usable.group
    own: dict[str, Mapping[str, Tree]] = {"nodes": nodes_section(group)}
    if group.gpus != main.gpus:
        gpu = known_gpu(group, catalogue)
        if gpu.memory_bytes is None:
            return None
        unseen = replace(facts, survey=None)  # a job has looked at another kind of nodes
        own["gpu"] = gpu_section(group, gpu, None)
        own["nvlink"] = nvlink(unseen, group, gpu, emulated=False)
        links, _ = network(unseen, group, gpu, emulated=False)
        own["network"] = links
    found: dict[str, Tree] = {
        name: _differing(section, hardware[name]) for name, section in own.items()
    }
    if group.gpus != main.gpus:
        found["gpu"] = own["gpu"]  # figures of another type are not taken over
    return {name: section for name, section in found.items() if section}


def _differing(own: Mapping[str, Tree], cluster: Mapping[str, Tree]) -> dict[str, Tree]:
    """Keep the values that differ; what is left out is the cluster's."""
    found: dict[str, Tree] = {}
    for key, value in own.items():
        other = cluster.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            if _differing(value, other):
                found[key] = value
        elif not (
            isinstance(value, Stated) and isinstance(other, Stated) and value.value == other.value
        ):
            found[key] = value
    return found


def _rights(facts: SiteFacts, usable: UsablePartition) -> Iterator[tuple[str, Tree]]:
    """State account, QOS and feature that this partition alone demands."""
    partition, accounting = usable.partition, facts.cluster.accounting
    accounts = accounting.accounts if accounting is not None else ()
    allowed = [
        name
        for name in accounts
        if (not partition.allow_accounts or name in partition.allow_accounts)
        and name not in partition.deny_accounts
    ]
    if allowed and allowed[0] != accounts[0]:
        source = f"AllowAccounts, DenyAccounts of {PARTITION_SHOWN}: the first of yours"
        yield "account", Stated(allowed[0], source)
    if accounting is not None and partition.allow_qos:
        mine = {name for one in accounting.associations for name in one.qos}
        usual = {one.default_qos for one in accounting.associations}
        fitting = sorted(mine & set(partition.allow_qos))
        if fitting and not usual & set(fitting):
            yield "qos", Stated(fitting[0], f"AllowQos of {PARTITION_SHOWN}, and yours")
    if feature := _feature(facts, usable.group, partition):
        words = f"ActiveFeatures: nodes of {partition.name} with other GPUs do not have it"
        yield "constraint", Stated(feature, words)


def _feature(facts: SiteFacts, group: NodeGroup, default: PartitionFacts) -> str | None:
    """Find a feature that tells the group's nodes from others of the partition with that type."""
    names = {node.name for node in group.nodes}
    others = [
        node
        for node in facts.cluster.nodes_of(default.name)
        if node.name not in names and group.type in {kind for kind, _ in node.gpus}
    ]
    if not others:
        return None
    taken = frozenset().union(*(node.features for node in others))
    return min(group.common_features - taken, default=None)


def _limits(facts: SiteFacts, partition: PartitionFacts, *, is_default: bool) -> dict[str, Tree]:
    section: dict[str, Tree] = {"name": Stated(partition.name, PARTITION_SHOWN)}
    if is_default:
        section["default"] = (
            Stated(True, f"Default=YES of {PARTITION_SHOWN}")
            if partition.default
            else guess(True, "a profile needs one; Slurm's own default is not in this profile")
        )
    if partition.max_seconds is not None:
        limit = str(Duration(partition.max_seconds))
        section["max_walltime"] = Stated(limit, f"MaxTime of {PARTITION_SHOWN}")
    if partition.min_nodes > 1:
        section["min_nodes"] = Stated(partition.min_nodes, f"MinNodes of {PARTITION_SHOWN}")
    if partition.max_nodes is not None:
        section["max_nodes"] = Stated(partition.max_nodes, f"MaxNodes of {PARTITION_SHOWN}")
    section["priority_tier"] = Stated(partition.priority_tier, f"PriorityTier of {PARTITION_SHOWN}")
    taken = preemption_of(facts.cluster, partition)
    mode = "off" if taken.mode == "suspend" else taken.mode
    if mode == "off":
        return section
    grace = f"{taken.grace_seconds}s"
    section["preemption"] = {
        "mode": Stated(mode, taken.source, taken.is_guess),
        "grace": Stated(grace, taken.source, taken.is_guess),
        "user_signal": Stated(
            taken.user_signal, f"PreemptParameters, SlurmctldParameters of {CONFIG_SHOWN}"
        ),
    }
    return section
