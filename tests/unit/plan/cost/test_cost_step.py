"""Seconds of a step: schedule, traffic, optimizer, recomputation; and what never gets worse."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from cost_specimens import NEVER, case, changed, drawn, many, only_products, pipeline

from hpctrain.plan.cost.case import Case, once
from hpctrain.plan.cost.from_spec import shape_of
from hpctrain.plan.cost.step import (
    Stages,
    Turn,
    data_messages,
    launch_seconds,
    optimizer_seconds,
    stages_of,
    step_seconds,
    transfer_seconds,
    waiting_seconds,
)
from hpctrain.plan.cost.weights import Blocks, Weights
from hpctrain.plan.model.parameters import model_flops_per_step
from hpctrain.spec.model import ModelSpec

FREE = dict(memory_bandwidth=NEVER, nvlink_bandwidth=NEVER, network_bandwidth=NEVER)
SBH = 2_097_152  # T x h of the specimen
WEIGHTS = Weights(dense=8e9, routed=0.0)


def hops(size: float) -> float:
    return 6e-6 * math.log2(size + 1)


def seconds(one: Case) -> float:
    return float(step_seconds(one).total)


def stages(backward: float = 0.0, forward: float = 0.0) -> Stages:
    """Stages of which only the times that traffic can hide behind matter."""
    return Stages(Turn(*[0.0] * 6), 0.0, backward, forward)


def test_an_encoder_and_a_decoder_take_as_long_as_their_products() -> None:
    """Each by its own length, without a fused kernel, which computes scores again."""
    sizes = dict(hidden=768, heads=12, head_dim=64, vocab=32128, seq=512)
    model = ModelSpec.model_validate(dict(sizes, family="t5", layers=3, encoder_layers=12))
    shape = shape_of(model)
    ranks = dict(layers_first=3, tp=1, pp=1, dp=1, micro_batch=4, accumulation=1, flash=0)
    one = only_products(**{field.name: getattr(shape, field.name) for field in fields(shape)})
    step = step_seconds(changed(one, **ranks))
    assert float(step.compute) == pytest.approx(model_flops_per_step(model, 4) / 1e15, rel=0.01)


class TestSchedule:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for stages without ends."""

    @staticmethod
    def parts(p: int, m: int, v: int = 1, **changes: Any) -> tuple[float, float]:
        """(bubble, compute); no vocabulary, and messages cost nothing but their start."""
        one = pipeline(p, 32, vpp=v, accumulation=m, vocab=0, hidden=8192, **FREE, **changes)
        step = step_seconds(one)
        starts = 2 * (p - 1) * 6e-6
        return float(step.bubble) - starts, float(step.compute + step.recompute)

    @pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 64)])
    def test_bubble_of_1f1b(self, p: int, m: int) -> None:
        bubble, compute = self.parts(p, m)
        assert bubble / compute == pytest.approx((p - 1) / m)

    @pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (8, 64, 4)])
    def test_bubble_of_interleaving(self, p: int, m: int, v: int) -> None:
        bubble, compute = self.parts(p, m, v)
        assert bubble / compute == pytest.approx((p - 1) / (v * m))

    def test_recomputation_makes_the_bubble_longer(self) -> None:
        bubble, compute = self.parts(4, 8, recompute=2)
        assert bubble / compute == pytest.approx(3 / 8)

    @pytest.mark.parametrize(("kind", "left"), [(1, 1 / 3), (2, 0.05)])
    def test_zero_bubble_schedules_leave_a_part(self, kind: int, left: float) -> None:
        # Qi et al. 2023 (arXiv 2401.10241), table 2
        plain, better = (step_seconds(pipeline(4, 8, zero_bubble=z)).bubble for z in (0, kind))
        assert better == pytest.approx(left * float(plain))

    def test_without_pipeline_there_is_no_bubble_and_no_message(self) -> None:
        step = step_seconds(case(accumulation=8, tp=2))
        assert (step.bubble, step.pipeline_messages) == (0, 0)

    def test_the_slowest_stage_sets_the_pace_and_waits_for_all_others(self) -> None:
        one = pipeline(4, 16, accumulation=8, vocab=0, hidden=8192, **FREE)
        uneven = changed(one, layers_first=3, layers_middle=5, layers_last=3)
        even, odd = step_seconds(one), step_seconds(uneven)
        assert odd.compute == pytest.approx(5 / 4 * float(even.compute))
        layer = float(even.compute) / 8 / 4
        assert odd.bubble - 6 * 6e-6 == pytest.approx((16 - 5) * layer)

    def test_the_output_layer_slows_the_last_stage_down(self) -> None:
        # 6 T h V operations there; both stages have 4 layers
        without, with_it = (only(pipeline(2, 8, vocab=v, **FREE)) for v in (0, 51200))
        assert with_it - without == pytest.approx(6 * SBH * 51200 / 1e15)

    def test_token_prediction_is_a_layer_and_another_output(self) -> None:
        without, with_it = (only(only_products(mtp_layers=n)) for n in (0, 1))
        layer = only(only_products(vocab=0)) / 8
        output = 6 * SBH * 51200 / 1e15
        assert with_it - without == pytest.approx(layer + output)


