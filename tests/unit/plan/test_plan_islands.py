from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from specimens import cluster

from hpctrain.plan.documents import Layout, NodeRequest
from hpctrain.plan.mesh.placement import (
    Crossing,
    Island,
    crossing,
    groups_at_border,
    groups_inside,
    island_warnings,
    neighbours_outside,
    on_islands,
    place_axes,
    slow_links,
    wraps_outside,
)
from hpctrain.spec.profile import ClusterProfile

UPLINK = "100Gb/s"


def archipelago(*sizes: int, **island: Any) -> ClusterProfile:
    """A cluster with islands of so many nodes each."""
    islands = [{"nodes": nodes, "uplink": UPLINK, **island} for nodes in sizes]
    return with_islands(islands)


def with_islands(islands: list[dict[str, Any]], **switches: Any) -> ClusterProfile:
    network = {
        "fabric": "infiniband",
        "nics_per_node": 8,
        "nic_bandwidth": "200Gb/s",
        "islands": islands,
        "switches": switches,
    }
    nodes = sum(island["nodes"] for island in islands) or 64
    return cluster(nodes=nodes, network=network)


def placed_on(nodes: int, profile: ClusterProfile) -> tuple[int, ...]:
    return on_islands(NodeRequest(nodes=nodes, gpus_per_node=8), profile).island_nodes


# -- which nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "nodes", "expected"),
    [
        ((4, 4), 1, (1, 0)),
        ((4, 4), 4, (4, 0)),
        ((4, 4), 5, (4, 1)),  # five do not halve
        ((4, 4), 6, (3, 3)),
        ((4, 4), 8, (4, 4)),
        ((2, 6), 4, (0, 4)),  # one island is enough
        ((2, 6), 8, (2, 6)),  # halves do not fit
        ((4, 8, 4), 12, (4, 8, 0)),  # the fewest islands, the largest first
        ((4, 4, 4), 9, (3, 3, 3)),
    ],
)
def test_nodes_of_each_island(
    sizes: tuple[int, ...], nodes: int, expected: tuple[int, ...]
) -> None:
    assert placed_on(nodes, archipelago(*sizes)) == expected


def test_no_islands_and_too_few_nodes() -> None:
    assert placed_on(4, cluster()) == ()
    assert placed_on(9, archipelago(4, 4)) == ()


def test_a_warning_where_slurm_cannot_be_told() -> None:
    silent, named = (
        archipelago(4, 4),
        with_islands(
            [{"nodes": 4, "uplink": UPLINK, "feature": name} for name in ("east", "west")]
        ),
    )
    part = NodeRequest(nodes=6, gpus_per_node=8)
    assert "no `feature`" in island_warnings(on_islands(part, silent), silent)[0]
    assert island_warnings(on_islands(part, named), named) == ()
    whole = NodeRequest(nodes=8, gpus_per_node=8)
    assert island_warnings(on_islands(whole, silent), silent) == ()


# -- slow links ----------------------------------------------------------------------------------


def test_intervals_of_ranks() -> None:
    profile = archipelago(4, 4)
    request = on_islands(NodeRequest(nodes=6, gpus_per_node=8), profile)
    assert slow_links(request, profile) == (Island(0, 24, 12.5e9), Island(24, 48, 12.5e9))
    alone = on_islands(NodeRequest(nodes=4, gpus_per_node=8), profile)
    assert slow_links(alone, profile) == ()


def test_leaves_with_a_thin_uplink_are_islands_too() -> None:
    thin = with_islands([], plugin="tree", nodes_per_leaf=16, oversubscription=4)
    request = NodeRequest(nodes=24, gpus_per_node=8)
    uplink = 16 * 8 * 25e9 / 4
    assert slow_links(request, thin) == (Island(0, 128, uplink), Island(128, 192, uplink))
    full = with_islands([], plugin="tree", nodes_per_leaf=16)
    assert slow_links(request, full) == ()
    assert slow_links(NodeRequest(nodes=16, gpus_per_node=8), thin) == ()


# -- counting, against lists of ranks ------------------------------------------------------------


def listed(stride: int, size: int, world: int) -> list[list[int]]:
    block = stride * size
    return [
        [start + offset + stride * member for member in range(size)]
        for start in range(0, world, block)
        for offset in range(stride)
    ]


CASES = [
    (stride, size, copies, start, end)
    for stride, size, copies in product((1, 2, 3, 4), (2, 3, 4), (1, 2, 3))
    for start in range(stride * size * copies)
    for end in range(start + 1, stride * size * copies + 1)
]


def test_counts_are_those_of_the_listed_groups() -> None:
    assert len(CASES) > 4000
    for stride, size, copies, start, end in CASES:
        world, island = stride * size * copies, Island(start, end, 1.0)
        inside = [[start <= rank < end for rank in g] for g in listed(stride, size, world)]
        case = (stride, size, copies, start, end)
        assert groups_inside(stride, size, island) == sum(map(all, inside)), case
        border = sum(any(group) and not all(group) for group in inside)
        assert groups_at_border(stride, size, island) == border, case


def test_messages_are_those_of_the_listed_chains() -> None:
    for stride, size, copies, start, end in CASES:
        island = Island(start, end, 1.0)
        chains = listed(stride, size, stride * size * copies)

        def out(sender: int, receiver: int, island: Island = island) -> bool:
            inside = range(island.start, island.end)
            return sender in inside and receiver not in inside

        steps = [pair for chain in chains for pair in pairwise(chain)]
        forward = sum(out(a, b) for a, b in steps)
        backward = sum(out(b, a) for a, b in steps)
        case = (stride, size, copies, start, end)
        assert neighbours_outside(stride, size, island) == (forward, backward), case
        wraps = sum(out(chain[-1], chain[0]) for chain in chains)
        returns = sum(out(chain[0], chain[-1]) for chain in chains)
        assert wraps_outside(stride, size, island) == (wraps, returns), case


def test_the_groups_that_cross_share_the_uplink() -> None:
    """32 + 32 ranks, tp 8, dp 4, pp 2: pipelines cross in the default order, dp groups do not."""
    halves = (Island(0, 32, 12.5e9), Island(32, 64, 12.5e9))
    assert crossing(1, 8, halves) is None
    assert crossing(8, 4, halves) is None
    assert crossing(32, 2, halves) == Crossing(32, 32, 12.5e9 / 32)
    assert crossing(16, 4, halves) == Crossing(16, 16, 12.5e9 / 16)
    assert crossing(1, 1, halves) is None and crossing(8, 4, ()) is None


def test_the_busiest_uplink_is_the_one_that_leaves_least() -> None:
    uneven = (Island(0, 8, 4e9), Island(8, 16, 1e9))
    assert crossing(8, 2, uneven) == Crossing(8, 8, 1e9 / 8)


def test_spans_across_islands() -> None:
    profile = archipelago(4, 4)

    def spans(order: str, tp: int, pp: int, dp: int) -> dict[str, str]:
        layout = Layout(tp=tp, pp=pp, vpp=1, cp=1, dp=dp, sequence_parallel=False, order=order)
        return {one.axis: one.span for one in place_axes(layout, profile)}

    near, far = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"
    assert spans(near, 8, 2, 4)["pp"] == "across islands"
    assert spans(near, 8, 2, 4)["dp"] == "across nodes"
    assert spans(far, 8, 2, 4)["pp"] == "across nodes"
    assert spans(far, 8, 2, 4)["dp"] == "across islands"
    assert spans(near, 8, 2, 2) == {
        "tp": "inside a node",
        "cp": "one GPU",
        "dp": "across nodes",
        "pp": "across nodes",
    }  # four nodes are one island
