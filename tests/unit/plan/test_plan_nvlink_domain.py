"""The NVLink domain that a job on racks of 18 nodes can rely on: by segment, layout and site."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from specimens import run_spec

from hpctrain.base.errors import LimitError
from hpctrain.plan.cost.prediction import predict
from hpctrain.plan.documents import Plan, Span
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.mesh.candidate import COLUMN_NAMES, Columns
from hpctrain.plan.mesh.placement import nvlink_domain, possible_domains, priced_domains
from hpctrain.plan.planner import decide, make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ResourcesSpec, RunSpec

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
