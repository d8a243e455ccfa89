"""State how jobs are asked for at a site: options of sbatch that all jobs have.

Belongs here: `slurm` of a profile with its partitions: limits, preemption, their own hardware, and
why a partition refuses a user. Does not belong here: whether a run can live with it (`doctor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.base.units import Duration
from hpctrain.site.detected_hardware import gpu_section, network, nodes_section, nvlink
from hpctrain.site.facts import LoginFacts, SiteFacts
from hpctrain.site.hardware import NodeGroup, groups_of, known_gpu
from hpctrain.site.profile_text import Stated, Tree, guess
from hpctrain.slurm.cluster_records import (
    Accounting,
    ClusterFacts,
    PartitionFacts,
    PreemptionMode,
    Qos,
)
from hpctrain.slurm.settings import preempts_by_qos, seconds_of, sends_user_signal
from hpctrain.spec.catalogue import GpuCatalogue

CONFIG_SHOWN = "scontrol show config"
PARTITION_SHOWN = "scontrol show partition"


def slurm_section(
    facts: SiteFacts,
    group: NodeGroup,
    default: PartitionFacts,
    partitions: Sequence[Tree],
) -> tuple[Tree, list[str]]:
    """State options and partitions, and what a person has to decide."""
    cluster, config = facts.cluster, facts.cluster.config
    remarks: list[str] = []
    section: dict[str, Tree] = {"gpu_request": _gpu_request(facts, group, default, remarks)}
    accounting = cluster.accounting
    if accounting is not None and accounting.accounts:
        shown = f"sacctmgr show user {facts.login.user} withassoc"
        section["account"] = Stated(accounting.accounts[0], f"{shown}: the first of yours")
        if accounting.default_account == accounting.accounts[0]:
            section["account"] = Stated(accounting.accounts[0], f"{shown}, DefaultAccount")
    section["exclusive"] = _exclusive(group, default)
    consumable = "MEMORY" in config.get("SelectTypeParameters").upper()
    section["all_memory"] = Stated(
        consumable,
        f"SelectTypeParameters={config.get('SelectTypeParameters') or '(null)'}, so memory is "
        + ("allocated" if consumable else "not allocated"),
    )
    kill_wait = seconds_of(config, "KillWait")
    if kill_wait is not None:
        section["kill_wait"] = Stated(f"{kill_wait}s", f"KillWait of {CONFIG_SHOWN}")
    section["partitions"] = partitions
    if facts.survey is not None:
        survey = facts.survey
        found = []
        if survey.may_submit is False:
            found.append(
                f"a job on {survey.host} cannot submit jobs, which continuation `chain` needs: "
                f"{survey.submit_words.splitlines()[-1] if survey.submit_words else 'refused'}"
            )
        soft = survey.limits.get("memlock", (-1, -1))[0]
        if soft != -1 and survey.ports:
            found.append(
                f"{survey.host}: memlock is limited to {soft} bytes, and RDMA needs it to pin"
            )
        remarks += found
    return section, remarks


def _gpu_request(
    facts: SiteFacts, group: NodeGroup, default: PartitionFacts, remarks: list[str]
) -> Stated:
    others = groups_of(facts.cluster.nodes_of(default.name))
    types = sorted({one.type for one in others})
    if len(types) > 1 and group.type:
        words = f"nodes of partition {default.name} have {', '.join(types)}: the type says which"
        return Stated("gres-typed", words)
    if len(types) > 1:
        remarks.append(
            f"partition `{default.name}` has nodes with {len(others)} kinds of GPUs, and Gres "
            "names no type: name a feature in slurm.constraint"
        )
    return Stated("gres", f"Gres of scontrol show node, GresTypes of {CONFIG_SHOWN}")


def _exclusive(group: NodeGroup, default: PartitionFacts) -> Stated:
    if default.whole_nodes:
        return Stated(True, f"OverSubscribe=EXCLUSIVE of {PARTITION_SHOWN}")
    if group.is_one_machine:
        return guess(False, "small jobs share the few nodes of one machine")
    return guess(True, "training takes whole nodes; some sites refuse --exclusive")


# ----------------------------------------------------------------------------------------------
# Find out how jobs of a partition lose their nodes: by partition or by QOS, with which notice.
# slurm.conf(5): PreemptType, PreemptMode, PreemptParameters, SlurmctldParameters, GraceTime;
# sacctmgr(1): Preempt, PreemptMode and GraceTime of a QOS.


_PARTITION_SHOWN = "scontrol show partition"


@dataclass(frozen=True)
class Preemption:
    """What a job of a partition has to expect, and the source; `by` may take its nodes."""

    mode: PreemptionMode
    grace_seconds: int
    user_signal: bool
    source: str
    by: tuple[str, ...] = ()
    is_guess: bool = False


def preemption_of(cluster: ClusterFacts, partition: PartitionFacts) -> Preemption:
    """Combine partition, QOS and configuration for a job of the user's default QOS."""
    signal = sends_user_signal(cluster.config)
    if preempts_by_qos(cluster.config):
        return _by_qos(cluster, partition, signal)
    higher = tuple(
        other.name
        for other in cluster.partitions
        if other.priority_tier > partition.priority_tier
        and any({other.name, partition.name} <= set(node.partitions) for node in cluster.nodes)
    )
    if partition.preemption == "off" or not higher:
        reason = f"PreemptMode of {_PARTITION_SHOWN}"
        if partition.preemption != "off":
            reason = f"no partition with its nodes has a higher PriorityTier in {_PARTITION_SHOWN}"
        return Preemption("off", 0, False, reason)
    return Preemption(
        partition.preemption,
        partition.grace_seconds,
        signal,
        f"PreemptMode and GraceTime of {_PARTITION_SHOWN}",
        higher,
    )


