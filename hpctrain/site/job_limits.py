"""Find out which account and QOS a job gets in a partition, and what it may ask for there.

Limits are looked up as Slurm does (its page "Resource Limits"): in the partition's QOS, the job's
QOS, the user's association, the partition; the first two change places by the flag OverPartQOS.
Belongs here: combining them. Does not belong here: preemption, the sections of a profile
(`detected_slurm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpctrain.slurm.cluster_records import (
    Accounting,
    Association,
    ClusterFacts,
    PartitionFacts,
    Qos,
    tres_counts,
)

# The QOS of jobs whose association names none (Slurm's assoc_mgr_get_default_qos_info).
_USUAL_QOS = "normal"
_GPUS = "gres/gpu"


def allowed_accounts(partition: PartitionFacts, accounting: Accounting | None) -> tuple[str, ...]:
    """List the user's accounts that a partition takes, the default one first."""
    return tuple(
        name
        for name in (accounting.accounts if accounting is not None else ())
        if (not partition.allow_accounts or name in partition.allow_accounts)
        and name not in partition.deny_accounts
    )


@dataclass(frozen=True)
class QosChoice:
    """The QOS that the user may name in a partition. `name` is that of the job; `is_default`: it
    gets that one without naming it.
    """

    name: str
    is_default: bool
    usable: tuple[str, ...]


def association_of(partition: PartitionFacts, accounting: Accounting | None) -> Association | None:
    """Find the association of the account that pays in a partition, its own one first."""
    accounts = allowed_accounts(partition, accounting)
    if accounting is None or not accounts:
        return None
    found = [one for one in accounting.associations if one.account == accounts[0]]
    own = (one for one in found if one.partition == partition.name)
    return next(own, next((one for one in found if one.partition is None), None))


def qos_of(partition: PartitionFacts, accounting: Accounting | None) -> QosChoice | None:
    """Choose the QOS of a job: the association's default, else one that the partition takes.

    None where nothing is known, or where the partition takes none of the user's.
    """
    mine = association_of(partition, accounting)
    if mine is None or not mine.qos:
        return None
    usual = mine.default_qos or (mine.qos[0] if len(mine.qos) == 1 else _USUAL_QOS)
    allowed = tuple(
        name
        for name in mine.qos
        if (not partition.allow_qos or name in partition.allow_qos)
        and name not in partition.deny_qos
    )
    if not allowed:
        return None
    if usual in allowed:
        return QosChoice(usual, True, allowed)
    near = (name for name in (partition.qos, partition.name) if name in allowed)
    return QosChoice(next(near, None) or allowed[0], False, allowed)


@dataclass(frozen=True)
class JobLimit:
    """A limit and which setting has it."""

    value: float
    source: str

    @property
    def count(self) -> int:
        return int(self.value)


@dataclass(frozen=True)
class JobLimits:
    """What one job may ask for; None is no limit. `group_gpus`: what an account may have at once.

    `others` are limits that no field of a profile has.
    """

    max_seconds: JobLimit | None = None
    min_nodes: JobLimit | None = None
    max_nodes: JobLimit | None = None
    max_gpus: JobLimit | None = None
    max_submit: JobLimit | None = None
    group_gpus: JobLimit | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Setting:
    """One place in which Slurm looks for limits."""

    words: str
    limits: Mapping[str, str]
    max_seconds: float | None
    flags: frozenset[str] = field(default_factory=frozenset)
    is_qos: bool = True


