from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from specimens import LLAMA7B, cluster, run_spec

from hpctrain.plan.cost.from_spec import software_of
from hpctrain.plan.cost.prediction import crossed_islands, predict, shown_seconds, uplink_seconds
from hpctrain.plan.mesh.candidate import candidate_of, columns_of
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.plan.planner import decide, make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import search
from hpctrain.plan.search.space import freedom_of
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec

SMALL = {**LLAMA7B, "layers": 8, "hidden": 1024, "heads": 8, "ffn": 2816, "seq": 1024}


def halls(uplink: str, nodes: int = 2) -> ClusterProfile:
    """Two halls of `nodes` nodes each."""
    islands = [{"nodes": nodes, "uplink": uplink} for _ in range(2)]
    network = {"fabric": "infiniband", "nics_per_node": 8, "nic_bandwidth": "200Gb/s"}
    return cluster(nodes=2 * nodes, network={**network, "islands": islands})


def test_one_island_adds_nothing() -> None:
    assert crossed_islands(16, halls("10Gb/s")) == ()
    assert len(crossed_islands(32, halls("10Gb/s"))) == 2
    assert crossed_islands(32, cluster()) == ()


def test_the_ring_of_all_gradients_crosses_once() -> None:
    spec = run_spec(SMALL, gpus=32, batch=32)
    one = candidate_of(spec, ParallelSpec(), 32)
    gradients, activations = uplink_seconds(
        PlanRequest(spec, halls("100Gb/s")),
        columns_of(one),
        crossed_islands(32, halls("100Gb/s")),
    )
    # ZeRO-1: 4 bytes reduced and 2 gathered of every parameter, 31 / 32 of it over each link of
    # the one ring; 100 Gb/s are 12.5e9 bytes/s
    expected = 6 * total_parameters(spec.model) * 31 / 32 / 12.5e9
    assert gradients[0] == pytest.approx(expected, rel=0.01)  # the padded vocabulary
    assert activations[0] == 0


def test_pipelines_across_the_border_send_activations_instead() -> None:
    spec = run_spec(SMALL, gpus=32, batch=32)
    parallel = ParallelSpec(pp=2, order="tp-cp-ep-dp-pp")
    one = candidate_of(spec, parallel, 32)
    gradients, activations = uplink_seconds(
        PlanRequest(spec, halls("100Gb/s")),
        columns_of(one),
        crossed_islands(32, halls("100Gb/s")),
    )
    # 16 pipelines with 2 microbatches each: an activation forth, over each direction of the link
    assert activations[0] == pytest.approx(16 * 2 * 2 * 1024 * 1024 / 12.5e9)
    assert gradients[0] == 0


def test_no_step_is_shorter_than_its_uplink_is_busy() -> None:
    spec = run_spec(SMALL, gpus=32, batch=32)
    columns = columns_of(candidate_of(spec, ParallelSpec(), 32))
    software = software_of(knowledge_of(cluster()).calibration.software["megatron-core"])
    step, none = np.array([1.0]), np.array([0.0])

    def shown(gradients: float, activations: float, charged: float = 0.0) -> float:
        loads, data = (np.array([gradients]), np.array([activations])), none + charged
        return float(shown_seconds(columns, software, step, data, loads)[0])

    assert shown(0, 0) == 0
    assert shown(0.5 * software.dp_overlap, 0) == 0  # behind the only microbatch
    assert shown(10, 0) == pytest.approx(10 - software.dp_overlap)
    # what the cost model has for the same messages counts once
    overlap = software.dp_overlap
    assert shown(overlap + 0.5, 0, charged=0.2) == pytest.approx(max(0.3, overlap - 0.5))
    assert 1 + shown(0, 100) >= 100
    # between whole passes of a stage nothing hides
    assert shown(0, 0.5) == pytest.approx(0.5)
    columns = columns_of(candidate_of(spec, ParallelSpec(pp=2, vpp=2), 32))
    assert shown(0, 0.5) == pytest.approx(0.5 * (1 - software.pp_overlap))


@pytest.mark.parametrize("uplink", ["400Gb/s", "10Gb/s"])
def test_the_search_prices_islands_as_the_plan_does(uplink: str) -> None:
    profile = halls(uplink)
    known = knowledge_of(profile)
    spec = run_spec(SMALL, gpus=32, batch=64, micro="auto", recompute="none")
    request = PlanRequest(spec, profile, known)
    found = search(request, freedom_of(request))
    for row in range(0, len(found.columns), 29):
        prediction = predict(PlanRequest(spec, profile, known), found.candidate(row))
        assert prediction is not None
        assert prediction.parts.total_seconds == pytest.approx(found.step_seconds[row])


def test_a_slow_link_costs_time_and_changes_the_layout() -> None:
    spec = run_spec(SMALL, gpus=32, batch=64, micro="auto", recompute="none")
    plans = []
    for uplink in ("1600Gb/s", "100Gb/s", "1Gb/s"):
        profile = halls(uplink)
        plans.append(make_plan(spec, profile, knowledge_of(profile)))
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds) and seconds[0] < 0.5 * seconds[2]
    assert plans[0].layout != plans[2].layout
    assert all(plan.prediction and plan.prediction.parts.islands_seconds >= 0 for plan in plans)


@pytest.mark.parametrize("parallel", ["auto", dict(pp=2, count_loss=True), dict(pp=2)])
def test_order_and_split_of_a_plan_on_islands(parallel: Any) -> None:
    model = {**SMALL, "layers": 7} if isinstance(parallel, dict) and len(parallel) > 1 else SMALL
    profile = halls("10Gb/s")
    spec = run_spec(model, gpus=32, batch=64, micro="auto", parallel=parallel)
    decision = decide(PlanRequest(spec, profile, knowledge_of(profile)))
    row = decision.row
    assert decision.plan.step_seconds == pytest.approx(decision.found.step_seconds[row])
    assert decision.plan.layout.order == decision.found.candidate(row).layout.order
