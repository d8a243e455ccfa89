"""Locate the ranks of each axis: in a node, an NVLink domain, an island, or across.

Slurm numbers the ranks of `--distribution=block` along the nodes in the order of their names
(srun(1); tests/slurm/test_rank_order.py checks a real one). The layout's order gives the nearest
axis (Megatron's `rank_order` string: megatron/core/parallel_state.py, initialize_model_parallel).
A group is `size` ranks, `stride` apart; groups tile blocks of stride x size consecutive ranks.

Belongs here: nodes of each island, segments of nodes, strides, spans, groups that cross borders.
Does not belong here: which axis ought to cross (`rank_order`), bandwidths and times, the options of
Slurm (`hpctrain.job.render.job_options`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.documents import AxisPlacement, Layout, NodeRequest, Span
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS, Axis
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.candidate import Candidate, Columns, LayoutValues
from hpctrain.plan.model.parameters import expert_tp
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import IslandProfile
from hpctrain.spec.run import ResourcesSpec

# -- Islands ------------------------------------------------------------------------------------
# An island of the profile is a run of names, so the ranks of one island are consecutive, and
# everything here is counting intervals.


@dataclass(frozen=True)
class Island:
    """The ranks [start, end) of a run behind one uplink of so many bytes/s per direction."""

    start: int
    end: int
    uplink: float


@dataclass(frozen=True)
class Crossing:
    """The groups of an axis that cross a border, and the bandwidth of each.

    `flows` of them share the uplink that leaves each the least, `bytes_per_second` in each
    direction, if no other axis sends at the same time.
    """

    groups: int
    flows: int
    bytes_per_second: float


def on_islands(request: NodeRequest, profile: ClusterProfile) -> NodeRequest:
    """Add the number of nodes on each island of the profile, in its order.

    One island if any is large enough, else the fewest, in equal parts where that works out: the
    border is then where an axis ends. Islands with the profile's own GPU go before all others,
    because a step takes as long as its slowest GPU.
    """
    pool = eligible_islands(request.nodes, profile)
    if not pool:
        return request
    islands, nodes = profile.network.islands, request.nodes
    sizes = [islands[index].nodes for index in pool]
    part = nodes if sizes[0] >= nodes else max(sizes)
    if sizes[0] < nodes and nodes % len(sizes) == 0 and min(sizes) >= nodes // len(sizes):
        part = nodes // len(sizes)
    shares, left = [0] * len(islands), nodes
    for index, size in zip(pool, sizes, strict=True):
        shares[index] = min(size, part, left)
        left -= shares[index]
    return request.model_copy(update={"island_nodes": tuple(shares)})


def eligible_islands(nodes: int, profile: ClusterProfile) -> tuple[int, ...]:
    """List the islands (their indices) that a run of `nodes` nodes may use, the largest first.

    All that could hold the run alone if there are any, else the fewest that hold it together.
    Empty without islands, or when the cluster is too small.
    """
    islands = profile.network.islands
    pool = sorted(range(len(islands)), key=lambda i: -islands[i].nodes)
    alone = tuple(i for i in pool if islands[i].nodes >= nodes)
    if alone:
        return alone
    for count in range(2, len(pool) + 1):
        if sum(islands[i].nodes for i in pool[:count]) >= nodes:
            return tuple(pool[:count])
    return ()


def used_islands(request: NodeRequest, profile: ClusterProfile) -> tuple[IslandProfile, ...]:
    """List the islands with nodes of the run, in the profile's order."""
    pairs = zip(profile.network.islands, request.island_nodes, strict=False)
    return tuple(island for island, nodes in pairs if nodes)


def island_warnings(request: NodeRequest, profile: ClusterProfile) -> tuple[str, ...]:
    """Warn where Slurm may ignore islands."""
    islands = profile.network.islands
    if not islands or request.nodes >= profile.nodes.count or islands[0].feature is not None:
        return ()
    return (
        "network.islands have no `feature`: Slurm may take nodes of other islands than planned.",
    )