def _by_qos(cluster: ClusterFacts, partition: PartitionFacts, signal: bool) -> Preemption:
    own = _qos_of(cluster, partition)
    accounting = cluster.accounting
    if accounting is None or own is None:
        reason = "preemption is by QOS, and sacctmgr has named none of yours"
        return Preemption(
            partition.preemption, partition.grace_seconds, signal, reason, is_guess=True
        )
    by = tuple(other.name for other in accounting.qos if own.name in other.preempts)
    source = f"sacctmgr show qos, for QOS {own.name}"
    if not by:
        return Preemption("off", 0, False, f"{source}: none preempts it")
    mode = own.preemption or partition.preemption
    return Preemption(mode, own.grace_seconds, signal, source, by)


def _qos_of(cluster: ClusterFacts, partition: PartitionFacts) -> Qos | None:
    """Find the QOS of a job that names none: the association's, else the partition's."""
    accounting = cluster.accounting
    if accounting is None:
        return None
    default = next(
        (
            one.default_qos or (one.qos[0] if len(one.qos) == 1 else None)
            for account in accounting.accounts[:1]
            for one in accounting.associations
            if one.account == account and one.partition in (None, partition.name)
        ),
        None,
    )
    name = default or partition.qos
    return next((one for one in accounting.qos if one.name == name), None)


# -- State the partitions that the user may use: limits, preemption, their own hardware ---------


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
    count = hardware["nodes"]["count"]
    assert isinstance(count, Stated)
    for one in usable:
        own: Mapping[str, Tree] = {}
        name = one.partition.name
        if one is not usable[0]:
            found = _own_hardware(facts, catalogue, one, usable[0].group, hardware)
            if found is None:
                words = one.group.words
                remarks.append(
                    f"partition `{name}` is left out: the catalogue does not know its {words}; "
                    f"`--partition {name} --gpu MODEL` describes it"
                )
                continue
            own = found
        elif len(one.group.nodes) != count.value:
            own = {"nodes": _differing(nodes_section(one.group), hardware["nodes"])}
        for other in groups_of(facts.cluster.nodes_of(name)):
            if other.gpus != one.group.gpus:
                remarks.append(
                    f"partition `{name}` has {len(other.nodes)} other nodes, not described: "
                    f"{other.words} each"
                )
        section = _limits(facts, one.partition, is_default=one is usable[0])
        sections.append({**section, **dict(_rights(facts, one)), **own})
    return sections, remarks


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