def job_limits(
    cluster: ClusterFacts,
    partition: PartitionFacts,
    gpu_type: str,
    gpus_per_node: int,
    qos: str | None = None,
) -> JobLimits:
    """Combine all limits of a job that has nodes with these GPUs; `qos`: the one that it names."""
    shown = "scontrol show partition"
    settings = _settings(cluster, partition, qos)
    flags = frozenset().union(*(one.flags for one in settings if one.is_qos))
    wall = next((one for one in settings if one.max_seconds is not None), None)
    seconds = [] if wall is None else [JobLimit(wall.max_seconds or 0, f"MaxWall of {wall.words}")]
    if partition.max_seconds is not None and not (seconds and "partitiontimelimit" in flags):
        seconds.append(JobLimit(partition.max_seconds, f"MaxTime of {shown}"))
    mine = (_GPUS, f"{_GPUS}:{gpu_type}")
    most = [*_first(settings, "MaxTRES"), *_first(settings, "MaxTRESPU")]
    shared = [pair for one in settings if one.is_qos for pair in _first([one], "GrpTRES")]
    of_account = [pair for one in settings if not one.is_qos for pair in _first([one], "GrpTRES")]
    nodes = [limit for name, limit in [*most, *shared, *of_account] if name == "node"]
    if partition.max_nodes is not None and not (nodes and "partitionmaxnodes" in flags):
        nodes.append(JobLimit(partition.max_nodes, f"MaxNodes of {shown}"))
    least = list(_first(settings, "MinTRES"))
    fewest = [limit for name, limit in least if name == "node"] + [
        JobLimit(-(-limit.count // gpus_per_node), limit.source)
        for name, limit in least
        if name in mine
    ]
    if partition.min_nodes > 1 and not (fewest and "partitionminnodes" in flags):
        fewest.append(JobLimit(partition.min_nodes, f"MinNodes of {shown}"))
    return JobLimits(
        max_seconds=_lowest(seconds),
        min_nodes=max(fewest, key=lambda one: one.value, default=None),
        max_nodes=_lowest(nodes),
        max_gpus=_lowest(limit for name, limit in [*most, *shared] if name in mine),
        max_submit=_submit(settings),
        group_gpus=_lowest(limit for name, limit in of_account if name in mine),
        others=tuple(
            f"{limit.source}: larger jobs wait, and no field of a profile says so"
            for name, limit in [*most, *shared, *of_account]
            if name in ("cpu", "mem", "billing")
        ),
    )


def _settings(cluster: ClusterFacts, partition: PartitionFacts, qos: str | None) -> list[_Setting]:
    """List the places with limits in Slurm's order; none where it enforces no limits."""
    accounting = cluster.accounting
    enforced = set(cluster.config.get("AccountingStorageEnforce").lower().split(","))
    if accounting is None or not enforced & {"limits", "safe", "all"}:
        return []
    choice = qos_of(partition, accounting)
    named = qos or (choice.name if choice is not None else None)
    known: dict[str | None, Qos] = {one.name: one for one in accounting.qos}
    own, of_partition = known.get(named), known.get(partition.qos)
    order = [one for one in (of_partition, own) if one is not None]
    if own is not None and "overpartqos" in own.flags:
        order.reverse()
    found = [_Setting(f"QOS {q.name}", q.limits, q.max_seconds, q.flags) for q in order]
    mine = association_of(partition, accounting)
    if mine is not None:
        words = f"your association with account {mine.account}"
        found.append(_Setting(words, mine.limits, mine.max_seconds, is_qos=False))
    return found


def _first(settings: Iterable[_Setting], kind: str) -> Iterator[tuple[str, JobLimit]]:
    """Find each resource's limit of a kind where Slurm looks first."""
    seen: set[str] = set()
    for one in settings:
        for name, count in tres_counts(one.limits.get(kind, "")).items():
            if name not in seen:
                seen.add(name)
                yield name, JobLimit(count, f"{kind} {name}={count} of {one.words}")


def _submit(settings: Iterable[_Setting]) -> JobLimit | None:
    for one in settings:
        kind = "MaxSubmitJobsPU" if one.is_qos else "MaxSubmit"
        text = one.limits.get(kind, "")
        if text.isdecimal():
            return JobLimit(int(text), f"{kind} of {one.words}")
    return None


def _lowest(limits: Iterable[JobLimit]) -> JobLimit | None:
    return min(limits, key=lambda one: one.value, default=None)
