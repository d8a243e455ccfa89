"""Where ranks of axes are: nodes, NVLink domains, islands, and which axis spans slow links."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from specimens import GPT175B, LLAMA7B, cluster, run_spec

from hpctrain.base.errors import LimitError
from hpctrain.plan.cost.prediction import predict
from hpctrain.plan.documents import Layout, NodeRequest, Plan, Span
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.candidate import COLUMN_NAMES, Candidate, Columns, candidate_of, layout_of
from hpctrain.plan.mesh.placement import (
    Crossing,
    Island,
    crossing,
    groups_at_border,
    groups_inside,
    island_warnings,
    neighbours_outside,
    nvlink_domain,
    on_islands,
    place_axes,
    possible_domains,
    priced_domains,
    slow_links,
    stays_inside,
    wraps_outside,
)
from hpctrain.plan.mesh.rank_order import OrderChoice, choose_order, step_traffic, uplink_load
from hpctrain.plan.mesh.rules import refusals
from hpctrain.plan.planner import decide, make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec, ResourcesSpec, RunSpec


def placed(
    tp: int, pp: int, dp: int, cp: int = 1, ep: int = 1, **shape: int
) -> dict[str, tuple[int, str]]:
    layout = Layout(tp=tp, pp=pp, vpp=1, cp=cp, dp=dp, ep=ep, sequence_parallel=False)
    return {
        placement.axis: (placement.stride, placement.span)
        for placement in place_axes(layout, cluster(**shape))
    }


def test_strides_follow_the_rank_order_tp_cp_dp_pp() -> None:
    assert placed(tp=4, cp=2, dp=8, pp=2) == {
        "tp": (1, "inside a node"),
        "cp": (4, "inside a node"),
        "dp": (8, "across nodes"),
        "pp": (64, "across nodes"),
    }


@pytest.mark.parametrize(("ep", "span"), [(8, "inside a node"), (16, "across nodes")])
def test_experts_are_nearest_in_a_mesh_of_their_own(ep: int, span: str) -> None:
    """Not tp inside of experts, hence neighbours: mesh.py hands 1 to megatron-core with ep."""
    found = placed(tp=2, dp=16, pp=2, ep=ep)
    assert list(found) == ["tp", "cp", "ep", "dp", "pp"]
    assert found["ep"] == (1, span)
    assert "ep" not in placed(tp=2, dp=16, pp=2)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "shape", "spans"),
    [
        (1, 1, 1, {}, ("one GPU", "one GPU", "one GPU")),
        (2, 2, 2, {}, ("inside a node", "inside a node", "inside a node")),
        (8, 2, 1, {}, ("inside a node", "one GPU", "across nodes")),
        (16, 1, 2, {}, ("across nodes", "across nodes", "one GPU")),
        # NVL72: 18 nodes of 4 GPUs are one NVLink domain
        (
            8,
            9,
            2,
            dict(nodes=36, per_node=4, domain=72),
            ("inside an NVLink domain", "across nodes", "across nodes"),
        ),
        # pairs of GPUs with NVLink inside nodes of 8
        (
            2,
            1,
            4,
            dict(domain=2),
            ("inside an NVLink domain", "inside a node", "one GPU"),
        ),
        (4, 1, 2, dict(domain=2), ("inside a node", "inside a node", "one GPU")),
        # groups of 4 do not tile nodes of 6
        (4, 1, 3, dict(per_node=6, domain=6), ("across nodes", "across nodes", "one GPU")),
    ],
)
def test_spans(tp: int, pp: int, dp: int, shape: dict[str, int], spans: tuple[str, ...]) -> None:
    found = placed(tp, pp, dp, **shape)
    assert tuple(found[axis][1] for axis in ("tp", "dp", "pp")) == spans


def test_stays_inside_agrees_with_listing_the_groups() -> None:
    for domain in (2, 3, 4, 6, 8, 72):
        for stride in (1, 2, 3, 4, 8):
            for size in (2, 3, 4, 8):
                for blocks in (1, 2, 3, 9):
                    world = stride * size * blocks
                    if world > domain and world % domain:
                        continue  # whole domains only, as nodes are
                    groups = [
                        [start + offset + stride * member for member in range(size)]
                        for start in range(0, world, stride * size)
                        for offset in range(stride)
                    ]
                    inside = all(len({rank // domain for rank in group}) == 1 for group in groups)
                    assert stays_inside(stride, size, world, domain) == inside


# -- Islands ------------------------------------------------------------------------------------


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


# -- The NVLink domain that a job on racks of 18 nodes can rely on ------------------------------


RACK = load_profile(find_profile("gb200nvl72")).document
MOE: dict[str, Any] = dict(
    family="llama",
    layers=8,
    hidden=512,
    heads=64,
    vocab=512,
    seq=256,
    moe={"experts": 64, "top_k": 2, "ffn": 512},
)


def racks(count: int = 8, **switches: Any) -> ClusterProfile:
    """So many racks of 18 nodes with 4 GPUs, 16 of which a job may count on."""
    values = RACK.model_dump(mode="json", by_alias=True)
    values["nodes"]["count"] = 18 * count
    values["network"]["switches"] |= switches
    return ClusterProfile.model_validate(values)


def moe_run(nodes: int, resources: dict[str, Any] | None = None, **parallel: int) -> RunSpec:
    parallel = {"tp": 1, "pp": 1, **parallel}
    gpus = 4 * nodes
    return run_spec(MOE, gpus, gpus * 2, parallel=parallel, resources=resources)


def spans(plan: Plan) -> dict[str, Span]:
    return {one.axis: one.span for one in plan.placements}


RACK_COUNTS = range(2, 9)


@pytest.mark.parametrize("count", RACK_COUNTS)
def test_experts_on_64_gpus_stay_inside_a_rack(count: int) -> None:
    plan = make_plan(moe_run(16 * count, ep=64), racks())
    assert spans(plan)["ep"] == "inside an NVLink domain"
    assert (plan.nodes.segment, plan.nodes.domain) == (16, 64)
    forbidden = make_plan(moe_run(16 * count, ep=64), racks(segment="forbid"))
    assert spans(forbidden)["ep"] == "across nodes"
    assert forbidden.nodes.segment is None
    (warning,) = [text for text in forbidden.warnings if text.startswith("ep 64 would fit")]
    assert "no segments are requested here" in warning


@pytest.mark.parametrize("count", RACK_COUNTS)
def test_tensor_parallelism_of_four_nodes_stays_inside_a_rack(count: int) -> None:
    plan = make_plan(moe_run(16 * count, tp=16), racks())
    assert spans(plan)["tp"] == "inside an NVLink domain"
    assert plan.nodes.segment == 16
    assert not any("tp 16 leaves" in text for text in plan.warnings)
    old = make_plan(moe_run(16 * count, tp=16), racks(segment="forbid"))
    assert any("tp 16 leaves the NVLink domain" in text for text in old.warnings)


@pytest.mark.parametrize(
    ("nodes", "parallel", "switches", "segment"),
    [
        (1, {"tp": 4}, {}, None),
        (6, {"tp": 8}, {}, 6),  # one rack: without it the job may be spread over several
        (16, {}, {}, 16),
        (24, {"tp": 16}, {}, 12),
        (30, {"tp": 8}, {}, 10),  # 15 nodes would cut a group of two
        (36, {"tp": 8}, {}, 12),
        (36, {"tp": 8}, {"usable_per_leaf": None}, 18),
        (40, {"ep": 32}, {}, 8),
        (36, {"ep": 16}, {}, 12),
        (34, {"ep": 8}, {}, 2),
        (38, {"tp": 8}, {}, 2),
        (37, {"tp": 4}, {}, None),  # nothing divides it
        (32, {"tp": 4}, {}, None),  # no group of several nodes fits into a rack
        (32, {"tp": 4, "pp": 2}, {}, 16),  # dp does
        (32, {"tp": 4}, {"segment": "force"}, 16),
        (37, {"tp": 4}, {"segment": "force"}, 1),
        (1, {"tp": 4}, {"segment": "force"}, 1),
        (32, {"tp": 8}, {"segment": "forbid"}, None),
        (32, {"tp": 8}, {"request": False}, None),
        (32, {"tp": 8}, {"plugin": "tree"}, None),
    ],
)
def test_segments(
    nodes: int, parallel: dict[str, int], switches: dict[str, Any], segment: int | None
) -> None:
    spec = moe_run(nodes, **parallel)
    plan = make_plan(spec, racks(**switches))
    assert plan.nodes.segment == segment
    if segment is not None:
        assert nodes % segment == 0
        assert any(f"--segment={segment} puts" in text for text in plan.reasons)


def test_a_site_without_nvlink_between_nodes_may_still_want_segments() -> None:
    values = racks(segment="force").model_dump(mode="json", by_alias=True)
    values["nvlink"]["domain"] = 4
    plan = make_plan(moe_run(32, tp=4), ClusterProfile.model_validate(values))
    assert (plan.nodes.segment, plan.nodes.domain) == (16, 4)


def test_the_spec_names_a_segment() -> None:
    plan = make_plan(moe_run(32, {"segment": 8}, ep=64), racks())
    assert (plan.nodes.segment, plan.nodes.domain) == (8, 32)
    assert spans(plan)["ep"] == "across nodes"
    assert any("no segment of this job holds whole" in text for text in plan.warnings)
    alone = make_plan(moe_run(32, {"segment": 4}, tp=4), racks())
    assert alone.nodes.segment == 4, "although nothing relies on it"


@pytest.mark.parametrize(
    ("resources", "switches", "message"),
    [
        ({"segment": 12}, {}, "does not divide the 32 nodes of the run: nearest 24 or 36 nodes"),
        ({"segment": 32}, {}, "is above the 16 usable nodes of a block"),
        ({"segment": 16, "spare_nodes": 2}, {}, "does not divide the 34 nodes with spare ones"),
        ({"segment": 16, "min_nodes": 24}, {}, "does not divide the 24 nodes of resources.min"),
        ({"segment": 16}, {"segment": "forbid"}, "cluster gb200nvl72 takes no `--segment`"),
        ({"segment": 16}, {"plugin": "tree"}, "needs Slurm's topology/block (24.05 or newer)"),
    ],
)
def test_segments_that_are_refused(
    resources: dict[str, Any], switches: dict[str, Any], message: str
) -> None:
    with pytest.raises(LimitError) as caught:
        make_plan(moe_run(32, resources, tp=8), racks(**switches))
    assert message in str(caught.value)


def test_spare_nodes_and_fewer_nodes_keep_whole_segments() -> None:
    whole = make_plan(moe_run(32, {"spare_nodes": 16}, ep=64), racks())
    assert (whole.nodes.segment, spans(whole)["ep"]) == (16, "inside an NVLink domain")
    odd = make_plan(moe_run(32, {"spare_nodes": 2}, ep=64), racks())
    assert (odd.nodes.segment, spans(odd)["ep"]) == (None, "across nodes")
    assert any("no segment of this job holds whole" in text for text in odd.warnings)


def test_the_price_of_experts_follows_the_segment() -> None:
    """The search prices with the domain that the script requests."""
    inside, outside = racks(), racks(segment="forbid")
    spec = moe_run(32, ep=64)
    near = make_plan(spec, inside, knowledge_of(inside))
    far = make_plan(spec, outside, knowledge_of(outside))
    assert near.prediction is not None and far.prediction is not None
    parts, slow = near.prediction.parts, far.prediction.parts
    assert parts.expert_messages_seconds < slow.expert_messages_seconds
    assert near.scattered_step_seconds is not None and near.step_seconds is not None
    assert near.scattered_step_seconds > near.step_seconds


def test_a_search_prices_each_layout_with_its_own_segment() -> None:
    site, spec = racks(), run_spec(MOE, 144, 288, parallel="auto")
    found = decide(PlanRequest(spec, site, knowledge_of(site))).found
    rows = np.flatnonzero(np.isfinite(found.step_seconds))
    several = {}
    for row in rows:  # one row of each domain
        candidate = found.candidate(int(row))
        several.setdefault(nvlink_domain(candidate, spec.resources, site), int(row))
    assert len(several) > 1
    for row in several.values():
        alone = predict(found.request, found.candidate(row))
        assert alone is not None
        assert alone.parts.total_seconds == pytest.approx(found.step_seconds[row])


def layouts(world: int) -> Columns:
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16) if world % size == 0]
    rows = [
        (tp, cp, pp, ep, order)
        for tp, cp, pp, order in product(sizes, sizes, sizes, range(len(ORDERS)))
        for ep in (1, 4, 6, 16, 48, 64)
        if world % (tp * cp * pp) == 0 and world // (tp * pp) % ep == 0 and (ep == 1 or tp == 1)
    ]
    values = {name: np.zeros(len(rows), dtype=np.int32) for name in COLUMN_NAMES}
    names = ("tp", "cp", "pp", "ep", "order")
    values |= dict(zip(names, np.array(rows, dtype=np.int32).T, strict=True), vpp=values["tp"] + 1)
    return Columns(gpus=world, batch=1, layers=1, stages=None, **values)


@pytest.mark.parametrize("nodes", [12, 36])
@pytest.mark.parametrize("policy", ["auto", "forbid"])
def test_prices_agree_with_listing_the_groups(nodes: int, policy: str) -> None:
    """For each layout: the smallest part of a group of tp, cp or ep within one rack."""
    site, resources, world = racks(segment=policy), ResourcesSpec(gpus=4 * nodes), 4 * nodes
    every = layouts(world)
    assert len(every) > 50
    prices = np.broadcast_to(priced_domains(every, resources, site), len(every))
    for row, price in enumerate(prices):
        layout = every.candidate(row)
        domain = nvlink_domain(layout, resources, site)
        assert domain in possible_domains(resources, site)
        assert world % domain == 0 or policy == "forbid"
        counts = [domain]
        near = ((layout.tp, 1), (layout.tp * layout.cp, 1), (layout.ep, 1))
        for size, _ in near:
            if size == 1 or domain % size == 0 or world <= domain:
                continue
            starts = range(0, world, size)
            parts = [np.bincount(np.arange(start, start + size) // domain) for start in starts]
            counts.append(min(int(part[part > 0].min()) for part in parts))
        assert int(price) <= min(counts), layout
        if world <= domain:
            assert int(price) == domain


# -- The order of axes --------------------------------------------------------------------------


DATA_NEAR, PIPELINES_NEAR = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"
TWO_HALLS = archipelago(4, 4)


def case(batch: int, gpus: int = 64, **parallel: Any) -> tuple[RunSpec, Candidate]:
    """A 7B model with microbatches of one sequence."""
    spec = run_spec(LLAMA7B, gpus=gpus, batch=batch, parallel=parallel)
    assert isinstance(spec.parallel, ParallelSpec)
    return spec, candidate_of(spec, spec.parallel, gpus)


def chosen(spec: RunSpec, candidate: Candidate, profile: ClusterProfile = TWO_HALLS) -> OrderChoice:
    nodes = on_islands(node_request(candidate.layout.world_size, 8), profile)
    return choose_order(PlanRequest(spec, profile), candidate, nodes)


def test_bytes_of_a_step_by_hand() -> None:
    """LLAMA7B on tp 8, pp 2, dp 4, two halls of 32 GPUs, 32 sequences."""
    spec, candidate = case(32, tp=8, pp=2)
    traffic = step_traffic(PlanRequest(spec, TWO_HALLS), candidate)
    # half of the layers (4 h^2 + 3 h f each), two norms each, and one of two vocabulary matrices
    layer = (4 * 4096 * 4096 + 3 * 4096 * 11008) // 8 + 2 * 4096
    stage = 16 * layer + 32768 * 4096 // 8 + 4096  # the last one, with the final norm
    assert traffic.dense_ring_bytes == stage * (4 + 2) * 3 / 4
    assert traffic.expert_ring_bytes == 0
    assert traffic.message_bytes == 4096 * 4096 * 2 / 8  # bf16, split by sequence parallelism
    assert traffic.microbatches == 8
    east, _ = slow_links(on_islands(NodeRequest(nodes=8, gpus_per_node=8), TWO_HALLS), TWO_HALLS)
    near = uplink_load(candidate, DATA_NEAR, east, traffic)
    assert (near.gradients_bytes, near.activations_bytes) == (0, 32 * 4096 * 4096 * 2)
    far = uplink_load(candidate, PIPELINES_NEAR, east, traffic)
    assert (far.gradients_bytes, far.activations_bytes) == (16 * traffic.dense_ring_bytes, 0)
    assert near.seconds == near.activations_bytes / 12.5e9


def test_interleaving_sends_more_messages() -> None:
    spec, candidate = case(32, tp=8, pp=2, vpp=2)
    east, west = slow_links(on_islands(NodeRequest(nodes=8, gpus_per_node=8), TWO_HALLS), TWO_HALLS)
    traffic = step_traffic(PlanRequest(spec, TWO_HALLS), candidate)
    sequence = 4096 * 4096 * 2
    # out of the first stage: two chunks forward and, back from the second chunk, one gradient
    assert uplink_load(candidate, DATA_NEAR, east, traffic).activations_bytes == 32 * 3 * sequence
    assert uplink_load(candidate, DATA_NEAR, west, traffic).activations_bytes == 32 * 3 * sequence


def test_gradients_of_context_parallel_ranks_are_added_up_too() -> None:
    """tp 8, cp 2, dp 4: eight rings of eight ranks cross the border, not sixteen of four."""
    spec, candidate = case(32, tp=8, cp=2)
    traffic = step_traffic(PlanRequest(spec, TWO_HALLS), candidate)
    halls = slow_links(on_islands(NodeRequest(nodes=8, gpus_per_node=8), TWO_HALLS), TWO_HALLS)
    for island in halls:
        load = uplink_load(candidate, DATA_NEAR, island, traffic)
        assert load.gradients_bytes == 8 * traffic.dense_ring_bytes
        assert load.activations_bytes == 0  # no pipeline


def test_experts_have_rings_of_their_own() -> None:
    """Two halls of 32 GPUs; the numbers of crossing rings are counted by hand."""
    moe = dict(LLAMA7B, moe={"experts": 8, "top_k": 2, "ffn": 11008})
    for order, axes, dense_rings, expert_rings in [
        (DATA_NEAR, dict(ep=8), 1, 8),  # one ring of 64; eight of 8, 8 apart
        (PIPELINES_NEAR, dict(tp=2, ep=2, pp=2), 4, 4),  # of 16 each, 4 apart
        (DATA_NEAR, dict(tp=2, ep=2, pp=2), 0, 0),  # all in their halls
    ]:
        spec = run_spec(moe, gpus=64, batch=64, parallel={**axes, "order": order})
        assert isinstance(spec.parallel, ParallelSpec)
        candidate = candidate_of(spec, spec.parallel, 64)
        traffic = step_traffic(PlanRequest(spec, TWO_HALLS), candidate)
        assert traffic.expert_ring_bytes > traffic.dense_ring_bytes > 0
        request = on_islands(NodeRequest(nodes=8, gpus_per_node=8), TWO_HALLS)
        for island in slow_links(request, TWO_HALLS):
            load = uplink_load(candidate, order, island, traffic)
            assert load.gradients_bytes == (
                dense_rings * traffic.dense_ring_bytes + expert_rings * traffic.expert_ring_bytes
            )


def test_a_small_batch_sends_activations_and_a_large_one_gradients() -> None:
    small = chosen(*case(32, tp=8, pp=2))
    large = chosen(*case(4096, tp=8, pp=2))
    assert small.order == DATA_NEAR
    assert large.order == PIPELINES_NEAR
    assert len(small.reasons) == len(large.reasons) == 1
    assert small.reasons[0].startswith("order tp-cp-ep-dp-pp: a step sends 1.0 GiB of activations")
    assert "the other order" in small.reasons[0]


def test_the_choice_changes_where_the_times_are_equal() -> None:
    """Gradients do not grow with the batch, activations do: the order turns at their quotient."""
    spec, candidate = case(32, tp=8, pp=2)
    traffic = step_traffic(PlanRequest(spec, TWO_HALLS), candidate)
    per_sequence = traffic.message_bytes * 8
    turn = 16 * traffic.dense_ring_bytes / per_sequence
    below, above = int(turn) // 4 * 4, (int(turn) // 4 + 1) * 4
    assert chosen(*case(below, tp=8, pp=2)).order == DATA_NEAR
    assert chosen(*case(above, tp=8, pp=2)).order == PIPELINES_NEAR


def test_without_a_slow_link_the_order_is_megatrons() -> None:
    spec, candidate = case(4096, tp=8, pp=2)
    assert chosen(spec, candidate, cluster()) == OrderChoice(DATA_NEAR, ())
    one_hall = archipelago(16, 16)
    assert chosen(spec, candidate, one_hall) == OrderChoice(DATA_NEAR, ())


def test_the_spec_wins_and_is_told_what_it_costs() -> None:
    spec, candidate = case(32, tp=8, pp=2, order=PIPELINES_NEAR)
    choice = chosen(spec, candidate)
    assert choice.order == PIPELINES_NEAR
    assert "as the spec says" in choice.reasons[0]
    assert "the other order 1.0 GiB of activations" in choice.reasons[0]


def test_one_axis_alone_has_no_order() -> None:
    assert chosen(*case(4096, tp=8)) == OrderChoice(DATA_NEAR, ())  # pp 1
    assert chosen(*case(32, gpus=64, tp=8, pp=8)) == OrderChoice(DATA_NEAR, ())  # dp 1


def test_an_order_that_megatron_refuses_is_not_chosen() -> None:
    spec, candidate = case(4096, tp=4, pp=2, cp=2)
    values = replace(candidate, order=1)
    assert refusals(PlanRequest(spec, TWO_HALLS), values) == [
        "order tp-cp-ep-pp-dp is not possible with pp 2: megatron-core needs tp x cp = 8 to be "
        "expert tp x ep = 4; use tp-cp-ep-dp-pp"
    ]
    assert refusals(PlanRequest(spec, TWO_HALLS), replace(values, order=0)) == []
    choice = chosen(spec, candidate)
    assert choice == OrderChoice(DATA_NEAR, ())


@pytest.mark.parametrize("order", [DATA_NEAR, PIPELINES_NEAR])
def test_oversubscribed_leaves_count(order: str) -> None:
    network = {
        "fabric": "infiniband",
        "nics_per_node": 8,
        "nic_bandwidth": "200Gb/s",
        "switches": {"plugin": "tree", "nodes_per_leaf": 4, "oversubscription": 2},
    }
    batch = 32 if order == DATA_NEAR else 4096
    assert chosen(*case(batch, tp=8, pp=2), cluster(nodes=8, network=network)).order == order


def test_layouts_carry_the_order_of_the_spec() -> None:
    assert layout_of(ParallelSpec(), 8).order == DATA_NEAR
    assert layout_of(ParallelSpec(order=PIPELINES_NEAR), 8).order == PIPELINES_NEAR


def test_a_large_model_keeps_its_gradients_at_home() -> None:
    spec = run_spec(GPT175B, gpus=64, batch=64, parallel=dict(tp=8, pp=4))
    assert isinstance(spec.parallel, ParallelSpec)
    choice = chosen(spec, candidate_of(spec, spec.parallel, 64))
    assert choice.order == DATA_NEAR and "gradients" in choice.reasons[0]