def only(one: Case) -> float:
    """Compute of one microbatch in the slowest stage."""
    return float(step_seconds(one).compute) / float(one.mesh.accumulation)


class TestMessagesBetweenStages:
    def test_an_activation_goes_to_a_neighbour(self) -> None:
        one = pipeline(2, 8)
        assert transfer_seconds(one) == pytest.approx(2 * SBH / 1e11 + 6e-6)

    @pytest.mark.parametrize(
        ("changes", "share"),
        [
            (dict(), 1.0),
            (dict(sequence_parallel=1), 0.25),
            (dict(scatter_gather=1), 0.25),
            (dict(scatter_gather=1, sequence_parallel=1), 0.25),
        ],
    )
    def test_tensor_parallel_ranks_send_a_share_each(
        self, changes: dict[str, int], share: float
    ) -> None:
        one = pipeline(2, 8, tp=4, **changes)
        assert transfer_seconds(one) == pytest.approx(share * 2 * SBH / 1e11 + 6e-6)

    @pytest.mark.parametrize(("outside", "rate"), [(1, 1e10), (0, 1e11)])
    def test_the_order_of_axes_says_how_far(self, outside: int, rate: float) -> None:
        # tp 2 x dp 4 are between two stages when the pipeline is the outermost axis
        one = pipeline(2, 8, tp=2, dp=4, pipeline_outside=outside)
        assert transfer_seconds(one) == pytest.approx(2 * SBH / rate + 6e-6)

    @pytest.mark.parametrize(("pp", "neighbours"), [(2, 1), (4, 2)])
    def test_one_exchange_with_each_neighbour_of_the_slowest_stage(
        self, pp: int, neighbours: int
    ) -> None:
        # stages are equal: those within have two neighbours, and so are the slowest
        one = pipeline(pp, 8, accumulation=8, vocab=0, memory_bandwidth=NEVER)
        expected = 8 * neighbours * float(transfer_seconds(one))
        assert step_seconds(one).pipeline_messages == pytest.approx(expected)

    def test_an_end_that_is_slower_has_one_neighbour(self) -> None:
        # the output layer takes longer than a transfer, or less
        for vocab, neighbours in ((1024, 2), (512_000, 1)):
            one = pipeline(4, 8, accumulation=8, vocab=vocab, network_bandwidth=1e10)
            one = changed(one, domain=1)
            step, transfer = step_seconds(one), float(transfer_seconds(one))
            assert step.pipeline_messages == pytest.approx(8 * neighbours * transfer)

    def test_two_for_every_microbatch_and_chunk_of_a_ring(self) -> None:
        one = pipeline(2, 8, vpp=2, accumulation=8, pp_overlap=0.25)
        expected = 2 * 8 * 2 * 0.75 * float(transfer_seconds(one))
        assert step_seconds(one).pipeline_messages == pytest.approx(expected)


