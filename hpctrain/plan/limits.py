"""Check a spec against limits of cluster and site: nodes, partitions, walltime, accounts, locks.

Belongs here: comparing the spec with limits of the profile. Does not belong here: memory or
layouts.
"""

from __future__ import annotations

from difflib import get_close_matches

from pydantic import BaseModel

from hpctrain.base.errors import Refusal
from hpctrain.base.units import Duration, short_bytes
from hpctrain.plan.divisors import multiples_around, or_list
from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ResourcesSpec, RunSpec


def node_request(gpus: int, per_node: int) -> NodeRequest:
    """Return the nodes for `gpus` GPUs: part of one node, or whole nodes (rounded up)."""
    return NodeRequest(nodes=-(-gpus // per_node), gpus_per_node=min(gpus, per_node))


def size_problems(gpus: int, profile: ClusterProfile) -> list[Refusal]:
    """List why the cluster cannot give `gpus` GPUs: whole nodes, and not more than there are."""
    per_node, total = profile.gpu.per_node, profile.gpu_count
    problems = []
    if gpus > per_node and gpus % per_node:
        choices = or_list(multiples_around(gpus, per_node, limit=total))
        problems.append(
            Refusal(
                f"{gpus} GPUs do not fill nodes of {per_node} GPUs: nearest {choices} GPUs",
                "resources.gpus",
            )
        )
    if gpus > total:
        problems.append(
            Refusal(
                f"{gpus} GPUs are more than the {total} of cluster {profile.name} "
                f"(nodes {profile.nodes.count} x {per_node} GPUs)",
                "resources.gpus",
            )
        )
    return problems


def usable_gpus(spec: RunSpec, profile: ClusterProfile) -> int:
    """Return the most GPUs that one run may have on this cluster."""
    partition = profile.slurm.partition(spec.resources.partition)
    limits = (profile.limits.max_nodes, partition.max_nodes if partition else None)
    nodes = min([profile.nodes.count, *(limit for limit in limits if limit is not None)])
    most = (
        profile.limits.max_gpus,
        profile.limits.grp_gpus,
        partition.max_gpus if partition else None,
    )
    return min([nodes * profile.gpu.per_node, *(limit for limit in most if limit is not None)])


def allowed_gpus(spec: RunSpec, profile: ClusterProfile) -> int:
    """Return the GPUs of the spec where they are allowed, else the nearest allowed number below."""
    gpus, per_node = spec.resources.gpus, profile.gpu.per_node
    whole = gpus if gpus <= per_node else gpus // per_node * per_node
    return min(whole, usable_gpus(spec, profile))


def limit_problems(request: PlanRequest) -> list[Refusal]:
    """List everything that the site does not allow, in the order of the profile."""
    spec, profile = request.spec, request.profile
    return resource_problems(spec.resources, profile) + [
        Refusal(f"`{path}` is fixed by the site: remove it from the spec", path)
        for path in profile.locked
        if sets_field(spec, path)
    ]


def resource_problems(resources: ResourcesSpec, profile: ClusterProfile) -> list[Refusal]:
    """List what the site does not allow one job to ask for."""
    problems = []
    wanted = resources.partition
    if profile.slurm.partition(wanted) is None:
        names = [partition.name for partition in profile.slurm.partitions]
        close = get_close_matches(str(wanted), names, n=1)
        meant = f"did you mean `{close[0]}`? " if close else ""
        problems.append(
            Refusal(
                f"cluster {profile.name} has no partition `{wanted}`: {meant}it has "
                f"{', '.join(names)}",
                "resources.partition",
            )
        )
    problems += _node_problems(resources, profile)
    problems += _segment_problems(resources, profile)
    problems += _walltime_problems(resources, profile)
    problems += _accounting_problems(resources, profile)
    problems += _node_share_problems(resources, profile)
    return problems


def _node_problems(resources: ResourcesSpec, profile: ClusterProfile) -> list[Refusal]:
    """Compare numbers of nodes; spares and fewer nodes are counted in whole nodes."""
    gpus, per_node = resources.gpus, profile.gpu.per_node
    least, spares = resources.min_nodes, resources.spare_nodes
    nodes = node_request(gpus, per_node).nodes
    limits = [(profile.limits.max_nodes, "this site")]
    partition = profile.slurm.partition(resources.partition)
    if partition is not None:
        limits.append((partition.max_nodes, f"partition {partition.name}"))
    needed = f"{gpus} GPUs are {nodes} nodes"
    if spares:
        needed += f", with {spares} spare {nodes + spares}"
        limits.append((profile.nodes.count, f"cluster {profile.name}"))
    problems = [
        Refusal(f"{needed}, {owner} allows {limit} ({limit * per_node} GPUs)", "resources.gpus")
        for limit, owner in limits
        if limit is not None and nodes + spares > limit
    ]
    most = [(profile.limits.max_gpus, "this site")]
    if partition is not None:
        most.append((partition.max_gpus, f"partition {partition.name}"))
        if partition.min_nodes is not None and nodes < partition.min_nodes:
            problems.append(
                Refusal(
                    f"{needed}, partition {partition.name} takes no job below "
                    f"{partition.min_nodes} ({partition.min_nodes * per_node} GPUs)",
                    "resources.gpus",
                )
            )
    problems += [
        Refusal(
            f"{gpus} GPUs are more than the {limit} that {owner} allows one run", "resources.gpus"
        )
        for limit, owner in most
        if limit is not None and gpus > limit
    ]
    if least is not None and least > nodes:
        problems.append(
            Refusal(
                f"resources.min_nodes {least} is above the {nodes} nodes of the run",
                "resources.min_nodes",
            )
        )
    if (spares or least) and gpus % per_node:
        problems.append(
            Refusal(
                "resources.spare_nodes and min_nodes need whole nodes: "
                f"{gpus} GPUs are not a multiple of {per_node}",
                "resources.gpus",
            )
        )
    return problems


def _segment_problems(resources: ResourcesSpec, profile: ClusterProfile) -> list[Refusal]:
    """Compare the requested segment with the job's numbers of nodes and the site's blocks."""
    segment, switches = resources.segment, profile.network.switches
    if segment is None:
        return []
    if switches.plugin != "block":
        message = (
            f"resources.segment {segment} needs Slurm's topology/block (24.05 or newer); "
            f"cluster {profile.name} has switches `plugin: {switches.plugin}`"
        )
        return [Refusal(message, "resources.segment")]
    if switches.segment_policy == "forbid":
        message = f"resources.segment: cluster {profile.name} takes no `--segment`: remove it"
        return [Refusal(message, "resources.segment")]
    nodes, most = node_request(resources.gpus, profile.gpu.per_node).nodes, switches.usable_nodes
    problems = []
    if most is not None and segment > most:
        problems.append(
            Refusal(
                f"resources.segment {segment} is above the {most} usable nodes of a block",
                "resources.segment",
            )
        )
    sizes = {
        "nodes of the run": nodes,
        "nodes with spare ones": nodes + resources.spare_nodes,
        "nodes of resources.min_nodes": resources.min_nodes or nodes,
    }
    uneven = {count: name for name, count in reversed(sizes.items()) if count % segment}
    problems += [
        Refusal(
            f"resources.segment {segment} does not divide the {count} {name}: "
            f"nearest {or_list(multiples_around(count, segment, limit=profile.nodes.count))} nodes",
            "resources.segment",
        )
        for count, name in reversed(uneven.items())
    ]
    return problems


def _walltime_problems(resources: ResourcesSpec, profile: ClusterProfile) -> list[Refusal]:
    walltime = resources.walltime
    limits: list[tuple[Duration | None, str]] = [(profile.limits.max_walltime, "this site")]
    partition = profile.slurm.partition(resources.partition)
    if partition is not None:
        limits.append((partition.max_walltime, f"partition {partition.name}"))
    return [
        Refusal(
            f"walltime {walltime.slurm()} is above the {limit.slurm()} that {owner} allows",
            "resources.walltime",
        )
        for limit, owner in limits
        if walltime is not None and limit is not None and walltime > limit
    ]


def _accounting_problems(resources: ResourcesSpec, profile: ClusterProfile) -> list[Refusal]:
    """Compare account, QOS and numbers of jobs with what accounting (sacctmgr(1)) allows."""
    limits, problems = profile.limits, []
    account = resources.account or profile.slurm.account
    if account is None and (limits.accounts or limits.account_required):
        choices = f": {', '.join(limits.accounts)}" if limits.accounts else ""
        problems.append(
            Refusal(
                f"this site wants an account, and there is none: `resources.account`{choices}",
                "resources.account",
            )
        )
    elif limits.accounts and account not in limits.accounts:
        names = ", ".join(limits.accounts)
        problems.append(
            Refusal(f"account `{account}` may not be used here: use {names}", "resources.account")
        )
    qos = resources.qos or profile.slurm.qos
    if qos is not None and limits.qos and qos not in limits.qos:
        problems.append(
            Refusal(
                f"QOS `{qos}` may not be used here: use {', '.join(limits.qos)}", "resources.qos"
            )
        )
    jobs = {"chain": 2, "singleton": profile.continuation_jobs, "array": profile.continuation_jobs}
    submitted = jobs.get(profile.continuation, 1)
    if limits.max_submit is not None and submitted > limits.max_submit:
        problems.append(
            Refusal(
                f"continuation {profile.continuation} has {submitted} jobs in the queue, and this "
                f"site takes {limits.max_submit}: a profile with fewer continuation_jobs, or "
                "requeue",
                "resources",
            )
        )
    gpus = resources.gpus + resources.spare_nodes * profile.gpu.per_node
    if limits.grp_gpus is not None and gpus > limits.grp_gpus:
        problems.append(
            Refusal(
                f"{gpus} GPUs with spares are more than the {limits.grp_gpus} that an account may "
                "have at once: the job would wait for ever",
                "resources.gpus",
            )
        )
    return problems


def gpu_hour_problems(
    spec: RunSpec, profile: ClusterProfile, step_seconds: float | None
) -> list[Refusal]:
    """Compare the GPU-hours of a run with what the site allows one run.

    `step_seconds` is the predicted time of a step; None: an attempt of `resources.walltime` counts.
    """
    limit, walltime = profile.limits.max_gpu_hours, spec.resources.walltime
    gpus = spec.resources.gpus + spec.resources.spare_nodes * profile.gpu.per_node
    if limit is None or (step_seconds is None and walltime is None):
        return []
    if step_seconds is not None:
        hours, what = gpus * spec.train_steps * step_seconds / 3600, "predicted for the run"
    else:
        hours, what = gpus * float(walltime or 0) / 3600, "of one attempt"
    if hours <= limit:
        return []
    message = (
        f"{hours:,.0f} GPU-hours ({what}) are more than the {limit:,.0f} that this site allows"
    )
    return [Refusal(message, "resources.gpus")]


def _node_share_problems(resources: ResourcesSpec, profile: ClusterProfile) -> list[Refusal]:
    """Compare CPUs and memory per node with what a node has."""
    problems, nodes = [], profile.nodes
    gpus = node_request(resources.gpus, profile.gpu.per_node).gpus_per_node
    if resources.cpus_per_gpu is not None and resources.cpus_per_gpu * gpus > nodes.cpus:
        problems.append(
            Refusal(
                f"{resources.cpus_per_gpu} CPUs per GPU are {resources.cpus_per_gpu * gpus} per "
                f"node, a node has {nodes.cpus}: at most {nodes.cpus // gpus} per GPU",
                "resources.cpus_per_gpu",
            )
        )
    if resources.memory_per_node is not None and resources.memory_per_node > nodes.memory:
        problems.append(
            Refusal(
                f"{short_bytes(resources.memory_per_node)} per node are more than the "
                f"{short_bytes(nodes.memory)} of a node",
                "resources.memory_per_node",
            )
        )
    return problems


def sets_field(document: BaseModel, path: str) -> bool:
    """Tell whether the YAML file gave the field at this dotted path (by its name in the file)."""
    part, _, rest = path.partition(".")
    for name, field in type(document).model_fields.items():
        if part == (field.alias or name) and name in document.model_fields_set:
            value = getattr(document, name)
            return not rest or (isinstance(value, BaseModel) and sets_field(value, rest))
    return False
