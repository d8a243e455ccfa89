"""Sort the nodes of a cluster by their GPUs, and find out which GPU of the catalogue they have.

Belongs here: groups of equal nodes, and the sources from which a GPU is known. Does not belong
here: the rule that matches names (`spec.catalogue`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpctrain.base.units import ByteSize
from hpctrain.site.facts import GpuSurvey, NodeSurvey
from hpctrain.slurm.cluster_records import GpuSlice, NodeFacts, gpu_slice
from hpctrain.spec.catalogue import Gpu, GpuCatalogue, match_gpu, usual_type

NODES_SHOWN = "scontrol show node"


GroupKind = Literal["gpus", "slices", "undeclared"]


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same GPUs: type as in Gres ("" for none) and number of each.

    `slices`: its GPUs are slices of one (MIG). `undeclared`: Gres does not list the GPUs that the
    nodes seem to have, and the number is one that fits any such node.
    """

    gpus: tuple[tuple[str, int], ...]
    nodes: tuple[NodeFacts, ...]
    kind: GroupKind = "gpus"

    @property
    def slice(self) -> GpuSlice | None:
        """Its GPUs as slices; None for whole ones."""
        return gpu_slice(self.type)

    @property
    def type(self) -> str:
        """The type of most of its GPUs."""
        return max(self.gpus, key=lambda pair: pair[1])[0]

    @property
    def per_node(self) -> int:
        """The number of GPUs of that type on each node."""
        return max(count for _, count in self.gpus)

    @property
    def partitions(self) -> frozenset[str]:
        return frozenset(name for node in self.nodes for name in node.partitions)

    @property
    def common_features(self) -> frozenset[str]:
        """Features that all of its nodes have."""
        sets = [node.features for node in self.nodes]
        return frozenset.intersection(*sets)

    @property
    def is_one_machine(self) -> bool:
        """True if several nodes have one address: slurmds that share a machine, as a sandbox's."""
        return len(self.nodes) > 1 and len({node.address for node in self.nodes}) == 1

    @property
    def words(self) -> str:
        """The GPUs of a node in words: `8 x h100`."""
        if self.kind == "undeclared":
            return "GPUs that Gres does not list"
        return ", ".join(f"{count} x {kind or 'gpu'}" for kind, count in self.gpus)


def groups_of(
    nodes: Iterable[NodeFacts], kind: Literal["gpus", "slices"] = "gpus"
) -> tuple[NodeGroup, ...]:
    """Group the nodes that have whole GPUs, or slices of them, the group with most GPUs first."""
    found: dict[tuple[tuple[str, int], ...], list[NodeFacts]] = {}
    for node in nodes:
        # one type may be listed in pieces: gpu:a100:2(S:0),gpu:a100:2(S:1)
        counts: Counter[str] = Counter()
        for name, count in node.whole_gpus if kind == "gpus" else node.slices:
            counts[name] += count
        if counts.total():
            found.setdefault(tuple(sorted(counts.items())), []).append(node)
    groups = (NodeGroup(gpus, tuple(members), kind) for gpus, members in found.items())
    return tuple(sorted(groups, key=lambda group: -len(group.nodes) * group.per_node))


@dataclass(frozen=True)
class KnownGpu:
    """The GPU of a group. `gpu` is None where the catalogue does not have it; `memory_bytes` is
    None where nothing says it. Of a slice, `gpu` is the whole of which it is one.

    `type` is the usual name, `gres` the one in Slurm's Gres where that differs.
    """

    type: str
    gres: str | None
    gpu: Gpu | None
    memory_bytes: int | None
    source: str
    is_guess: bool


def known_gpu(
    group: NodeGroup,
    catalogue: GpuCatalogue,
    survey: NodeSurvey | None = None,
    model: str | None = None,
) -> KnownGpu:
    """Find the GPU of a group by the driver, the user's word, its type in Gres, its features.

    A type that several models share (a100) means the one with the least memory: a plan that fits
    it fits all of them. GPUs that Gres does not list may be named by their partition.
    """
    part = group.slice
    kind = group.type if part is None else part.gpu
    seen = survey.gpus[0] if survey is not None and survey.gpus else None
    if seen is not None:
        found = _by_driver(kind, seen, catalogue)
    elif model is not None and (named := match_gpu(catalogue, model)):
        found = _known(kind, named, f"--gpu {model}")
    else:
        found = _by_names(group, kind, catalogue)
    if part is None:
        return found
    # NVIDIA's MIG user guide: 9.5 GiB of `1g.10gb`, 4.75 of `1g.5gb`
    memory = int(0.95 * part.gigabytes * 2**30) if found.gpu is not None else None
    source = f"{group.type} in Gres of {NODES_SHOWN}: {part.gigabytes} GB of a GPU, a slice (MIG)"
    return KnownGpu(group.type, None, found.gpu, memory, source, is_guess=True)