def slow_links(request: NodeRequest, profile: ClusterProfile) -> tuple[Island, ...]:
    """List the groups of ranks with a slow link between them; empty when there are none.

    The islands that `request` names; where it is on one island or none, leaf switches with less
    bandwidth up than down, taken as full (the request of `--switches`).
    """
    islands = used_islands(request, profile)
    if len(islands) > 1:
        nodes = [count for count in request.island_nodes if count]
        uplinks = [float(island.uplink) for island in islands]
        return _intervals(nodes, uplinks, request.gpus_per_node)
    leaf, ratio = profile.network.switches.usable_nodes, profile.network.switches.oversubscription
    if leaf is None or ratio <= 1 or request.nodes <= leaf:
        return ()
    counts = [min(leaf, request.nodes - first) for first in range(0, request.nodes, leaf)]
    cards = profile.network.nics_per_node * float(profile.network.nic_bandwidth)
    return _intervals(counts, [leaf * cards / ratio] * len(counts), request.gpus_per_node)


def _intervals(
    nodes: Sequence[int], uplinks: Sequence[float], gpus_per_node: int
) -> tuple[Island, ...]:
    found, start = [], 0
    for count, uplink in zip(nodes, uplinks, strict=True):
        end = start + count * gpus_per_node
        found.append(Island(start, end, uplink))
        start = end
    return tuple(found)


