"""Check a spec against limits of cluster and site: nodes, walltime, accounts, locks, GPUs' formats.

Belongs here: comparing the spec with limits of the profile, and its precision with the GPU and its
software. Does not belong here: memory or layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from pydantic import BaseModel

from hpctrain.base.errors import Refusal
from hpctrain.base.units import short_bytes
from hpctrain.plan.divisors import multiples_around, or_list
from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.model.number_formats import recipe_of
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ResourcesSpec, RunSpec

# Generations whose GPUs have each kind of scaling (TransformerEngine, quantization.py:
# check_fp8_support from compute capability 8.9, check_fp8_block_scaling_support from 9.0,
# check_mxfp8_support and check_nvfp4_support from 10.0). `other` is a GPU that only its profile
# describes: nothing is known about it but its peak rates.
RECIPE_GENERATIONS = {
    "delayed": ("ada", "hopper", "blackwell", "cdna3", "other"),
    "tensorwise": ("ada", "hopper", "blackwell", "cdna3", "other"),
    "blockwise": ("hopper", "blackwell", "other"),
    "mxfp8": ("blackwell", "other"),
    "nvfp4": ("blackwell", "other"),
}


def node_request(gpus: int, per_node: int) -> NodeRequest:
    """Return the nodes for `gpus` GPUs: part of one node, or whole nodes (rounded up)."""
    return NodeRequest(nodes=-(-gpus // per_node), gpus_per_node=min(gpus, per_node))


def size_problems(gpus: int, profile: ClusterProfile) -> list[Refusal]:
    """List why the cluster cannot give `gpus` GPUs: whole nodes, and not more than there are."""
    per_node, total, problems = profile.gpu.per_node, profile.gpu_count, []
    if gpus > per_node and gpus % per_node:
        choices = or_list(multiples_around(gpus, per_node, limit=total))
        problems.append(f"{gpus} GPUs do not fill nodes of {per_node} GPUs: nearest {choices} GPUs")
    if gpus > total:
        problems.append(
            f"{gpus} GPUs are more than the {total} of cluster {profile.name} "
            f"(nodes {profile.nodes.count} x {per_node} GPUs)"
        )
    return [Refusal(message, "resources.gpus") for message in problems]


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
    return [
        *_node_problems(resources, profile),
        *_segment_problems(resources, profile),
        *_walltime_problems(resources, profile),
        *_accounting_problems(resources, profile),
        *_node_share_problems(resources, profile),
    ]


def _node_problems(resources: ResourcesSpec, profile: ClusterProfile) -> Iterator[Refusal]:
    """Compare partition and numbers of nodes; spares and fewer nodes are counted in whole nodes."""
    wanted, field = resources.partition, "resources.gpus"
    partition = profile.slurm.partition(wanted)
    if partition is None:
        names = [partition.name for partition in profile.slurm.partitions]
        close = get_close_matches(str(wanted), names, n=1)
        meant = f"did you mean `{close[0]}`? " if close else ""
        yield Refusal(
            f"cluster {profile.name} has no partition `{wanted}`: {meant}it has {', '.join(names)}",
            "resources.partition",
        )
    gpus, per_node = resources.gpus, profile.gpu.per_node
    least, spares = resources.min_nodes, resources.spare_nodes
    nodes = node_request(gpus, per_node).nodes
    limits = [(profile.limits.max_nodes, "this site")]
    most = [(profile.limits.max_gpus, "this site")]
    if partition is not None:
        limits.append((partition.max_nodes, f"partition {partition.name}"))
        most.append((partition.max_gpus, f"partition {partition.name}"))
    needed = f"{gpus} GPUs are {nodes} nodes"
    if spares:
        needed += f", with {spares} spare {nodes + spares}"
        limits.append((profile.nodes.count, f"cluster {profile.name}"))
    for limit, owner in limits:
        if limit is not None and nodes + spares > limit:
            yield Refusal(f"{needed}, {owner} allows {limit} ({limit * per_node} GPUs)", field)
    if partition is not None and partition.min_nodes is not None and nodes < partition.min_nodes:
        yield Refusal(
            f"{needed}, partition {partition.name} takes no job below "
            f"{partition.min_nodes} ({partition.min_nodes * per_node} GPUs)",
            field,
        )
    for limit, owner in most:
        if limit is not None and gpus > limit:
            yield Refusal(
                f"{gpus} GPUs are more than the {limit} that {owner} allows one run", field
            )
    if least is not None and least > nodes:
        message = f"resources.min_nodes {least} is above the {nodes} nodes of the run"
        yield Refusal(message, "resources.min_nodes")
    if (spares or least) and gpus % per_node:
        yield Refusal(
            "resources.spare_nodes and min_nodes need whole nodes: "
            f"{gpus} GPUs are not a multiple of {per_node}",
            field,
        )


def _segment_problems(resources: ResourcesSpec, profile: ClusterProfile) -> Iterator[Refusal]:
    """Compare the requested segment with the job's numbers of nodes and the site's blocks."""
    segment, switches, field = resources.segment, profile.network.switches, "resources.segment"
    if segment is None:
        return
    if switches.plugin != "block":
        yield Refusal(
            f"resources.segment {segment} needs Slurm's topology/block (24.05 or newer); "
            f"cluster {profile.name} has switches `plugin: {switches.plugin}`",
            field,
        )
        return
    if switches.segment_policy == "forbid":
        message = f"resources.segment: cluster {profile.name} takes no `--segment`: remove it"
        yield Refusal(message, field)
        return
    nodes, most = node_request(resources.gpus, profile.gpu.per_node).nodes, switches.usable_nodes
    if most is not None and segment > most:
        message = f"resources.segment {segment} is above the {most} usable nodes of a block"
        yield Refusal(message, field)
    sizes = (
        (nodes, "nodes of the run"),
        (nodes + resources.spare_nodes, "nodes with spare ones"),
        (resources.min_nodes or nodes, "nodes of resources.min_nodes"),
    )
    for count, name in reversed(dict(reversed(sizes)).items()):  # of equal numbers the first name
        if count % segment:
            near = or_list(multiples_around(count, segment, limit=profile.nodes.count))
            yield Refusal(
                f"resources.segment {segment} does not divide the {count} {name}: "
                f"nearest {near} nodes",
                field,
            )


def _walltime_problems(resources: ResourcesSpec, profile: ClusterProfile) -> Iterator[Refusal]:
    walltime, partition = resources.walltime, profile.slurm.partition(resources.partition)
    limits = [(profile.limits.max_walltime, "this site")]
    if partition is not None:
        limits.append((partition.max_walltime, f"partition {partition.name}"))
    for limit, owner in limits:
        if walltime is not None and limit is not None and walltime > limit:
            yield Refusal(
                f"walltime {walltime.slurm()} is above the {limit.slurm()} that {owner} allows",
                "resources.walltime",
            )


def _accounting_problems(resources: ResourcesSpec, profile: ClusterProfile) -> Iterator[Refusal]:
    """Compare account, QOS and numbers of jobs with what accounting (sacctmgr(1)) allows."""
    limits = profile.limits
    account, qos = resources.account or profile.slurm.account, resources.qos or profile.slurm.qos
    names = ", ".join(limits.accounts)
    if account is None and (limits.accounts or limits.account_required):
        choices = f": {names}" if limits.accounts else ""
        yield Refusal(
            "this site wants an account, and there is none: `resources.account`, or "
            f"`slurm.account` of a profile that `extends` this one{choices}",
            "resources.account",
        )
    elif limits.accounts and account not in limits.accounts:
        message = f"account `{account}` may not be used here: use {names}"
        yield Refusal(message, "resources.account")
    if qos is not None and limits.qos and qos not in limits.qos:
        message = f"QOS `{qos}` may not be used here: use {', '.join(limits.qos)}"
        yield Refusal(message, "resources.qos")
    jobs = {"chain": 2, "singleton": profile.continuation_jobs, "array": profile.continuation_jobs}
    submitted = jobs.get(profile.continuation, 1)
    if limits.max_submit is not None and submitted > limits.max_submit:
        yield Refusal(
            f"continuation {profile.continuation} has {submitted} jobs in the queue, and this "
            f"site takes {limits.max_submit}: a profile with fewer continuation_jobs, or requeue",
            "resources",
        )
    gpus = resources.gpus + resources.spare_nodes * profile.gpu.per_node
    if limits.grp_gpus is not None and gpus > limits.grp_gpus:
        yield Refusal(
            f"{gpus} GPUs with spares are more than the {limits.grp_gpus} that an account may "
            "have at once: the job would wait for ever",
            "resources.gpus",
        )


def _node_share_problems(resources: ResourcesSpec, profile: ClusterProfile) -> Iterator[Refusal]:
    """Compare CPUs and memory per node with what a node has."""
    nodes, cpus, memory = profile.nodes, resources.cpus_per_gpu, resources.memory_per_node
    have = profile.cpus_for_tasks
    gpus = node_request(resources.gpus, profile.gpu.per_node).gpus_per_node
    if cpus is not None and cpus * gpus > have:
        yield Refusal(
            f"{cpus} CPUs per GPU are {cpus * gpus} per node, a node has {have}: at most "
            f"{have // gpus} per GPU",
            "resources.cpus_per_gpu",
        )
    if memory is not None and memory > nodes.memory:
        yield Refusal(
            f"{short_bytes(memory)} per node are more than the {short_bytes(nodes.memory)} of a "
            "node",
            "resources.memory_per_node",
        )


def gpu_hour_problems(
    spec: RunSpec, profile: ClusterProfile, training_seconds: float | None
) -> list[Refusal]:
    """Compare the GPU-hours of a run with what the site allows one run.

    `training_seconds` is the predicted time of all steps; None: an attempt of `resources.walltime`
    counts.
    """
    limit, walltime = profile.limits.max_gpu_hours, spec.resources.walltime
    gpus = spec.resources.gpus + spec.resources.spare_nodes * profile.gpu.per_node
    if limit is None or (training_seconds is None and walltime is None):
        return []
    if training_seconds is not None:
        hours, what = gpus * training_seconds / 3600, "predicted for the run"
    else:
        hours, what = gpus * float(walltime or 0) / 3600, "of one attempt"
    if hours <= limit:
        return []
    message = (
        f"{hours:,.0f} GPU-hours ({what}) are more than the {limit:,.0f} that this site allows"
    )
    return [Refusal(message, "resources.gpus")]


def low_precision_problems(request: PlanRequest) -> list[Refusal]:
    """List why this cluster cannot compute in the low precision of the spec.

    Without a known GPU nothing is checked but the software; the plan then has a warning.
    """
    spec, profile = request.spec, request.profile
    recipe, gpu = recipe_of(spec), request.knowledge.gpu if request.knowledge else None
    if recipe is None:
        return []
    if profile.gpu.emulated:
        message = f"precision {spec.precision} needs GPUs, and profile {profile.name} has none"
        return [Refusal(message, "precision")]
    problems = []
    if spec.engine.implementation == "local":
        problems.append(
            f"precision {spec.precision} needs TransformerEngine, which profile {profile.name} "
            "says is missing: set `precision: bf16`"
        )
    if gpu is not None and spec.precision not in gpu.peak:
        known = [name for name in ("fp4", "fp8", "bf16", "fp16", "fp32") if name in gpu.peak]
        problems.append(
            f"{gpu.name} has no {spec.precision} products (it has {', '.join(known)}): set "
            f"`precision: {next(name for name in known if name != 'fp4')}`"
        )
    elif gpu is not None and gpu.generation not in RECIPE_GENERATIONS.get(
        recipe, (gpu.generation,)
    ):
        able = [
            name
            for name, generations in RECIPE_GENERATIONS.items()
            if gpu.generation in generations and name != "nvfp4"
        ]
        hint = f"set `engine.megatron.fp8_recipe` to {' or '.join(able)}" if able else ""
        if spec.precision == "fp4":
            hint = "set `precision: fp8`"
        problems.append(
            f"{recipe} scaling needs another generation of GPUs than {gpu.name} "
            f"({gpu.generation}): {hint or 'set `precision: bf16`'}"
        )
    return [Refusal(message, "precision") for message in problems]


def sets_field(document: BaseModel, path: str) -> bool:
    """Tell whether the YAML file gave the field at this dotted path (by its name in the file)."""
    part, _, rest = path.partition(".")
    for name, field in type(document).model_fields.items():
        if part == (field.alias or name) and name in document.model_fields_set:
            value = getattr(document, name)
            return not rest or (isinstance(value, BaseModel) and sets_field(value, rest))
    return False
