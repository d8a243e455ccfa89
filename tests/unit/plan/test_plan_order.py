from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from specimens import GPT175B, LLAMA7B, cluster, run_spec
from test_plan_islands import archipelago

from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.candidate import Candidate, candidate_of, layout_of
from hpctrain.plan.mesh.placement import on_islands, slow_links
from hpctrain.plan.mesh.rank_order import (
    OrderChoice,
    choose_order,
    step_traffic,
    uplink_load,
)
from hpctrain.plan.mesh.rules import refusals
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec, RunSpec

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
