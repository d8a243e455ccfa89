"""Assign nodes of a run to islands, and count the groups of ranks that cross slow links.

Slurm numbers the ranks of `--distribution=block` along the nodes in the order of their names
(srun(1); tests/slurm/test_rank_order.py checks a real one), and an island of the profile is a run
of names. So the ranks of one island are consecutive, and everything here is counting intervals.
Belongs here: nodes of each island, crossing groups, their share of an uplink. Does not belong
here: which axis ought to cross (`rank_order`), or the options of Slurm (`hpctrain.job.render`).

A group is `size` ranks, `stride` apart; groups tile blocks of stride x size consecutive ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.plan.documents import NodeRequest
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import IslandProfile


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
        return _intervals(
            nodes, [float(island.uplink) for island in islands], request.gpus_per_node
        )
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