RING = 7 / 8 / 1e11  # seconds for each byte of a ring of eight
START = hops(8)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        # 4 bytes of gradients and 2 of weights of 8e9 parameters; unsharded gradients twice; whole
        # sums are an all-reduce before the gathering
        (case(dp=8), RING * (32e9 + 16e9) + 2 * START),
        (case(dp=8, zero=0), RING * 2 * 32e9 + 2 * START),
        (case(dp=8, whole_sums=1), RING * (2 * 32e9 + 16e9) + 3 * START),
        (case(dp=2, cp=4), RING * 48e9 + 2 * START),  # context parallel ranks are replicas
        # tp 2: four replicas in a domain of eight; tp 2 x pp 2 between them: two in each of two
        (pipeline(2, 8, tp=2, dp=4), 3 / 4 * 48e9 / 1e11 + 2 * hops(4)),
        (pipeline(2, 8, tp=2, dp=4, pipeline_outside=0), 48e9 / 4e10 + 2 * hops(4)),
        # Rajbhandari et al. 2020, section 7.2.2: ZeRO-3 gathers twice and reduces, 2 + 2 + 4 bytes
        # in every microbatch; ZeRO-2 reduces in each and gathers once
        (case(dp=8, zero=3, accumulation=4), 4 * (RING * 64e9 + 3 * START)),
        (case(dp=8, zero=2, accumulation=4), RING * (4 * 32e9 + 16e9) + 5 * START),
        # hybrid sharding: 8 of 64 replicas have the traffic of dp 8
        (case(dp=64, zero=3, shard_gpus=8), RING * 64e9 + 3 * START),
        *((case(zero=zero), 0) for zero in range(4)),
    ],
)
def test_data_parallel_messages(one: Case, expected: float) -> None:
    assert data_messages(one, WEIGHTS, stages()) == pytest.approx(expected)


def test_experts_are_reduced_over_fewer_ranks() -> None:
    # dp 8, ep 4: two replicas of 6e9 parameters, four ranks apart
    found = data_messages(case(dp=8, ep=4), Weights(0.0, 6e9), stages())
    assert found == pytest.approx(0.5 * 36e9 / 1e11 + 2 * hops(2))


@pytest.mark.parametrize(
    ("changes", "backward", "forward", "expected"),
    [
        # a share at most, and at most what compute lasts
        (dict(dp_overlap=0.5), 1e9, 1e9, (RING * 48e9 + 2 * START) / 2),
        (dict(dp_overlap=0.5), 0.02, 0.01, RING * 48e9 + 2 * START - 0.5 * (0.02 + 0.01)),
        # DeepSpeed hides no gradients behind a pipeline
        (dict(dp_overlap=1, late_sums=1), 0.02, 0.01, RING * 48e9 + 2 * START - 0.03),
        (dict(dp_overlap=1, late_sums=1, pp=2), 0.02, 0.01, RING * 48e9 + 2 * START - 0.01),
        (dict(dp_overlap=1, pp=2), 0.02, 0.01, RING * 48e9 + 2 * START - 0.03),
        # gather 0.14 s forward, gather and reduce 0.42 s back; half of what lasts 0.1 and 0.2
        (dict(zero=3, dp_overlap=0.5), 0.2, 0.1, 0.56 + 3 * START - 0.05 - 0.1),
        (dict(zero=3, dp_overlap=0.5), 1e9, 1e9, 0.5 * (0.56 + 3 * START)),
    ],
)
def test_messages_that_compute_hides(
    changes: dict[str, float], backward: float, forward: float, expected: float
) -> None:
    found = data_messages(case(dp=8, **changes), WEIGHTS, stages(backward, forward))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "weights", "expected"),
    [
        (case(zero=0), WEIGHTS, 30 * 8e9 / 1e12),  # Adam moves thirty bytes
        (
            case(dp=8, cp=2, ep=4, memory_efficiency=0.5),
            Weights(8e9, 6e9),
            30 * (8e9 / 16 + 6e9 / 4) / 0.5e12,
        ),
        # 4 + 2 bytes over PCIe of 25e9, 30 bytes through 50e9 of the host's memory; on drives 12
        # bytes each, both ways, at 2e9 bytes/s besides
        (case(dp=8, offload=1), WEIGHTS, 6e9 / 25e9 + 30e9 / 50e9),
        (
            case(dp=8, offload=2, nvme_bandwidth=2e9),
            WEIGHTS,
            6e9 / 25e9 + 30e9 / 50e9 + 2 * 12 * 1e9 / 2e9,
        ),
    ],
)
def test_optimizer(one: Case, weights: Weights, expected: float) -> None:
    assert optimizer_seconds(one, weights) == pytest.approx(expected)