def _by_names(group: NodeGroup, kind: str, catalogue: GpuCatalogue) -> KnownGpu:
    if kind and (models := _models(catalogue, kind)):
        said = [gpu for gpu in models if _said_by(group.common_features, gpu, catalogue)]
        if len(models) == 1 or len(said) == 1:
            found = (said or models)[0]
            where = "Gres" if len(models) == 1 else "Gres and features"
            return _known(kind, found, f"{where} of {NODES_SHOWN}, GPU catalogue")
        least = min(models, key=lambda gpu: float(gpu.memory))
        sizes = " or ".join(str(gpu.memory) for gpu in models)
        return _known(kind, least, f"{NODES_SHOWN} says {kind}, which has {sizes}", is_guess=True)
    for feature in sorted(group.common_features):
        if found_by_feature := match_gpu(catalogue, feature):
            source = f"feature {feature} of {NODES_SHOWN}, GPU catalogue"
            return _known(kind, found_by_feature, source, is_guess=True)
    near = [gpu for gpu in catalogue.gpus if kind and _plain(gpu.name).startswith(_plain(kind))]
    if near:
        least = min(near, key=lambda gpu: float(gpu.memory))
        source = f"the name {kind} in Gres begins like {least.name} of the GPU catalogue"
        return _known(kind, least, source, is_guess=True)
    for name in sorted(group.partitions) if group.kind == "undeclared" else ():
        for word in (name, *re.split(r"[-_.]", name)):
            if found_by_partition := match_gpu(catalogue, word):
                return _known(kind, found_by_partition, f"the name {name}", is_guess=True)
    return KnownGpu(kind, None, None, None, NODES_SHOWN, is_guess=True)


def _by_driver(kind: str, seen: GpuSurvey, catalogue: GpuCatalogue) -> KnownGpu:
    tool = "nvidia-smi" if seen.vendor == "nvidia" else "rocm-smi"
    found = match_gpu(catalogue, seen.name, seen.memory_bytes)
    if found is None and kind:
        found = match_gpu(catalogue, kind, seen.memory_bytes)
    if found is None:
        # the dies of AMD's cards have a name of their own maker's: the memory decides
        prefix = _plain(kind)
        near = (g for g in catalogue.gpus if prefix and _plain(g.name).startswith(prefix))
        fits = (g for g in near if abs(float(g.memory) / seen.memory_bytes - 1) < 0.12)
        found = next(fits, None)
    if found is None:
        return KnownGpu(kind or _plain(seen.name), None, None, seen.memory_bytes, tool, False)
    return _known(kind, found, tool, memory_bytes=seen.memory_bytes)


def _known(
    kind: str, gpu: Gpu, source: str, *, memory_bytes: int | None = None, is_guess: bool = False
) -> KnownGpu:
    name = usual_type(gpu, kind)
    gres = kind if kind and kind != name else None
    return KnownGpu(name, gres, gpu, memory_bytes or int(gpu.memory), source, is_guess)


def _models(catalogue: GpuCatalogue, kind: str) -> list[Gpu]:
    """List the models of a name with different memory; of equal ones the first."""
    found: dict[ByteSize, Gpu] = {}
    for gpu in catalogue.gpus:
        if match_gpu(catalogue, kind, gpu.memory) is gpu:
            found.setdefault(gpu.memory, gpu)
    return list(found.values())


def _said_by(features: Iterable[str], gpu: Gpu, catalogue: GpuCatalogue) -> bool:
    """Whether a feature names this model, or its memory: a100-80gb, hbm80g, gpu_mem_80gb."""
    gigabytes = re.search(r"(\d+)GB", gpu.name)
    for feature in features:
        if match_gpu(catalogue, feature) is gpu and _plain(feature) != _plain(gpu.name[:4]):
            return True
        size = re.search(r"(?:^|\D)(\d+)gb?(?:$|\W|_)", feature.lower())
        if size and gigabytes and size[1] == gigabytes[1]:
            return True
    return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().partition(" ")[0].partition("-")[0])
