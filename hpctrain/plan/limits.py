"""What the cluster and the site allow: nodes, partitions, time limits, accounts, locked fields.

Belongs here: comparing the spec with limits of the profile. Does not belong here: memory or
layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from pydantic import BaseModel

from hpctrain.plan.divisors import multiples_around, or_list
from hpctrain.plan.documents import NodeRequest
from hpctrain.spec.profile import ClusterProfile, PartitionProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import Duration, short_bytes


def node_request(gpus: int, per_node: int) -> NodeRequest:
    """Nodes for so many GPUs: part of one node, or whole nodes (rounded up)."""
    return NodeRequest(nodes=-(-gpus // per_node), gpus_per_node=min(gpus, per_node))


def size_problems(gpus: int, profile: ClusterProfile) -> list[str]:
    """GPUs against the cluster: whole nodes, and not more than there are."""
    per_node, total = profile.gpu.per_node, profile.gpu_count
    problems = []
    if gpus > per_node and gpus % per_node:
        choices = or_list(multiples_around(gpus, per_node, limit=total))
        problems.append(f"{gpus} GPUs do not fill nodes of {per_node} GPUs: nearest {choices} GPUs")
    if gpus > total:
        problems.append(
            f"{gpus} GPUs are more than the {total} of cluster {profile.name} "
            f"(nodes {profile.nodes.count} x {per_node} GPUs)"
        )
    return problems


def usable_gpus(spec: RunSpec, profile: ClusterProfile) -> int:
    """The most GPUs that one run may have here."""
    partition = _partition(spec, profile)
    limits = (profile.limits.max_nodes, partition.max_nodes if partition else None)
    nodes = min([profile.nodes.count, *(limit for limit in limits if limit is not None)])
    return nodes * profile.gpu.per_node


def allowed_gpus(spec: RunSpec, profile: ClusterProfile) -> int:
    """The GPUs asked for where they are allowed, else the nearest allowed number below."""
    gpus, per_node = spec.resources.gpus, profile.gpu.per_node
    whole = gpus if gpus <= per_node else gpus // per_node * per_node
    return min(whole, usable_gpus(spec, profile))


def limit_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    """Everything the site does not allow, in the order of the profile."""
    return [problem for check in _CHECKS for problem in check(spec, profile)]


def _partition_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    wanted = spec.resources.partition
    if profile.slurm.partition(wanted) is not None:
        return []
    names = [partition.name for partition in profile.slurm.partitions]
    close = get_close_matches(str(wanted), names, n=1)
    meant = f"did you mean `{close[0]}`? " if close else ""
    return [f"cluster {profile.name} has no partition `{wanted}`: {meant}it has {', '.join(names)}"]


def _node_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    nodes = node_request(spec.resources.gpus, profile.gpu.per_node).nodes
    limits = [(profile.limits.max_nodes, "this site")]
    partition = _partition(spec, profile)
    if partition is not None:
        limits.append((partition.max_nodes, f"partition {partition.name}"))
    spares = spec.resources.spare_nodes
    words = f"{spec.resources.gpus} GPUs are {nodes} nodes"
    if spares:
        words += f", with {spares} spare {nodes + spares}"
        limits.append((profile.nodes.count, f"cluster {profile.name}"))
    return [
        f"{words}, {owner} allows {limit} ({limit * profile.gpu.per_node} GPUs)"
        for limit, owner in limits
        if limit is not None and nodes + spares > limit
    ] + _elastic_problems(spec, nodes, profile)


def _elastic_problems(spec: RunSpec, nodes: int, profile: ClusterProfile) -> list[str]:
    """Spares and fewer nodes are counted in whole nodes."""
    least, spares = spec.resources.min_nodes, spec.resources.spare_nodes
    problems = []
    if least is not None and least > nodes:
        problems.append(f"resources.min_nodes {least} is above the {nodes} nodes of the run")
    if (spares or least) and spec.resources.gpus % profile.gpu.per_node:
        problems.append(
            "resources.spare_nodes and min_nodes need whole nodes: "
            f"{spec.resources.gpus} GPUs are not a multiple of {profile.gpu.per_node}"
        )
    return problems


def _walltime_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    walltime = spec.resources.walltime
    limits: list[tuple[Duration | None, str]] = [(profile.limits.max_walltime, "this site")]
    partition = _partition(spec, profile)
    if partition is not None:
        limits.append((partition.max_walltime, f"partition {partition.name}"))
    return [
        f"walltime {walltime.slurm()} is above the {limit.slurm()} that {owner} allows"
        for limit, owner in limits
        if walltime is not None and limit is not None and walltime > limit
    ]


def _account_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    account = spec.resources.account or profile.slurm.account
    allowed = profile.limits.accounts
    if account is None or not allowed or account in allowed:
        return []
    return [f"account `{account}` may not be used here: use {', '.join(allowed)}"]


def _node_share_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    problems, wanted = [], spec.resources
    gpus = node_request(wanted.gpus, profile.gpu.per_node).gpus_per_node
    if wanted.cpus_per_gpu is not None and wanted.cpus_per_gpu * gpus > profile.nodes.cpus:
        problems.append(
            f"{wanted.cpus_per_gpu} CPUs per GPU are {wanted.cpus_per_gpu * gpus} per node, "
            f"a node has {profile.nodes.cpus}: at most {profile.nodes.cpus // gpus} per GPU"
        )
    if wanted.memory_per_node is not None and wanted.memory_per_node > profile.nodes.memory:
        problems.append(
            f"{short_bytes(wanted.memory_per_node)} per node are more than the "
            f"{short_bytes(profile.nodes.memory)} of a node"
        )
    return problems


def _locked_problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    return [
        f"`{path}` is fixed by the site: remove it from the spec"
        for path in profile.locked
        if sets_field(spec, path)
    ]


def sets_field(document: BaseModel, path: str) -> bool:
    """True when the YAML file gave the field at this dotted path (by its name in the file)."""
    part, _, rest = path.partition(".")
    for name, field in type(document).model_fields.items():
        if part == (field.alias or name) and name in document.model_fields_set:
            value = getattr(document, name)
            return not rest or (isinstance(value, BaseModel) and sets_field(value, rest))
    return False


def _partition(spec: RunSpec, profile: ClusterProfile) -> PartitionProfile | None:
    return profile.slurm.partition(spec.resources.partition)


_CHECKS: tuple[Callable[[RunSpec, ClusterProfile], list[str]], ...] = (
    _partition_problems,
    _node_problems,
    _walltime_problems,
    _account_problems,
    _node_share_problems,
    _locked_problems,
)
