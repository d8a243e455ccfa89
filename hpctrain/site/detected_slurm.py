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
from hpctrain.site.job_limits import JobLimits, allowed_accounts, job_limits, qos_of
from hpctrain.site.profile_text import Stated, Tree, ask, guess
from hpctrain.slurm.cluster_records import (
    Accounting,
    ClusterFacts,
    NodeFacts,
    PartitionFacts,
    PreemptionMode,
    Qos,
)
from hpctrain.slurm.settings import preempts_by_qos, seconds_of, sends_user_signal
from hpctrain.spec.catalogue import GpuCatalogue

CONFIG_SHOWN = "scontrol show config"
PARTITION_SHOWN = "scontrol show partition"


def slurm_section(
    facts: SiteFacts, usable: Sequence[UsablePartition], partitions: Sequence[Tree]
) -> tuple[Tree, list[str]]:
    """State options and partitions, and what a person has to decide."""
    config, default = facts.cluster.config, usable[0]
    remarks: list[str] = []
    section: dict[str, Tree] = {"gpu_request": _gpu_request(facts, usable, remarks)}
    section |= _payment(facts, default.partition)
    section["exclusive"] = _exclusive(facts, default)
    consumable = "MEMORY" in config.get("SelectTypeParameters").upper()
    section["memory"] = Stated(
        "auto" if consumable else "none",
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


def _payment(facts: SiteFacts, default: PartitionFacts) -> Iterator[tuple[str, Tree]]:
    """State who pays and by which QOS in the default partition; what is not known is asked."""
    accounting = facts.cluster.accounting
    shown = f"sacctmgr show user {facts.login.user} withassoc"
    enforced = facts.cluster.config.get("AccountingStorageEnforce").lower()
    if accounting is None or not accounting.accounts:
        if "associations" in enforced or "all" in enforced.split(","):
            reason = "names none of yours" if accounting is not None else "did not answer"
            yield (
                "account",
                ask(None, f"which account pays? Slurm wants one, and sacctmgr {reason}"),
            )
        return
    source = f"{shown}: the first of yours"
    if accounting.default_account == accounting.accounts[0]:
        source = f"{shown}, DefaultAccount"
    yield "account", Stated(accounting.accounts[0], source)
    choice = qos_of(default, accounting)
    if choice is not None and choice.is_default and len(choice.usable) > 1:
        others = ", ".join(name for name in choice.usable if name != choice.name)
        yield "qos", Stated(choice.name, f"your default in {shown}; also yours: {others}")


def _gpu_request(facts: SiteFacts, usable: Sequence[UsablePartition], remarks: list[str]) -> Stated:
    if usable[0].group.kind == "undeclared":
        configured = facts.cluster.config.get("GresTypes") or "(null)"
        words = f"nodes have no GPUs in Gres (GresTypes={configured} of {CONFIG_SHOWN})"
        return Stated("none", f"{words}: a job has those of its nodes")
    for one in usable:
        name, nodes = one.partition.name, facts.cluster.nodes_of(one.partition.name)
        types = sorted({kind for node in nodes for kind, _ in node.gpus})
        if len(types) < 2:
            continue
        if all(other.group.type for other in usable):
            words = f"nodes of partition {name} have {', '.join(filter(None, types))}"
            return Stated("gres-typed", f"{words}: the type says which")
        remarks.append(
            f"partition `{name}` has nodes with {len(types)} kinds of GPUs, and Gres does not name "
            "the type of all: name a feature in slurm.constraint"
        )
    if usable[0].group.slice is not None:
        return Stated("gres-typed", "slices of GPUs are asked for by their type")
    return Stated("gres", f"Gres of scontrol show node, GresTypes of {CONFIG_SHOWN}")


def _exclusive(facts: SiteFacts, default: UsablePartition) -> Stated:
    group = default.group
    if default.partition.whole_nodes:
        return Stated(True, f"OverSubscribe=EXCLUSIVE of {PARTITION_SHOWN}")
    if facts.cluster.config.get("SelectType").endswith("/linear"):
        return Stated(True, f"SelectType=select/linear of {CONFIG_SHOWN}: whole nodes only")
    most = limits_of(facts.cluster, default).max_gpus
    if most is not None and most.count < group.per_node:
        return Stated(False, f"{most.source} is less than the GPUs of a node")
    if group.slice is not None:
        return Stated(False, "a run has one slice of a GPU, and the rest is for others")
    if group.kind == "undeclared":
        return guess(True, "Slurm counts no GPUs, so another job on a node would take them, too")
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
    """Find the QOS of the user's jobs there, else the partition's."""
    accounting = cluster.accounting
    if accounting is None:
        return None
    choice = qos_of(partition, accounting)
    name = choice.name if choice is not None else partition.qos
    return next((one for one in accounting.qos if one.name == name), None)


# -- State the partitions that the user may use: limits, preemption, their own hardware ---------


@dataclass(frozen=True)
class UsablePartition:
    """A partition, and its nodes of one kind; other kinds in it are not described."""

    partition: PartitionFacts
    group: NodeGroup


def limits_of(cluster: ClusterFacts, usable: UsablePartition) -> JobLimits:
    """Combine the limits of a job in a partition."""
    group = usable.group
    return job_limits(cluster, usable.partition, group.type, group.per_node)


def usable_partitions(
    facts: SiteFacts, main: NodeGroup, wanted: str | None
) -> tuple[list[UsablePartition], list[str]]:
    """List the partitions with GPUs that the user may use, the default one of the profile first.

    It is the one that was `wanted`, Slurm's own, or any with nodes of the main group. With `wanted`
    only partitions with nodes of that group are listed. Also returns why others are left out.
    """
    usable, left_out = [], []
    for partition in facts.cluster.partitions:
        groups = _groups_alike(facts.cluster.nodes_of(partition.name), main)
        alike = next((one for one in groups if one.gpus == main.gpus), None)
        reason = refusal(partition, facts.login, facts.cluster.accounting)
        if reason is None and partition.hidden:
            reason = "it is hidden (Hidden=YES)"
        slices = groups_of(facts.cluster.nodes_of(partition.name), "slices")
        strangers = (
            groups
            and main.kind == "undeclared"
            and len(groups[0].nodes) < len(facts.cluster.nodes_of(partition.name))
        )
        if strangers and _feature(facts, main, partition) is None:
            reason = reason or "it has nodes without GPUs, and no feature tells them from others"
        if not groups and slices and wanted is None and main.kind == "gpus":
            reason = f"its GPUs are slices (MIG: {slices[0].words}), each for a run of one GPU"
        elif not groups or (wanted is not None and alike is None):
            continue
        if reason is not None and partition.name != wanted:
            how = (
                f"; `--partition {partition.name}` describes it"
                if slices or partition.hidden
                else ""
            )
            left_out.append(f"partition `{partition.name}` is left out: {reason}{how}")
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


def _groups_alike(nodes: Sequence[NodeFacts], main: NodeGroup) -> tuple[NodeGroup, ...]:
    """Group nodes that have GPUs of the main group's kind."""
    if main.kind != "undeclared":
        return groups_of(nodes, main.kind)
    own = {node.name for node in main.nodes}
    members = tuple(node for node in nodes if node.name in own)
    return (replace(main, nodes=members),) if members else ()


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
    mine = {name for one in (accounting.associations if accounting else ()) for name in one.qos}
    if mine and qos_of(partition, accounting) is None:
        takes = (
            f"for QOS {', '.join(partition.allow_qos)}"
            if partition.allow_qos
            else (f"closed to QOS {', '.join(partition.deny_qos)}")
        )
        return f"it is {takes}, and yours are {', '.join(sorted(mine))}"
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
        nodes = facts.cluster.nodes_of(name)
        for other in () if one.group.kind == "undeclared" else groups_of(nodes):
            if other.gpus != one.group.gpus:
                remarks.append(
                    f"partition `{name}` has {len(other.nodes)} other nodes, not described: "
                    f"{other.words} each"
                )
        for other in groups_of(nodes, "slices"):
            if other.gpus != one.group.gpus:
                remarks.append(
                    f"partition `{name}` has {len(other.nodes)} nodes with slices of GPUs (MIG), "
                    f"not described: {other.words} each"
                )
        section = _limits(facts, one, is_default=one is usable[0])
        remarks += limits_of(facts.cluster, one).others
        sections.append({**section, **dict(_rights(facts, one, usable[0])), **own})
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


def _rights(
    facts: SiteFacts, usable: UsablePartition, default: UsablePartition
) -> Iterator[tuple[str, Tree]]:
    """State account, QOS and feature that this partition alone demands."""
    partition, accounting = usable.partition, facts.cluster.accounting
    allowed = allowed_accounts(partition, accounting)
    if accounting is not None and allowed and allowed[0] != accounting.accounts[0]:
        source = f"AllowAccounts, DenyAccounts of {PARTITION_SHOWN}: the first of yours"
        yield "account", Stated(allowed[0], source)
    elif partition.allow_accounts and not (accounting is not None and accounting.accounts):
        names = ", ".join(partition.allow_accounts)
        yield "account", ask(None, f"which account pays? It takes {names} only (AllowAccounts)")
    choice = qos_of(partition, accounting)
    if choice is not None and not choice.is_default:
        source = f"AllowQos, DenyQos of {PARTITION_SHOWN}, and yours"
        if len(choice.usable) == 1:
            yield "qos", Stated(choice.name, source)
        else:
            names = ", ".join(choice.usable)
            yield "qos", ask(choice.name, f"which QOS? {names} are yours ({source})")
    elif choice is not None:
        # `slurm.qos` may be that of another account
        usual = qos_of(default.partition, accounting)
        if usual is not None and usual.name != choice.name:
            account = f"account {allowed[0]}" if allowed else "this partition"
            yield "qos", Stated(choice.name, f"default of your association with {account}")
    elif partition.allow_qos:
        names = ", ".join(partition.allow_qos)
        yield "qos", ask(None, f"which QOS? It takes {names} only (AllowQos), yours are unknown")
    if feature := _feature(facts, usable.group, partition):
        words = f"ActiveFeatures: nodes of {partition.name} with other GPUs do not have it"
        yield "constraint", Stated(feature, words)


def _feature(facts: SiteFacts, group: NodeGroup, default: PartitionFacts) -> str | None:
    """Find a feature that tells the group's nodes from others of the partition with that type."""
    names = {node.name for node in group.nodes}
    others = [
        node
        for node in facts.cluster.nodes_of(default.name)
        if node.name not in names
        and (group.kind == "undeclared" or group.type in {kind for kind, _ in node.gpus})
    ]
    if not others:
        return None
    taken = frozenset().union(*(node.features for node in others))
    return min(group.common_features - taken, default=None)


def _limits(facts: SiteFacts, usable: UsablePartition, *, is_default: bool) -> dict[str, Tree]:
    partition = usable.partition
    section: dict[str, Tree] = {"name": Stated(partition.name, PARTITION_SHOWN)}
    if is_default:
        section["default"] = (
            Stated(True, f"Default=YES of {PARTITION_SHOWN}")
            if partition.default
            else guess(True, "a profile needs one; Slurm's own default is not in this profile")
        )
    limits = limits_of(facts.cluster, usable)
    if limits.max_seconds is not None:
        longest = str(Duration(limits.max_seconds.value))
        section["max_walltime"] = Stated(longest, limits.max_seconds.source)
    for field, limit in (("min_nodes", limits.min_nodes), ("max_nodes", limits.max_nodes)):
        if limit is not None:
            section[field] = Stated(limit.count, limit.source)
    if usable.group.slice is not None:
        # NVIDIA's MIG user guide: CUDA sees one slice at a time, and no P2P joins two
        section["max_gpus"] = Stated(1, "no process group joins slices of GPUs (MIG)")
    elif limits.max_gpus is not None:
        section["max_gpus"] = Stated(limits.max_gpus.count, limits.max_gpus.source)
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