class TestWholeStep:
    def test_straggling_is_the_slowest_of_all_ranks(self) -> None:
        # the largest of n draws is sqrt(2 ln n) deviations above the mean
        for gpus, deviations in ((1, 0.0), (8, 2.039), (64, 2.884), (4096, 4.079)):
            one = case(dp=gpus, straggling=0.01)
            calm = seconds(changed(one, straggling=0))
            assert seconds(one) == pytest.approx(calm * (1 + 0.01 * deviations), rel=1e-4)

    def test_a_step_has_a_part_for_each_layer_of_the_fullest_stage(self) -> None:
        calm, slow = (case(step_overhead=o) for o in (0.0, 1e-3))
        assert seconds(slow) - seconds(calm) == pytest.approx(8e-3)
        calm, slow = (pipeline(4, 16, step_overhead=o) for o in (0.0, 1e-3))
        assert seconds(slow) - seconds(calm) == pytest.approx(4e-3)


class TestLaunches:
    """The host launches kernels while the GPU computes those before."""

    LAYERS = Blocks(layers=8, attention=8, mlp=8, moe=0, mamba=0)

    def test_of_layers(self) -> None:
        one = case(layer_overhead=1e-4)
        assert launch_seconds(one, self.LAYERS) == pytest.approx((8e-4, 0))
        assert launch_seconds(changed(one, low=1), self.LAYERS) == pytest.approx((12e-4, 0))
        captured = changed(one, launched_layers=0.25)
        assert launch_seconds(captured, self.LAYERS) == pytest.approx((2e-4, 0))

    def test_of_experts(self) -> None:
        # sorting as 24 experts, and each of 64 / 16
        blocks = Blocks(layers=2, attention=2, mlp=0, moe=2, mamba=0)
        one = case(experts=64, ep=16, expert_overhead=1e-4)
        assert launch_seconds(one, blocks) == pytest.approx((0, 2 * 28 * 1e-4))
        low = launch_seconds(changed(one, low=1), blocks)
        assert low == pytest.approx((0, 1.5 * 2 * 28 * 1e-4))  # of which each is quantised
        assert launch_seconds(changed(one, launched_experts=0), blocks) == (0, 0)
        assert launch_seconds(changed(one, known_sizes=1), blocks) == pytest.approx((56e-4, 0))

    def test_numbers_of_tokens_are_waited_for(self) -> None:
        # 2 layers of 8 experts on one GPU, in either pass, in the open
        experts = dict(mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=1024)
        calm, slow = (case(**experts, expert_overhead=o) for o in (0.0, 1e-6))
        assert seconds(slow) - seconds(calm) == pytest.approx(2 * 8 * 32 * 1e-6)
        ahead = changed(slow, known_sizes=1)
        assert seconds(ahead) - seconds(calm) == pytest.approx(0, abs=1e-6)

    def test_the_longer_of_both_counts(self) -> None:
        assert waiting_seconds(1.0, 0.0) == 0
        assert waiting_seconds(1.0, 0.1) == pytest.approx(0, abs=1e-4)
        assert waiting_seconds(0.1, 1.0) == pytest.approx(0.9, abs=1e-4)
        assert waiting_seconds(1.0, 1.0) == pytest.approx(2**0.25 - 1)
        hosts = np.linspace(0, 3, 31)
        assert np.all(np.diff(waiting_seconds(1.0, hosts)) > 0)

    def test_a_busy_gpu_hides_them_and_a_fast_one_waits(self) -> None:
        # some 30 ms of compute a pass against 8 x 1 us, and against 8 x 100 ms
        calm = seconds(case(accumulation=4))
        assert seconds(case(accumulation=4, layer_overhead=1e-6)) == pytest.approx(calm, rel=1e-6)
        slow = seconds(case(accumulation=4, layer_overhead=0.1))
        assert slow == pytest.approx(calm + 4 * 2 * 0.8, rel=0.05)