def crossing(stride: int, size: int, islands: Sequence[Island]) -> Crossing | None:
    """Count how the groups of one axis cross the borders of `islands`; None when none does.

    The islands must cover all ranks, a multiple of stride x size. A ring through the ranks of a
    group in their order enters and leaves each of its islands once: one flow per direction.
    """
    if size == 1 or not islands:
        return None
    world = islands[-1].end
    whole = sum(groups_inside(stride, size, island) for island in islands)
    if whole == world // size:
        return None
    loads = [(groups_at_border(stride, size, island), island.uplink) for island in islands]
    flows, uplink = max(loads, key=lambda load: load[0] / load[1])
    return Crossing(world // size - whole, flows, uplink / flows)


def groups_inside(stride: int, size: int, island: Island) -> int:
    """Count groups that have all their ranks in the island."""
    return sum(
        count * max(0, min(stride, high - stride * (size - 1)) - low)
        for low, high, count in _parts_of_blocks(stride * size, island)
    )


def groups_at_border(stride: int, size: int, island: Island) -> int:
    """Count groups with ranks inside and outside the island: flows of a ring per direction.

    Of a block's part [low, high), min(stride, high - low) groups have some rank in it.
    """
    touching = sum(
        count * min(stride, high - low)
        for low, high, count in _parts_of_blocks(stride * size, island)
    )
    return touching - groups_inside(stride, size, island)


def _parts_of_blocks(block: int, island: Island) -> Iterator[tuple[int, int, int]]:
    """Yield the island cut at multiples of `block`: low, high within a block, number of such."""
    first, last = island.start // block, (island.end - 1) // block
    if first == last:
        yield island.start - first * block, island.end - first * block, 1
        return
    yield island.start - first * block, block, 1
    if last - first > 1:
        yield 0, block, last - first - 1
    yield 0, island.end - last * block, 1


def neighbours_outside(stride: int, size: int, island: Island) -> tuple[int, int]:
    """Count ranks of the island whose next rank in the group is outside, and whose previous is.

    A chain (a pipeline) sends one message per microbatch through the uplink for each, forward and
    backward. The last rank of a group has no next one, the first no previous one.
    """
    block = stride * size
    late = max(island.start, island.end - stride)
    early = min(island.end, island.start + stride)
    following = _residues(late, island.end, block, 0, block - stride)
    preceding = _residues(island.start, early, block, stride, block)
    return following, preceding


def wraps_outside(stride: int, size: int, island: Island) -> tuple[int, int]:
    """Count last ranks of groups whose first rank is outside the island, and the reverse.

    An interleaved pipeline goes from the last stage back to the first, once per further chunk.
    """
    block, reach = stride * size, stride * (size - 1)
    early = min(island.end, island.start + reach)
    late = max(island.start, island.end - reach)
    forward = _residues(island.start, early, block, reach, block)
    backward = _residues(late, island.end, block, 0, stride)
    return forward, backward


def _residues(start: int, end: int, period: int, low: int, high: int) -> int:
    """Count numbers in [start, end) with a remainder in [low, high) modulo `period`."""

    def below(limit: int) -> int:
        return limit // period * (high - low) + min(max(limit % period - low, 0), high - low)

    return below(end) - below(start) if end > start else 0


# -- The NVLink domain that a job can rely on, and the segment of nodes that Slurm keeps in it ----
# A domain of several nodes (the rack of a GB200 NVL72) serves only groups whose ranks Slurm puts
# into one rack. topology/block does so for segments: `--segment=N` divides the job, and each N
# nodes share a block (sbatch(1), 24.05). The performance scripts of Megatron-Bridge request the
# largest divisor of the nodes up to 18; here the segment also has to hold whole groups of the
# layout.


Ints = NDArray[np.int64]
# The first axes of a list of blocks: tp, cp, ep, whose messages delay every layer.
_NEAR = 3


def segment_choices(resources: ResourcesSpec, profile: ClusterProfile) -> tuple[int, ...]:
    """List the segments, in nodes, that the site accepts for this job, the smallest first.

    Divisors of all its sizes (planned, with spares, fewest) up to the usable nodes of a block; the
    spec's own where it names one. Empty where Slurm knows no blocks or none may be requested.
    """
    switches = profile.network.switches
    if switches.plugin != "block" or switches.segment_policy == "forbid":
        return ()
    if resources.segment is not None:
        return (resources.segment,)
    nodes = node_request(resources.gpus, profile.gpu.per_node).nodes
    spares = resources.spare_nodes
    common = gcd(nodes, nodes + spares, resources.min_nodes or nodes)
    most = switches.usable_nodes or 1
    return tuple(size for size in range(1, min(common, most) + 1) if common % size == 0)


def nvlink_domain(layout: Candidate, resources: ResourcesSpec, profile: ClusterProfile) -> int:
    """Return how many consecutive ranks of this layout Slurm keeps in one NVLink domain.

    Of the possible segments the one that cuts the groups of tp, cp, ep, dp and pp least, in this
    order; of equal ones the largest.
    """
    return int(_best(_blocks_of(layout), possible_domains(resources, profile))[0])


def possible_domains(
    resources: ResourcesSpec, profile: ClusterProfile, gpus: int | None = None
) -> tuple[int, ...]:
    """List how many consecutive ranks can share a domain, over all segments; the largest is last.

    Without segments racks are filled one after the other. `gpus`: on another number of GPUs than
    the spec's.
    """
    if gpus is not None and gpus != resources.gpus:
        changed = {"gpus": gpus, "segment": None, "spare_nodes": 0, "min_nodes": None}
        resources = resources.model_copy(update=changed)
    whole, per_node = profile.nvlink.domain, profile.gpu.per_node
    choices = (size * per_node for size in segment_choices(resources, profile))
    return tuple(size for size in choices if size <= whole) or (whole,)


def priced_domains(
    columns: Columns, resources: ResourcesSpec, profile: ClusterProfile
) -> NDArray[np.float64] | int:
    """Return for each row how many consecutive ranks the cost model may count as neighbours.

    `nvlink_domain`, but where its border cuts a group of tp, cp or ep: then the smallest part of
    such a group, the greatest common divisor of both. One number where the domain is not larger
    than a node.
    """
    whole = profile.nvlink.domain
    if whole <= profile.gpu.per_node or not len(columns):
        return whole
    blocks = _blocks_of(columns)
    domains = _best(blocks, possible_domains(resources, profile))
    smallest = domains
    for block in blocks[:_NEAR]:
        is_cut = domains % block != 0
        smallest = np.where(is_cut, np.minimum(smallest, np.gcd(domains, block)), smallest)
    return np.where(columns.gpus <= domains, domains, smallest).astype(float)


def requested_segment(
    layout: Candidate, resources: ResourcesSpec, profile: ClusterProfile
) -> int | None:
    """Choose the segment that the script requests, in nodes; None where it requests none.

    The spec's own; with `force` always one; with `auto` where a group of several nodes is inside.
    """
    choices, per_node = segment_choices(resources, profile), profile.gpu.per_node
    if not choices or resources.segment is not None:
        return resources.segment if choices else None
    forced = profile.network.switches.segment_policy == "force"
    if profile.nvlink.domain <= per_node:
        return choices[-1] if forced else None
    domain = nvlink_domain(layout, resources, profile)
    relies = any(block > per_node and domain % block == 0 for (block,) in _blocks_of(layout))
    return domain // per_node if forced or relies else None


def _best(blocks: Sequence[Ints], sizes: Sequence[int]) -> Ints:
    """Select for each row the size that leaves the largest parts of blocks together."""
    options = np.array(sizes, dtype=np.int64)[:, None]
    alive = np.ones((len(sizes), len(blocks[0])), dtype=bool)
    for block in blocks if len(sizes) > 1 else ():
        together = np.where(alive, np.gcd(options, block), 0)
        alive &= together == together.max(axis=0)
    return np.asarray((options * alive).max(axis=0))


def _blocks_of(at: LayoutValues[Any]) -> list[Ints]:
    """Multiply stride and size of tp, cp, ep, dp and pp; 1 for an axis of one rank: [layouts]."""
    tp, cp, ep, dp, pp, etp = (
        np.array(size, dtype=np.int64, ndmin=1)
        for size in (at.tp, at.cp, at.ep, at.dp, at.pp, at.expert_tp)
    )
    usual = at.order == ORDERS.index(DEFAULT_ORDER)
    near, world = tp * cp, tp * cp * dp * pp
    return [
        tp,
        np.where(cp > 1, near, 1),
        np.where(ep > 1, etp * ep, 1),
        np.where(dp > 1, np.where(usual, near * dp, world), 1),
        np.where(pp > 1, np.where(usual, world, near * pp), 1),
    ]


# -- Strides and spans of axes --------------------------------------------------------------------


def strides(layout: Layout) -> dict[Axis, int]:
    """Compute the distance of neighbouring ranks of each axis, the nearest axis first.

    `ep` in the order is where the groups of experts are built, over the ranks of tp, cp and dp;
    the dense mesh has no such axis (parallel_state.py, decoder_rank_generator with ep=1).
    """
    distances: dict[Axis, int] = {}
    stride = 1
    for axis in axes(layout):
        distances[axis] = stride
        stride *= getattr(layout, axis)
    return distances


def axes(layout: Layout) -> tuple[Axis, ...]:
    """List tp, cp, dp and pp from the nearest to the farthest."""
    known: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
    return tuple(sorted(known, key=layout.order.split("-").index))


def place_axes(
    layout: Layout,
    profile: ClusterProfile,
    request: NodeRequest | None = None,
    domain: int | None = None,
) -> tuple[AxisPlacement, ...]:
    """Locate tp, cp, dp and pp, and ep where there is one, in the order of the layout.

    `request` has the islands. `domain`: consecutive ranks in one NVLink domain (see
    `nvlink_domain`), the profile's by default.
    """
    domain = domain or profile.nvlink.domain
    if request is None:
        request = on_islands(node_request(layout.world_size, profile.gpu.per_node), profile)
    # nodes and domains, the smaller ones first
    blocks: list[tuple[int, Span]] = sorted(
        [(profile.gpu.per_node, "inside a node"), (domain, "inside an NVLink domain")],
        key=lambda block: block[0],
    )
    islands = slow_links(request, profile) if len(used_islands(request, profile)) > 1 else ()

    def span(stride: int, size: int) -> Span:
        if size == 1:
            return "one GPU"
        for ranks, inside in blocks:
            if stays_inside(stride, size, layout.world_size, ranks):
                return inside
        return "across islands" if crossing(stride, size, islands) else "across nodes"

    distances = strides(layout)
    if layout.ep > 1:  # the nearest of the experts' own mesh, but for tp inside of experts
        distances["ep"] = expert_tp(layout.tp, layout.ep, layout.etp)
    return tuple(
        AxisPlacement(
            axis=axis,
            size=getattr(layout, axis),
            stride=distances[axis],
            span=span(distances[axis], getattr(layout, axis)),
        )
        for axis in sorted(distances, key=layout.order.split("-").index)
    )


def stays_inside(stride: int, size: int, world_size: int, domain: int) -> bool:
    """Tell whether all groups of `size` ranks, `stride` apart, are inside blocks of `domain`.

    Groups tile blocks of stride x size consecutive ranks. If such blocks do not tile the domain,
    one of them lies across a border, and then some group in it has members on both sides.
    """
    return size == 1 or world_size <= domain or domain % (stride * size) == 0
