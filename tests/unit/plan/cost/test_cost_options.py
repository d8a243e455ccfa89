"""Options of production in the cost formulas: by hand, and in which direction they go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cost_specimens import NEVER, case, changed, drawn, many, only_products, pipeline
from planned_job import planned_job
from planner_knowledge import knowledge_of

from hpctrain.engines.training import speed_check_config, speed_check_mode
from hpctrain.plan.cost.blocks import (
    attention,
    dispatch_messages,
    own_rows,
    routed_rows,
    shared_expert,
)
from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.memory import (
    activation_bytes,
    host_bytes,
    kept_bytes,
    peak_bytes,
    stage_memory,
    stages_that_matter,
)
from hpctrain.plan.cost.prediction import ExpectedSpeed, expected_speed
from hpctrain.plan.cost.step import bubble_seconds, late_gradients, stages_of, step_seconds
from hpctrain.plan.cost.weights import all_blocks, moe_weights
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.spec.loader import find_profile, load_calibration, load_profile, load_run_spec

EXPERTS: dict[str, Any] = dict(
    mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=512, expert_hidden=1024
)
PLAIN = changed(
    many(drawn(seed=34, count=120)),
    low=0,
    low_bytes=0.0,
    full_layers=0,
    deferred_output=0,
    gradient_copy=0,
    etp=0,
    shared_overlap=0,
)
MESH = PLAIN.mesh
PIPELINES, EXPERT_MODELS = np.asarray(MESH.pp) > 1, np.asarray(PLAIN.shape.moe_blocks) > 0


def seconds(one: Case) -> Any:
    return np.asarray(step_seconds(one).total, dtype=float)


class TestDirections:
    """Over 120 models and layouts; the second figure is of rows that an option may touch."""

    def test_bf16_gradients_save_memory_and_messages_of_replicas(self) -> None:
        narrow = changed(PLAIN, gradient_bytes=2, gradient_copy=4)
        wide, less = peak_bytes(PLAIN), peak_bytes(narrow)
        shared = np.asarray(MESH.zero) >= 1  # over at least two replicas: 2 + 4 / 2 bytes
        assert np.all(less[shared] <= wide[shared]) and np.any(less < wide)
        assert np.all(seconds(narrow) <= seconds(PLAIN)) and np.any(
            seconds(narrow) < seconds(PLAIN)
        )

    def test_forms_in_eight_bits_take_memory_and_save_it_where_they_are_the_only_ones(self) -> None:
        besides, instead = changed(PLAIN, low_bytes=2), changed(PLAIN, low_bytes=1, low_only=1)
        assert np.all(peak_bytes(besides) > peak_bytes(PLAIN))
        assert np.all(peak_bytes(instead) < peak_bytes(PLAIN))

    def test_eight_bit_products_and_messages_are_never_slower_but_for_what_they_add(self) -> None:
        # small products have more to quantise and to launch than they win
        free = changed(PLAIN, layer_overhead=0.0, expert_overhead=0.0, memory_bandwidth=NEVER)
        low = changed(free, low=1, low_efficiency=PLAIN.machine.product_efficiency)
        assert np.all(seconds(low) < seconds(free))
        gathered = seconds(changed(low, gather_bytes=1))
        assert np.all(gathered <= seconds(low)) and np.any(gathered < seconds(low))

    def test_fewer_layers_computed_again_take_more_memory_and_less_time(self) -> None:
        full = changed(PLAIN, recompute=2)
        some = [changed(full, full_layers=layers) for layers in (1, 2, 4)]
        peaks = np.array([peak_bytes(one) for one in (*some, full)])
        times = np.array([seconds(one) for one in (*some, full)])
        assert np.all(np.diff(peaks, axis=0) <= 1e-3) and np.any(np.diff(peaks, axis=0) < 0)
        assert np.all(np.diff(times, axis=0) >= -1e-12) and np.any(np.diff(times, axis=0) > 0)

    def test_activations_on_the_host_save_memory_and_never_time(self) -> None:
        alone = changed(PLAIN, pp=1, vpp=1, recompute=0)
        peaks = np.array([peak_bytes(changed(alone, kept_on_host=n)) for n in (0, 1, 2, 4)])
        times = np.array([seconds(changed(alone, kept_on_host=n)) for n in (0, 1, 2, 4)])
        assert np.all(np.diff(peaks, axis=0) <= 0) and np.any(np.diff(peaks, axis=0) < 0)
        assert np.all(np.diff(times, axis=0) >= 0) and np.any(np.diff(times, axis=0) > 0)

    def test_userbuffers_a_dispatcher_and_a_shared_expert_hide_messages(self) -> None:
        for changes, touched in (
            (dict(tp_overlap=0.9), np.asarray(MESH.tp) > 1),
            (dict(ep_overlap=0.9), EXPERT_MODELS & (np.asarray(MESH.ep) > 1)),
            (dict(shared_overlap=1), EXPERT_MODELS & (np.asarray(PLAIN.shape.shared_ffn) > 0)),
        ):
            hidden = seconds(changed(PLAIN, **changes))
            assert np.all(hidden <= seconds(PLAIN)), changes
            assert np.any(hidden[touched] < seconds(PLAIN)[touched]), changes
            assert np.array_equal(hidden[~touched], seconds(PLAIN)[~touched]), changes
            assert np.array_equal(peak_bytes(changed(PLAIN, **changes)), peak_bytes(PLAIN)), changes

    def test_a_deferred_gradient_takes_memory_of_the_last_stage_only(self) -> None:
        waiting = changed(PLAIN, deferred_output=50)
        first, _, last = stages_that_matter(PLAIN)
        more = activation_bytes(waiting, last) - activation_bytes(PLAIN, last)
        assert np.all(more > 0)
        same = activation_bytes(waiting, first) - activation_bytes(PLAIN, first)
        assert np.all(same[PIPELINES] == 0)

    def test_experts_that_are_split_further_take_less_and_send_more(self) -> None:
        whole = changed(PLAIN, ep=2, etp=1, tp=2, sequence_parallel=1)
        split = changed(whole, etp=2)
        routed = [moe_weights(one)[1] for one in (whole, split)]
        assert routed[1] == pytest.approx(routed[0] / 2)
        shown = [dispatch_messages(one).forward_messages for one in (whole, split)]
        assert np.all(shown[1][EXPERT_MODELS] > shown[0][EXPERT_MODELS])


class TestExpertTensorParallelism:
    def test_the_default_is_one_with_expert_parallelism_else_tp(self) -> None:
        assert [float(case(tp=4, ep=ep).mesh.expert_tp) for ep in (1, 2)] == [4, 1]
        assert float(case(tp=4, ep=2, etp=2).mesh.expert_tp) == 2
        assert float(case(tp=4, ep=1, etp=1).mesh.expert_tp) == 1

    def test_ranks_that_split_an_expert_see_the_tokens_of_all_of_them(self) -> None:
        one = case(**EXPERTS, tp=4, ep=2, etp=2, sequence_parallel=1)
        assert own_rows(one) == 2048 * 2 / 4
        assert routed_rows(one) == 2 * 2048 * 2 / 4

    def test_they_gather_and_reduce_in_the_open(self) -> None:
        one = case(**EXPERTS, tp=2, ep=1, sequence_parallel=1, ep_overlap=0.9)
        # [T top_k, h] of bf16 twice over 2 ranks of NVLink, half of it each time, and its start
        moved = 2 * 2048 * 2 * 1024 / 2
        expected = 2 * (moved / 1e11 + 6e-6 * np.log2(3))
        assert dispatch_messages(one).forward_messages == pytest.approx(expected)

    def test_whole_experts_send_nothing_more(self) -> None:
        alone = case(**EXPERTS, tp=1, ep=1)
        assert dispatch_messages(alone).forward_messages == 0

    def test_replicas_of_an_expert_are_fewer(self) -> None:
        sizes = [case(dp=8, tp=2, ep=4, etp=etp).mesh.expert_replicas for etp in (1, 2)]
        assert sizes == [4, 2]


class TestRecomputedLayers:
    FULL = pipeline(2, 8, recompute=2)

    @pytest.mark.parametrize(("count", "vpp", "share"), [(1, 1, 0.25), (1, 2, 0.5), (9, 1, 1.0)])
    def test_a_count_is_of_each_chunk(self, count: int, vpp: int, share: float) -> None:
        counted = changed(self.FULL, full_layers=count, vpp=vpp)
        shared = changed(self.FULL, full_share=share, vpp=vpp)
        assert step_seconds(counted).recompute == pytest.approx(step_seconds(shared).recompute)
        assert peak_bytes(counted) == pytest.approx(peak_bytes(shared))

    def test_each_stage_has_its_own_share(self) -> None:
        uneven = changed(self.FULL, layers_first=2, layers_last=6, full_layers=2)
        first, _, last = stages_that_matter(uneven)
        whole = kept_bytes(changed(uneven, full_layers=0), first.blocks)
        assert kept_bytes(uneven, first.blocks) == pytest.approx(whole)
        a_third = changed(uneven, full_layers=0, full_share=1 / 3)
        assert kept_bytes(uneven, last.blocks) == pytest.approx(kept_bytes(a_third, last.blocks))

    def test_the_time_of_a_stage_is_that_of_its_own_layers(self) -> None:
        products = only_products(recompute=2, pp=2, layers_first=2, layers_last=6)
        again = stages_of(changed(products, full_layers=2)).slowest.again
        layer = stages_of(products).slowest.again / 6
        assert again == pytest.approx(2 * layer)

    def test_token_prediction_layers_are_left_alone(self) -> None:
        predicting = changed(self.FULL, mtp_layers=1)
        again = [
            float(stages_of(changed(one, full_layers=4)).slowest.again)
            for one in (self.FULL, predicting)
        ]
        assert again[0] == pytest.approx(again[1])
        assert stages_of(predicting).slowest.again > again[1]


class TestHost:
    ONE = case(recompute=0)

    def test_so_many_layers_are_on_the_host(self) -> None:
        layer = kept_bytes(self.ONE, all_blocks(self.ONE)) / 8
        assert host_bytes(changed(self.ONE, kept_on_host=3)) == pytest.approx(3 * layer)
        assert host_bytes(self.ONE) == 0

    def test_one_of_them_is_on_its_way(self) -> None:
        stage = stages_that_matter(self.ONE)[0]
        layer = kept_bytes(self.ONE, stage.blocks) / 8
        left = [activation_bytes(changed(self.ONE, kept_on_host=n), stage) for n in (0, 1, 3)]
        assert left[0] == left[1]
        assert left[0] - left[2] == pytest.approx(2 * layer)

    def test_copies_hide_behind_a_whole_pass(self) -> None:
        moved = float(host_bytes(changed(self.ONE, kept_on_host=4)))
        stages = stages_of(self.ONE)
        for rate in (1e9, 1e14):
            slow = changed(self.ONE, kept_on_host=4, host_bandwidth=rate)
            passes = (float(stages.first_forward), float(stages.last_backward))
            shown = sum(max(moved / rate - one, 0.0) for one in passes)
            assert step_seconds(slow).activation_messages == pytest.approx(shown)
        assert shown == 0


class TestDeferredGradients:
    ONE = only_products(pp=4, accumulation=8, layers_first=2, layers_middle=2, layers_last=2)

    def test_the_last_stage_does_without_them_in_every_microbatch(self) -> None:
        backward = [
            stages_of(one).slowest.backward
            for one in (self.ONE, changed(self.ONE, deferred_output=50))
        ]
        one_of_three = 2 * 2048 * 1024 * 51200 / 1e15
        assert backward[0] - backward[1] == pytest.approx(one_of_three)

    def test_what_two_thirds_of_the_bubble_do_not_hide_is_computed_at_the_end(self) -> None:
        waiting = changed(self.ONE, deferred_output=50)
        late = 8 * 2 * 2048 * 1024 * 51200 / 1e15
        bubble = bubble_seconds(waiting, stages_of(waiting), 0.0)
        assert 0 < 2 / 3 * bubble < late
        assert late_gradients(waiting, bubble) == pytest.approx(late - 2 / 3 * bubble)
        assert late_gradients(waiting, 10 * bubble) == 0
        assert late_gradients(self.ONE, bubble) == 0

    def test_inputs_and_gradients_of_all_microbatches_are_kept(self) -> None:
        last = stages_that_matter(self.ONE)[2]
        more = activation_bytes(changed(self.ONE, deferred_output=50), last)
        more -= activation_bytes(self.ONE, last)
        assert more == pytest.approx(8 * 2 * 2048 * (1024 + 51200))

    def test_no_more_of_them_than_the_limit(self) -> None:
        last = stages_that_matter(self.ONE)[2]
        limited = changed(self.ONE, deferred_output=2)
        more = activation_bytes(limited, last) - activation_bytes(self.ONE, last)
        assert more == pytest.approx(2 * 2 * 2048 * (1024 + 51200))
        of_one = 2 * 2048 * 1024 * 51200 / 1e15
        assert late_gradients(limited, 0.0) == pytest.approx(2 * of_one)
        backward = [stages_of(one).slowest.backward for one in (self.ONE, limited)]
        assert backward[0] - backward[1] == pytest.approx(2 / 8 * of_one)


def test_fp32_copies_of_gradients_count_where_they_outweigh_activations() -> None:
    stage = stages_that_matter(case(gradient_bytes=2))[0]
    small, large = case(gradient_bytes=2, seq=16, vocab=0), case(gradient_bytes=2, seq=8192)
    for one, counts in ((small, True), (large, False)):
        copied = changed(one, gradient_copy=4)
        parts = [stage_memory(each, stage) for each in (one, copied)]
        optimizer = parts[1].optimizer / 12 * 4
        step = parts[0].activations + parts[0].logits + parts[0].buffers
        more = parts[1].total - parts[0].total
        assert more == pytest.approx(max(optimizer - step, 0.0)) and (more > 0) == counts


def test_a_shared_expert_hides_messages_as_long_as_it_takes() -> None:
    shape = {**EXPERTS, "shared_ffn": 8192}
    for rate in (1e8, 1e14):
        one = case(**shape, ep=8, nvlink_bandwidth=rate, domain=8)
        beside = changed(one, shared_overlap=1)
        sent, hidden = dispatch_messages(one), shared_expert(one)
        expected = 8 * (
            max(float(sent.forward_messages - hidden.forward), 0.0)
            + max(float(sent.backward_messages - hidden.backward), 0.0)
        )
        assert stages_of(beside).slowest.experts == pytest.approx(expected)
    assert expected == 0 and attention(beside).forward == attention(one).forward


# -- Sums of gradients in fewer bytes: what they save is a matter of the link -------------------


EXAMPLE = Path(__file__).resolve().parents[4] / "examples/bert-4nodes"


def planned(profile: str, hook: str, gpus: int = 32) -> Plan:
    changes = [f"engine.ddp.hook={hook}", f"resources.gpus={gpus}"]
    spec = load_run_spec(EXAMPLE / "full.yaml", changes).document
    site = load_profile(find_profile(profile)).document
    return make_plan(spec, site, knowledge_of(site))


def planned_seconds(profile: str, hook: str, gpus: int = 32) -> float:
    step = planned(profile, hook, gpus).step_seconds
    assert step is not None
    return step


def test_a_slow_link_wants_fewer_bytes() -> None:
    slow = str(EXAMPLE / "profile.yaml")
    exact, half = planned_seconds(slow, "none"), planned_seconds(slow, "bf16")
    assert planned_seconds(slow, "hierarchical") == half < 0.6 * exact
    assert planned_seconds(slow, "powersgd") < 0.4 * half


def test_a_fast_link_hardly_cares() -> None:
    assert planned_seconds("a100x64", "hierarchical") == pytest.approx(
        planned_seconds("a100x64", "none"), rel=0.05
    )


def test_inside_a_node_hierarchical_sums_are_exact() -> None:
    exact = planned_seconds("a100x1", "none", 8)
    assert (
        planned_seconds("a100x1", "hierarchical", 8) == exact > planned_seconds("a100x1", "bf16", 8)
    )


# -- What a plan assumes about GPUs and links, and what a launch is told to compare with it -----


MIB = 2**20


def made(
    profile: str, *overrides: str, example: str = "llama7b.yaml"
) -> tuple[TrainingJob, ExpectedSpeed]:
    site = load_profile(find_profile(profile)).document
    spec = load_run_spec(Path("examples") / example, overrides).document
    known = knowledge_of(site)
    job = planned_job(spec, site, known)
    expected = expected_speed(PlanRequest(spec, site, known), job.plan)
    assert expected is not None
    return job, expected


def test_links_inside_a_node_are_nvlinks_and_between_nodes_network_cards() -> None:
    tp8 = ("resources.gpus=16", "parallel.tp=8", "batch.micro=1")
    job, expected = made("h100x16", *tp8)
    plan = job.plan
    calibration = load_calibration()
    known = knowledge_of(job.profile).gpu
    assert known is not None and plan.layout.tp == 8 and plan.layout.dp == 2
    shares = calibration.gpus[known.name if known.name in calibration.gpus else known.generation]
    nvlink = float(known.nvlink_bandwidth) * shares.nvlink_efficiency
    network = float(known.network_bandwidth)
    assert expected.bytes_per_second["tp"] == pytest.approx(nvlink, rel=0.01)
    # a group of two, on two nodes: each rank's share of the cards carries the whole message once
    assert 0.3 * network < expected.bytes_per_second["dp"] < network
    assert set(expected.bytes_per_second) == {"tp", "dp"}
    assert expected.product_flops_per_second == pytest.approx(
        float(known.peak["bf16"]) * shares.product_efficiency
    )


def test_without_a_known_gpu_nothing_is_expected() -> None:
    job, _ = made("h100x16", "resources.gpus=8")
    unknown = Knowledge(None, load_calibration())
    assert expected_speed(PlanRequest(job.spec, job.profile, unknown), job.plan) is None
    config = speed_check_config(job, None)
    assert config is not None
    assert {axis.expected_bytes_per_second for axis in config.axes} == {None}


def test_messages_are_long_enough_for_their_bandwidth_and_no_longer() -> None:
    job, expected = made("h100x16", "resources.gpus=16", "parallel.tp=8")
    config = speed_check_config(job, expected)
    assert config is not None and config.fabric == "infiniband"
    assert {axis.axis: axis.message_bytes for axis in config.axes} == {
        "tp": 64 * MIB,
        "dp": 256 * MIB,
    }


def mode_of(job: TrainingJob, **site: Any) -> str:
    return speed_check_mode(replace(job, profile=job.profile.model_copy(update=site)))


def test_the_site_decides_where_the_spec_does_not() -> None:
    job, _ = made("h100x16", "resources.gpus=8")
    spec, sandbox = job.spec, replace(job, profile=load_profile(find_profile("sandbox")).document)
    assert (mode_of(job), mode_of(sandbox)) == ("report", "off")
    for mode in ("off", "report", "exclude"):
        assert mode_of(job, speed_check=mode) == mode_of(sandbox, speed_check=mode) == mode
    chosen = spec.supervise.speed_check.model_copy(update={"mode": "report"})
    own = spec.supervise.model_copy(update={"speed_check": chosen})
    decided = spec.model_copy(update={"supervise": own})
    assert mode_of(replace(job, spec=decided), speed_check="exclude") == "report"
    engine = spec.engine.model_copy(update={"name": "megatron-lm"})
    external = spec.model_copy(update={"engine": engine})
    assert mode_of(replace(job, spec=external)) == "off"