class TestRecomputation:
    def test_full_recomputation_is_one_more_forward_pass(self) -> None:
        plain, again = (stages_of(only_products(recompute=r)) for r in (0, 2))
        output = 2 * SBH * 51200 / 1e15
        forward = float(plain.slowest.forward) - output
        assert again.slowest.again == pytest.approx(forward)
        assert again.slowest.forward == plain.slowest.forward
        assert again.last_backward == pytest.approx(float(plain.slowest.backward) + forward)

    def test_full_recomputation_of_some_layers(self) -> None:
        whole, part = (
            stages_of(only_products(recompute=2, full_share=s)).slowest.again for s in (1, 0.25)
        )
        assert part == pytest.approx(float(whole) / 4)

    @pytest.mark.parametrize(
        ("module", "again"),
        [
            ("again_core_attn", 8 * 4 * (2048 * 1024) * 1024 / 1e15),
            ("again_mlp", 8 * 2 * 2 * SBH * 4096 / 1e15),
            ("again_layernorm", 0.0),  # free: it only streams
        ],
    )
    def test_selective_recomputation(self, module: str, again: float) -> None:
        one = only_products(**{"recompute": 1, "again_core_attn": 0, module: 1})
        assert stages_of(one).slowest.again == pytest.approx(again)

    def test_selective_recomputation_leaves_mamba_alone(self) -> None:
        one = only_products(**MAMBA, mlp_blocks=0, attention_blocks=0, recompute=1)
        assert stages_of(one).slowest.again == 0
        full = stages_of(changed(one, recompute=2)).slowest
        output = 2 * SBH * 51200 / 1e15
        assert full.again == pytest.approx(float(full.forward) - output)

    @pytest.mark.parametrize("kind", ["mlp_blocks", "moe_blocks"])
    def test_recomputed_norms_stream(self, kind: str) -> None:
        blocks = {"mlp_blocks": 0, "moe_blocks": 0, kind: 8}
        one = case(recompute=1, again_core_attn=0, again_layernorm=1, peak=NEVER, **blocks)
        assert stages_of(one).slowest.again == pytest.approx(8 * 2 * 4 * SBH / 1e12)

    @pytest.mark.parametrize(
        ("changes", "messages"), [(dict(recompute=2), 3), (dict(again_moe=1, recompute=1), 3)]
    )
    def test_recomputed_experts_send_again(self, changes: dict[str, int], messages: int) -> None:
        moe = dict(mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=2048, ep=8, dp=8)
        plain = stages_of(case(**moe)).slowest.experts
        found = stages_of(case(**moe, **changes)).slowest.experts
        assert found == pytest.approx(float(plain) * messages / 2)

    def test_recomputed_layers_reduce_again(self) -> None:
        # 8 layers x 2 blocks x 2 passes, the output layer 2, the embedding half of that: 35 times;
        # once more for the forward pass of 16 blocks
        plain, again = (stages_of(case(tp=4, recompute=r)).slowest for r in (0, 2))
        assert again.tensor == pytest.approx(float(plain.tensor) * 51 / 35)

    @pytest.mark.parametrize("name", ["mla", "moe"])
    def test_other_parts_that_are_computed_again(self, name: str) -> None:
        latent = dict(mla=1, q_rank=384, kv_rank=128, qk_dim=96, rope_dim=32, again_mla_up_proj=1)
        routed = dict(mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=2048)
        # up-projections 384 x 1536 + 128 x 2048; activation of 4096 rows: 2 x 2 x 4096 x 2048 bytes
        expected = {
            "mla": 8 * 2 * 2048 * (589_824 + 262_144) / 1e15,
            "moe": 8 * 2 * 2 * 4096 * 2048 / 1e12,
        }
        chosen = {"mla": dict(latent, memory_bandwidth=NEVER), "moe": {**routed, **MOE_ACT}}
        one = case(**chosen[name], recompute=1, again_core_attn=0)
        assert stages_of(one).slowest.again == pytest.approx(expected[name])


