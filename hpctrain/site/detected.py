"""Make a profile of a cluster from facts about it: every value with its source, guesses marked.

What a field of the profile means stands in `hpctrain.spec.profile`. Nothing is invented: a value
that no fact gives is a marked guess with what it is guessed from, or is left out with a remark.
Belongs here: which nodes, file systems, limits. Does not belong here: nodes and links
(`detected_hardware`), partitions and options of sbatch (`detected_slurm`), YAML (`profile_text`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.page.words import counted
from hpctrain.site.detected_hardware import (
    emulated_gpus,
    gpu_section,
    network,
    nodes_section,
    nvlink,
)
from hpctrain.site.detected_slurm import (
    UsablePartition,
    limits_of,
    partition_sections,
    slurm_section,
    usable_partitions,
)
from hpctrain.site.doctor import LEAST_PYTHON
from hpctrain.site.facts import Mount, SiteFacts, StorageKind, mount_of
from hpctrain.site.hardware import NODES_SHOWN, KnownGpu, NodeGroup, groups_of, known_gpu
from hpctrain.site.profile_text import Stated, Tree, ask, guess, profile_text, stated_values
from hpctrain.spec.catalogue import GpuCatalogue, match_gpu

CONFIG_SHOWN = "scontrol show config"
# What one job may get of a file system of that kind, where nobody has measured: deliberately
# small, because a plan with slow storage saves less often and asks for a longer warning.
_ASSUMED: dict[StorageKind, tuple[str, str]] = {
    "lustre": ("10GB/s", "a few servers with some GB/s each"),
    "gpfs": ("10GB/s", "a few servers with some GB/s each"),
    "weka": ("10GB/s", "a few servers with some GB/s each"),
    "other": ("5GB/s", "a few servers with some GB/s each"),
    "nfs": ("1GB/s", "one server behind one 10 Gb/s link"),
    "local": ("500MB/s", "one SATA disk"),
}
_NVME = ("2GB/s", "one NVMe disk")
_MOST_FILESYSTEMS = 6


@dataclass(frozen=True)
class DetectedProfile:
    """A profile as YAML, what it could not say, and which of its values are guesses.

    `asked`: the questions that only the user can answer, by the field.
    """

    name: str
    text: str
    remarks: tuple[str, ...]
    guessed: tuple[str, ...]
    asked: Mapping[str, str]


def detected_profile(
    facts: SiteFacts,
    catalogue: GpuCatalogue,
    *,
    partition: str | None = None,
    model: str | None = None,
) -> DetectedProfile:
    """Make the profile of the nodes with most GPUs, or of those of a partition.

    `model`: the GPU's name in the catalogue, where Slurm does not say it. Raises InvalidInputError
    where a profile cannot be made at all: no GPUs, no usable partition, an unknown GPU.
    """
    group = _chosen_group(facts, catalogue, partition, model)
    strange = _looked_elsewhere(facts, group)
    if strange:
        facts = replace(facts, survey=None)
    gpu = known_gpu(group, catalogue, facts.survey, model)
    emulated = emulated_gpus(facts, group)
    if gpu.memory_bytes is None and emulated is None:
        told = f"`{group.type}`" if group.type else "without a type"
        message = f"the GPUs of {group.nodes[0].name} are {told} in Gres: no model of the catalogue"
        if group.kind == "undeclared":
            message = f"the GPUs of {group.nodes[0].name} are not in Gres, and no name says which"
        hint = (
            "name it with --gpu (such as `--gpu H100-80GB`), let a job look with --in-job, or add "
            "it to a `gpus.yaml` beside your profiles"
        )
        raise InvalidInputError([Problem(message, hint=hint)])
    links, link_remarks = network(facts, group, gpu, emulated is not None)
    hardware: dict[str, Mapping[str, Tree]] = {
        "nodes": nodes_section(group),
        "gpu": gpu_section(group, gpu, emulated, facts.survey),
        "nvlink": nvlink(facts, group, gpu, emulated is not None),
        "network": links,
    }
    partitions, left_out = usable_partitions(facts, group, partition)
    if not partitions:
        raise InvalidInputError([Problem("no partition can be used", hint="; ".join(left_out))])
    sections, overlay_remarks = partition_sections(facts, catalogue, partitions, hardware)
    slurm, slurm_remarks = slurm_section(facts, partitions, sections)
    stores, store_remarks = _filesystems(facts)
    name = _name(facts, partition)
    tree: dict[str, Tree] = {
        "name": name,
        "description": Stated(
            f"{counted(len(group.nodes), 'node')} x {group.per_node} {gpu.type}, detected",
            NODES_SHOWN,
        ),
        **hardware,
        "filesystems": stores,
        "slurm": slurm,
    }
    if rights := _limits(facts, partitions[0]):
        tree["limits"] = rights
    if software := _software(facts):
        tree["software"] = software
    said = (
        *left_out,
        *strange,
        *_uneven(group),
        *_machines(facts, group, gpu),
        *overlay_remarks,
        *link_remarks,
        *slurm_remarks,
        *store_remarks,
        *_beside(facts, group),
    )
    remarks = tuple(printable_line(words) for words in said)
    values = dict(stated_values(tree))
    guessed = tuple(path for path, one in values.items() if one.is_guess)
    asked = {path: one.source for path, one in values.items() if one.is_ask}
    version = facts.cluster.config.get("SLURM_VERSION")
    looked = f" and a job on {facts.survey.host}" if facts.survey is not None else ""
    head = [
        f"Detected by `hpctrain profile detect` from Slurm {version or 'of unknown version'}, "
        f"{facts.cluster.queries} queries{looked}.",
        "`from` names where a value was read, `guess` what it was guessed from: replace guesses "
        "by what you know.",
        *(
            ["`ASK` is a question to you: the value is harmless; put yours, remove the comment."]
            if asked
            else []
        ),
        *(f"- {remark}" for remark in remarks),
    ]
    text = profile_text(tree, head)
    return DetectedProfile(str(name.value), text, remarks, guessed, asked)


def _name(facts: SiteFacts, partition: str | None) -> Stated:
    cluster = facts.cluster.config.cluster_name or "cluster"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", cluster).lstrip("._-")[:30] or "cluster"
    source = f"ClusterName of {CONFIG_SHOWN}"
    if partition is not None and len(groups_of(facts.cluster.nodes)) > 1:
        name = f"{name}-{re.sub(r'[^A-Za-z0-9._-]', '-', partition)}"[:60]
        source += ", and --partition"
    return Stated(name, source)


def _looked_elsewhere(facts: SiteFacts, group: NodeGroup) -> list[str]:
    """Say so if the job has looked at a node of another kind: it describes none of these."""
    survey = facts.survey
    if survey is None:
        return []
    strangers = {node.name for node in facts.cluster.nodes} - {node.name for node in group.nodes}
    if survey.host.partition(".")[0] not in strangers:
        return []
    return [f"the job looked at {survey.host}, which is none of these nodes: not used"]


def _chosen_group(
    facts: SiteFacts, catalogue: GpuCatalogue, partition: str | None, model: str | None
) -> NodeGroup:
    """Choose the nodes: those of the partition, else most GPUs of a kind that the user may use.

    Whole GPUs come before slices of them, and both before GPUs that Gres does not list.
    """
    nodes = facts.cluster.nodes
    if partition is not None:
        if facts.cluster.partition(partition) is None:
            known = ", ".join(one.name for one in facts.cluster.partitions)
            problem = Problem(f"no partition is called `{partition}`", hint=f"there are: {known}")
            raise InvalidInputError([problem])
        nodes = facts.cluster.nodes_of(partition)
    groups = groups_of(nodes) or groups_of(nodes, "slices")
    if not groups:
        groups = undeclared_groups(facts, catalogue, partition, model)
    if not groups:
        where = f"partition `{partition}`" if partition else "this cluster"
        hint = (
            f"`{NODES_SHOWN}` lists no Gres=gpu; if nodes have GPUs all the same, name them: "
            f"`--partition {partition or 'NAME'} --gpu MODEL`, or let a job look with --in-job"
        )
        message = f"no node of {where} has GPUs"
        if facts.survey is not None and not facts.survey.gpus:
            message += f", and a job on {facts.survey.host} saw none"
        raise InvalidInputError([Problem(message, hint=hint)])
    if partition is not None:
        return groups[0]
    return next((one for one in groups if usable_partitions(facts, one, None)[0]), groups[0])


def undeclared_groups(
    facts: SiteFacts,
    catalogue: GpuCatalogue,
    partition: str | None,
    model: str | None = None,
) -> tuple[NodeGroup, ...]:
    """Find nodes whose GPUs Gres does not list: a job, the user, a feature or a name says so.

    Without a partition only where no node of the cluster lists GPUs.
    """
    survey = facts.survey
    looked_at = survey.host.partition(".")[0] if survey is not None else None
    found: list[NodeGroup] = []
    for one in sorted(facts.cluster.partitions, key=lambda one: not one.default):
        nodes = facts.cluster.nodes_of(one.name)
        if not nodes or (partition is not None and one.name != partition):
            continue
        # nodes that a feature tells from others: the rest of the partition has none
        featured = [
            tuple(node for node in nodes if name in node.features)
            for name in sorted(frozenset().union(*(node.features for node in nodes)))
            if _names_gpus(name, catalogue)
        ]
        members = max(featured, key=len, default=nodes)
        seen = looked_at in {node.name for node in members}
        if seen and not (survey and survey.gpus):
            continue  # a job was there, and has seen none
        named = model is not None and partition is not None
        if seen or named or featured or _names_gpus(one.name, catalogue):
            count = sum(gpu.count for gpu in survey.gpus) if survey and seen else 1
            found.append(NodeGroup((("", count),), members, "undeclared"))
    return tuple(sorted(found, key=lambda group: group.per_node == 1))


def _names_gpus(name: str, catalogue: GpuCatalogue) -> bool:
    """Whether a name of a feature or partition is, or contains, a GPU of the catalogue."""
    words = re.split(r"[-_.]", name.lower())
    said = {"gpu", "gpus"} & {*words} and not {"no", "non", "without"} & {*words}
    return bool(said) or any(match_gpu(catalogue, word) for word in (name, *words))


def _filesystems(facts: SiteFacts) -> tuple[Sequence[Tree], list[str]]:
    """List shared file systems, and the disk of a machine that has nothing else."""
    mounts, where = facts.login.mounts, "/proc/mounts of this machine"
    if facts.survey is not None:
        mounts, where = facts.survey.mounts, f"/proc/mounts of {facts.survey.host}"
    chosen = _chosen_mounts(facts, mounts)
    remarks = []
    if not any(mount.kind != "local" for mount in chosen):
        remarks.append(
            "no shared file system was found: the directory of the runs must be one on all nodes"
        )
    home = mount_of(facts.login.runs.path, facts.login.mounts)
    away = home is not None and home.path not in {mount.path for mount in mounts}
    if home is not None and away and home.kind != "local" and facts.survey is not None:
        remarks.append(
            f"{home.path}, which has the directory of the runs, is not mounted on "
            f"{facts.survey.host}"
        )
    return [_filesystem(mount, where, name) for name, mount in _named(chosen)], remarks


def _chosen_mounts(facts: SiteFacts, mounts: tuple[Mount, ...]) -> list[Mount]:
    paths = [facts.login.runs.path, *facts.login.variables.values()]
    used = [found for path in paths if (found := mount_of(os.path.normpath(path), mounts))]
    parallel = [one for one in mounts if one.kind in ("lustre", "gpfs", "weka")]
    shared = [one for one in dict.fromkeys((*used, *parallel)) if one.kind != "local"]
    disks = [one for one in mounts if one.kind == "local" and one.path != "/"]
    fast = [one for one in disks if one.device.startswith("/dev/nvme")] if facts.survey else []
    chosen = [*shared, *fast][:_MOST_FILESYSTEMS]
    root = mount_of(facts.login.runs.path, mounts) or Mount("/tmp", "local", "")
    return chosen or [root]


def _named(mounts: Sequence[Mount]) -> Iterator[tuple[str, Mount]]:
    taken: set[str] = set()
    for mount in mounts:
        name = base = mount.path.strip("/").rpartition("/")[2] or "root"
        number = 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        yield name, mount


def _filesystem(mount: Mount, where: str, name: str) -> Tree:
    rate, reason = _ASSUMED[mount.kind]
    if mount.kind == "local" and mount.device.startswith("/dev/nvme"):
        rate, reason = _NVME
    return {
        "name": Stated(name, where),
        "path": Stated(mount.path, where),
        "kind": Stated(mount.kind, where),
        "write_bandwidth": guess(rate, f"{reason}, not measured"),
        "read_bandwidth": guess(rate, f"{reason}, not measured"),
    }


def _limits(facts: SiteFacts, default: UsablePartition) -> Tree | None:
    """State accounts and QOS that Slurm takes from this user, and limits of all runs together."""
    accounting = facts.cluster.accounting
    enforced = facts.cluster.config.get("AccountingStorageEnforce").lower()
    if accounting is None or not accounting.accounts:
        return None
    section: dict[str, Tree] = {}
    source = f"sacctmgr show user {facts.login.user} withassoc"
    if "associations" in enforced:
        section["accounts"] = Stated(accounting.accounts, source)
    qos = tuple(dict.fromkeys(name for one in accounting.associations for name in one.qos))
    if "qos" in enforced.split(",") and qos:
        section["qos"] = Stated(qos, source)
    limits = limits_of(facts.cluster, default)
    for field, limit in (("max_submit", limits.max_submit), ("grp_gpus", limits.group_gpus)):
        if limit is not None and limit.count:
            section[field] = Stated(limit.count, limit.source)
    return section or None


def _software(facts: SiteFacts) -> Tree | None:
    """State the interpreter where this one does not run on the nodes, and the module system."""
    section: dict[str, Tree] = {}
    survey, login = facts.survey, facts.login
    if survey is not None and login.interpreter not in survey.interpreters:
        usable = {
            path: version
            for path, version in survey.interpreters.items()
            if _release(version) >= LEAST_PYTHON
        }
        words = f"{login.interpreter} is not on {survey.host}"
        if usable:
            listed = ", ".join(f"{path} ({version})" for path, version in usable.items())
            section["python"] = ask(
                next(iter(usable)), f"which Python has torch? {words}, but {listed}"
            )
    modules = survey.modules if survey is not None else login.modules
    where = survey.host if survey is not None else f"this machine, {login.host}"
    if modules is not None:
        found: dict[str, Tree] = {}
        if modules.init is not None:
            found["init"] = Stated(modules.init, f"{modules.words} on {where}", survey is None)
        found["load"] = ask(
            (), f"which modules does your software need? {modules.words} on {where}"
        )
        section["modules"] = found
    return section or None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _machines(facts: SiteFacts, group: NodeGroup, gpu: KnownGpu) -> Iterator[str]:
    """Say where nodes are other machines than this one, or share memory with their GPUs."""
    kinds = {node.arch for node in group.nodes if node.arch}
    strange = sorted(kinds - {facts.login.machine})
    if strange and facts.login.machine:
        yield (
            f"nodes are {', '.join(strange)} (Arch of {NODES_SHOWN}), and {facts.login.host} is "
            f"{facts.login.machine}: software.python must be an interpreter of theirs, and "
            "environments that were made here do not run there"
        )
    known = gpu.gpu
    if known is not None and known.unified_memory:
        yield (
            f"CPUs and GPUs of a {known.name} share their memory: what the processes of a node "
            "keep in main memory is missing on its GPUs, and offloading gains nothing"
        )
    if group.slice is not None:
        yield f"{group.words} are slices of GPUs (MIG), and a run has one of them (max_gpus)"
    if group.kind == "undeclared":
        yield (
            f"{NODES_SHOWN} lists no GPUs of {group.nodes[0].name}: jobs ask for whole nodes only, "
            "and what is said about GPUs was " + ("seen by a job" if facts.survey else "guessed")
        )


def _uneven(group: NodeGroup) -> Iterator[str]:
    """Say where nodes of the group differ; the profile then has the least."""
    for words, values in (
        ("CPUs", {node.cpus for node in group.nodes}),
        ("MiB of memory", {node.job_memory_mib for node in group.nodes}),
    ):
        if len(values) > 1:
            yield f"nodes have {min(values)} to {max(values)} {words}: the profile has the least"
    away = [node.name for node in group.nodes if node.is_out_of_service]
    if away:
        more = f" and {len(away) - 3} more" if len(away) > 3 else ""
        yield f"{len(away)} of {len(group.nodes)} nodes are out of service: " + (
            ", ".join(away[:3]) + more
        )


def _beside(facts: SiteFacts, group: NodeGroup) -> Iterator[str]:
    """Say what a profile has no field for."""
    cluster = facts.cluster
    for command, reason in cluster.unanswered.items():
        yield f"`{command}` did not answer, so nothing of it is in here: {reason}"
    if cluster.licenses:
        names = ", ".join(f"{one.name} ({one.total})" for one in cluster.licenses)
        yield f"licenses that jobs may have to ask for: {names}"
    for one in cluster.reservations:
        kind = "maintenance" if one.is_maintenance else "reservation"
        yield f"{kind} `{one.name}` on {one.node_count} nodes"
    survey = facts.survey
    if survey is None:
        yield "no job has looked at a node: GPUs, network and file systems of the nodes are guesses"
        return
    if not any(_release(text) >= LEAST_PYTHON for text in survey.interpreters.values()):
        least = ".".join(map(str, LEAST_PYTHON))
        yield f"{survey.host} has no Python {least} that was found: software.python must name one"
    shown = sum(gpu.count for gpu in survey.gpus)
    if group.kind == "gpus" and shown and shown != group.per_node:
        yield (
            f"{survey.host} shows {shown} GPUs to a job, and Gres of {NODES_SHOWN} has "
            f"{group.words}"
        )
    if survey.launchers:
        yield f"containers on {survey.host}: {', '.join(survey.launchers)}; see software.container"
    yield f"{survey.host} runs {survey.system} on {survey.machine}; its python3 is {survey.python}"
    if survey.missing:
        yield (
            f"a job on {survey.host} does not find {', '.join(survey.missing)} on its PATH; "
            "hpctrain starts ranks and asks Slurm there by it"
        )