MAMBA = dict(mamba_blocks=8, mamba_inner=2048, mamba_state=128, mamba_groups=8, mamba_heads=32)
MOE_ACT = dict(again_moe_act=1, peak=NEVER)
BETTER = [
    *("memory_bandwidth", "nvlink_bandwidth", "network_bandwidth", "peak", "peak_low"),
    *("product_efficiency", "flash_efficiency", "memory_efficiency", "network_efficiency"),
    *("nvlink_efficiency", "flash_speed", "low_efficiency", "host_bandwidth", "domain"),
    *("tp_overlap", "dp_overlap", "pp_overlap", "ep_overlap", "batched_efficiency"),
]
WORSE = [
    *("accumulation", "micro_batch", "streaming", "softmax_passes", "tail_products"),
    *("layer_overhead", "step_overhead", "straggling", "expert_overhead"),
]


CASES = drawn(seed=21, count=200)
TOGETHER = many(CASES)


class TestManyCases:
    def test_the_parts_add_up_and_none_is_negative(self) -> None:
        step = step_seconds(TOGETHER)
        parts = np.array([getattr(step, name) for name in type(step).__dataclass_fields__])
        assert step.total == pytest.approx(parts.sum(axis=0))
        assert parts.min() >= 0 and np.isfinite(parts).all()

    @pytest.mark.parametrize("field", BETTER)
    def test_a_better_machine_is_never_slower(self, field: str) -> None:
        gains = ratios(field)
        if field.startswith("flash"):  # a ring and ZeRO-3's traffic hide behind the same attention
            gains = gains[TOGETHER.mesh.cp == 1]
        # a shared expert hides messages, half of which count in each pass against its launches
        assert max(gains) <= 1 + 2e-5
        assert min(gains) < 1, "it matters to none of the cases"

    @pytest.mark.parametrize("field", WORSE)
    def test_more_work_is_never_faster(self, field: str) -> None:
        losses = ratios(field)
        assert min(losses) >= 1 - 1e-12
        assert max(losses) > 1, "it matters to none of the cases"

    def test_rows_at_once_are_rows_one_by_one(self) -> None:
        together = step_seconds(TOGETHER)
        assert together.total.shape == (200,)
        for index, one in enumerate(CASES):
            alone = step_seconds(one)
            for name in type(alone).__dataclass_fields__:
                row = float(getattr(together, name)[index])
                assert row == pytest.approx(float(getattr(alone, name)), rel=1e-12), name

    def test_an_array_in_one_field_is_enough(self) -> None:
        total = step_seconds(case(accumulation=np.array([1, 2, 4]), vocab=0)).total
        assert total[2] - total[1] == pytest.approx(2 * (total[1] - total[0]))

    def test_replicas_that_bring_their_own_batch_cost_little_time(self) -> None:
        # weak scaling, 16 microbatches each; a tenth of the step is traffic at most
        few, lots = (pipeline(2, 8, dp=dp, accumulation=16, dp_overlap=0.5) for dp in (8, 16))
        assert 1 <= seconds(lots) / seconds(few) < 1.1

    def test_replicas_that_share_a_batch_save_time(self) -> None:
        few, lots = (pipeline(2, 8, dp=dp, accumulation=256 / dp) for dp in (8, 16))
        assert 0.5 < seconds(lots) / seconds(few) < 0.65


def ratios(field: str) -> Any:
    """Seconds of every case with a field twice as large, over those without."""
    records = (TOGETHER.shape, TOGETHER.mesh, TOGETHER.machine, TOGETHER.software)
    value = next(getattr(record, field) for record in records if hasattr(record, field))
    twice = step_seconds(changed(TOGETHER, **{field: 2 * value})).total
    return twice / step_seconds(TOGETHER).total


def test_a_case_is_computed_once_and_a_changed_one_anew() -> None:
    computed: list[Case] = []

    @once
    def formula(one: Case) -> int:
        computed.append(one)
        return len(computed)

    one = case()
    assert [formula(one), formula(one)] == [1, 1]
    assert formula(replace(one, mesh=replace(one.mesh, tp=2))) == 2
