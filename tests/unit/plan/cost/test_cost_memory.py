"""Bytes against Korthikanti et al. 2022 (arXiv 2205.05198) and Rajbhandari et al. 2020 (arXiv
1910.02054).

`s b h` of the specimen is 2048 x 1 x 1024 = 2,097,152; a s / h is 16 x 2048 / 1024 = 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cost_specimens import case, changed, pipeline

from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.memory import (
    Stage,
    activation_bytes,
    attention_kept,
    communicators,
    copied_bytes,
    gradient_bytes,
    kept_bytes,
    logit_bytes,
    loss_bytes,
    mamba_kept,
    message_bytes,
    microbatches_in_flight,
    mlp_kept,
    moe_kept,
    optimizer_bytes,
    outside_allocator_bytes,
    outside_pair,
    passing_buffers,
    passing_bytes,
    peak_bytes,
    reserved_bytes,
    score_gradient_bytes,
    stage_memory,
    stages_that_matter,
    transient_bytes,
    weight_bytes,
    weight_gradient_bytes,
)
from hpctrain.plan.cost.weights import Weights, all_blocks

SBH = 2_097_152
PAPER = dict(flash=0, dropout=0.1)  # unfused attention, dropout masks
EXPERTS = dict(
    mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=2048, shared_ffn=512, gated=1
)


def layer(**changes: Any) -> float:
    """Bytes that one transformer layer keeps."""
    one = case(**changes)
    return float(kept_bytes(one, all_blocks(one))) / 8


class TestOneLayer:
    """Korthikanti et al., section 4."""

    def test_equation_1_without_parallelism(self) -> None:
        assert layer(**PAPER) == SBH * (34 + 5 * 32)

    def test_equation_2_with_tensor_parallelism(self) -> None:
        assert layer(**PAPER, tp=8) == SBH * (10 + 24 / 8 + 5 * 32 / 8)

    def test_equation_4_with_sequence_parallelism(self) -> None:
        assert layer(**PAPER, tp=8, sequence_parallel=1) == SBH / 8 * (34 + 5 * 32)

    def test_equation_6_with_selective_recomputation(self) -> None:
        assert layer(**PAPER, tp=8, sequence_parallel=1, recompute=1) == SBH * 34 / 8

    def test_full_recomputation_keeps_the_input(self) -> None:
        assert layer(**PAPER, recompute=2) == 2 * SBH
        assert layer(**PAPER, recompute=2, tp=8, sequence_parallel=1) == 2 * SBH / 8

    def test_full_recomputation_of_every_fourth_layer(self) -> None:
        assert layer(**PAPER, recompute=2, full_share=0.25) == SBH * (0.5 + 0.75 * 194)

    def test_eager_checkpoints_keep_more(self) -> None:
        assert layer(recompute=2, checkpoint_copies=2.5) == 5 * SBH

    def test_without_dropout_there_are_no_masks(self) -> None:
        # two masks on [s, h] and, of 5 a s^2, those on the scores and a copy behind them
        assert layer(flash=0) == SBH * (32 + 2 * 32)

    def test_flash_attention_keeps_four_bytes_per_head_and_token(self) -> None:
        assert layer() == 32 * SBH + 4 * 16 * 2048

    def test_context_parallelism_splits_the_sequence(self) -> None:
        assert layer(cp=4) == (32 * SBH + 4 * 16 * 2048) / 4

    def test_microbatch_multiplies(self) -> None:
        assert layer(**PAPER, micro_batch=3) == 3 * SBH * 194

    def test_four_byte_elements(self) -> None:
        assert layer(element_bytes=4, flash=0) == 2 * SBH * (32 + 2 * 32)

    def test_grouped_keys_and_values(self) -> None:
        # keys and values of 4 instead of 16 heads: 2 x 2 s b h shrink to a quarter
        assert layer(kv_heads=4) == 29 * SBH + 4 * 16 * 2048

    def test_a_gate_keeps_another_tensor(self) -> None:
        assert layer(gated=1) - layer() == 8 * SBH

    def test_rotation_may_keep_copies(self) -> None:
        assert layer(rope=1, turned_copy=1) - layer(rope=1) == 4 * SBH
        assert layer(rope=0, turned_copy=1) == layer()

    def test_eager_norms_keep_more(self) -> None:
        assert layer(norm_bytes=8) - layer() == 2 * 8 * SBH

    @pytest.mark.parametrize(
        ("field", "dropped"),
        [
            ("again_core_attn", 160 * SBH),
            ("again_mlp", (21 - 2) * SBH),  # all but the input of its norm
            ("again_layernorm", 2 * 2 * SBH),  # what two norms put out
        ],
    )
    def test_what_selective_recomputation_drops(self, field: str, dropped: int) -> None:
        nothing = layer(**PAPER, recompute=1, again_core_attn=0)
        assert nothing == SBH * 194
        assert nothing - layer(**{**PAPER, "again_core_attn": 0, field: 1}, recompute=1) == dropped

    def test_switches_of_selective_recomputation_do_nothing_without_it(self) -> None:
        assert layer(**PAPER, again_mlp=1, again_layernorm=1) == SBH * 194


class TestLowPrecision:
    """What TransformerEngine keeps of a layer whose products are in 8 or 4 bits."""

    def test_inputs_of_linear_layers_take_their_format(self) -> None:
        # a byte less of what two norms put out (2 s b h) and of the output of GELU (4 s b h)
        assert layer() - layer(input_bytes=1) == (2 + 4) * SBH

    def test_scales_are_kept_too(self) -> None:
        assert layer(input_bytes=1 + 1 / 32) - layer(input_bytes=1) == (2 + 4) * SBH / 32

    def test_delayed_scaling_keeps_the_output_of_attention_twice(self) -> None:
        assert layer(input_bytes=1, projected_bytes=1) - layer(input_bytes=1) == SBH

    def test_sequence_parallelism_splits_what_norms_put_out(self) -> None:
        split = dict(tp=4, sequence_parallel=1)
        assert layer(**split) - layer(**split, input_bytes=1) == (2 + 4) * SBH / 4

    def test_recomputed_norms_drop_what_would_be_kept(self) -> None:
        again = dict(recompute=1, again_core_attn=0, again_layernorm=1)
        assert layer(input_bytes=1) - layer(**again, input_bytes=1) == 2 * SBH

    def test_a_recomputed_mlp_keeps_the_same_input(self) -> None:
        again = dict(recompute=1, again_core_attn=0, again_mlp=1)
        assert layer(**again) - layer(**again, input_bytes=1) == SBH

    def test_down_projections_of_latent_attention_keep_one_copy_each(self) -> None:
        # norm's input 2 h, two inputs of h; ranks 2 + 1 bytes; heads and rotation in 16 bits
        one = case(mla=1, q_rank=384, kv_rank=128, qk_dim=96, rope_dim=32, input_bytes=1)
        each = 2 * 1024 + 2 * 1024 + 2 * 16 * 320 + 3 * 512 + 2 * 32
        assert attention_kept(one).whole == 2048 * each + 4 * 16 * 2048

    def test_experts(self) -> None:
        # router and shared expert have one 16-bit tensor; 4096 rows of 1024 and of 2048 in 8 bits
        one, low = case(**EXPERTS), case(**EXPERTS, input_bytes=1)
        fewer = 4096 * (1024 + 2048) + 2048 * 512
        assert moe_kept(one).whole - moe_kept(low).whole == fewer
        delayed = changed(low, projected_bytes=1)
        assert moe_kept(delayed).whole - moe_kept(low).whole == SBH
        assert moe_kept(changed(low, again_moe_act=1)).again == 4096 * 2048

    def test_rows_of_the_fullest_rank(self) -> None:
        one, full = case(**EXPERTS), case(**EXPERTS, imbalance=1.5)
        assert moe_kept(full).whole - moe_kept(one).whole == 0.5 * 2 * 4096 * (1024 + 3 * 2048)

    def test_mamba(self) -> None:
        one = case(mamba_inner=2048, mamba_state=128, mamba_groups=8)
        less = mamba_kept(one).whole - mamba_kept(changed(one, input_bytes=1)).whole
        assert less == SBH + 2048 * 2048


class TestOtherBlocks:
    def test_latent_attention(self) -> None:
        # norm and its output 2 x 2 h; 16 heads x (2 x 96 + 2 x 64); ranks 2 (384 + 128) + 32
        one = case(mla=1, q_rank=384, kv_rank=128, qk_dim=96, rope_dim=32)
        elements = 2 * 1024 + 16 * 320 + 2 * 512 + 32
        assert attention_kept(one).whole == 2 * 2048 * elements + 4 * 16 * 2048
        again = attention_kept(changed(one, again_core_attn=0, again_mla_up_proj=1)).again
        assert again == 2 * 2048 * 16 * 2 * 96

    def test_tensor_parallel_ranks_repeat_the_ranks_of_latent_attention(self) -> None:
        one = case(mla=1, q_rank=384, kv_rank=128, qk_dim=96, rope_dim=32, tp=4)
        elements = 2 * 1024 + 16 * 320 / 4 + 2 * 512 + 32
        assert attention_kept(one).whole == 2 * 2048 * elements + 4 * 4 * 2048
        again = attention_kept(changed(one, again_core_attn=0, again_mla_up_proj=1)).again
        assert again == 2 * 2048 * 4 * 2 * 96

    def test_experts(self) -> None:
        # 4096 routed rows: their input, and 3 x 2048 inside; shared 3 x 512; scores 3 x 8 in fp32
        one = case(**EXPERTS)
        rows, shared = 2 * 4096 * (1024 + 3 * 2048), 2 * 2048 * 3 * 512
        expected = 2 * 2 * SBH + rows + shared + 4 * 3 * 2048 * 8
        assert moe_kept(one).whole == expected
        assert moe_kept(changed(one, again_moe=1)).again == expected - 2 * SBH
        assert moe_kept(changed(one, again_moe_act=1)).again == 2 * 4096 * 2048

    def test_spread_experts_see_a_share_of_the_tokens(self) -> None:
        one = case(**EXPERTS, tp=2, ep=2, sequence_parallel=1)
        rows, shared = 2 * 2048 * (1024 + 3 * 2048), 2 * 2048 * 3 * 256
        assert moe_kept(one).whole == 2 * SBH + rows + shared + 4 * 3 * 1024 * 8

    def test_mamba(self) -> None:
        one = case(mamba_inner=2048, mamba_state=128, mamba_groups=8, tp=2)
        inside = 2 * 2048 * (5 * 2048 + 4 * 1024) / 2
        assert mamba_kept(one).whole == 4 * SBH + inside
        assert mamba_kept(one).again == 0

    def test_hybrids_add_up(self) -> None:
        # two blocks of each kind; eager norms keep 8 bytes more, each block has one
        one = case(
            **EXPERTS | dict(attention_blocks=2, mlp_blocks=2, moe_blocks=2, mamba_blocks=2),
            mamba_inner=2048,
            mamba_state=128,
            mamba_groups=8,
        )
        kinds = (attention_kept(one), mlp_kept(one), moe_kept(one), mamba_kept(one))
        expected = 2 * sum(kept.whole for kept in kinds)
        assert kept_bytes(one, all_blocks(one)) == pytest.approx(expected)
        eager = changed(one, norm_bytes=8)
        assert kept_bytes(eager, all_blocks(one)) == pytest.approx(expected + 8 * 8 * SBH)


def first_stage(one: Case) -> Stage:
    return stages_that_matter(one)[0]


class TestInFlight:
    """Microbatches that wait for their backward pass."""

    @pytest.mark.parametrize(("index", "expected"), [(0, 4), (1, 3), (3, 1)])
    def test_one_forward_one_backward(self, index: int, expected: int) -> None:
        one = pipeline(4, 8, accumulation=16)
        assert microbatches_in_flight(one, replace(first_stage(one), index=index)) == expected

    def test_never_more_than_there_are(self) -> None:
        one = pipeline(8, 8, accumulation=3)
        assert microbatches_in_flight(one, first_stage(one)) == 3

    @pytest.mark.parametrize(("p", "v"), [(4, 2), (8, 4), (16, 3)])
    def test_interleaved_by_korthikanti(self, p: int, v: int) -> None:
        # section 4.2.3: on the first stage 1 + (p - 1) / (p v) times the p of 1F1B
        one = pipeline(p, p * v, vpp=v, accumulation=64)
        found = microbatches_in_flight(one, first_stage(one))
        assert found == pytest.approx(p * (1 + (p - 1) / (p * v)))

    def test_interleaved_on_the_last_stage(self) -> None:
        # 2 (4 - 3 - 1) + 3 x 4 + 1 = 13 chunks of four
        one = pipeline(4, 16, vpp=4, accumulation=64)
        assert microbatches_in_flight(one, replace(first_stage(one), index=3)) == 13 / 4

    def test_interleaved_never_more_than_there_are(self) -> None:
        one = pipeline(4, 16, vpp=4, accumulation=4)
        assert microbatches_in_flight(one, first_stage(one)) == 4

    @pytest.mark.parametrize("index", [0, 3])
    @pytest.mark.parametrize(("kind", "expected"), [(1, 4), (2, 8)])
    def test_zero_bubble_schedules_use_up_one_limit(
        self, kind: int, expected: int, index: int
    ) -> None:
        one = pipeline(4, 8, accumulation=16, zero_bubble=kind)
        assert microbatches_in_flight(one, replace(first_stage(one), index=index)) == expected

    def test_zero_bubble_schedules_have_no_more_than_there_are(self) -> None:
        one = pipeline(4, 8, accumulation=6, zero_bubble=2)
        assert microbatches_in_flight(one, first_stage(one)) == 6

    def test_late_weight_gradients_of_one_microbatch(self) -> None:
        # 14 s b h of inputs and 18 of gradients wait in a layer, where its input of 2 was kept
        one = pipeline(4, 8, accumulation=16, recompute=2)
        late = changed(one, zero_bubble=1)
        assert weight_gradient_bytes(one, first_stage(one).blocks) == 2 * 32 * SBH
        more = activation_bytes(late, first_stage(late)) - activation_bytes(one, first_stage(one))
        assert more == 2 * (32 - 2) * SBH

    def test_they_need_no_more_than_a_forward_pass_that_keeps_everything(self) -> None:
        one = pipeline(4, 8, accumulation=16)
        late = changed(one, zero_bubble=1)
        assert activation_bytes(late, first_stage(late)) == activation_bytes(one, first_stage(one))

    def test_late_weight_gradients_of_experts_in_8_bits(self) -> None:
        one = case(**EXPERTS, input_bytes=1)
        rows = 4096 * (3 * 1024 + 5 * 2048) + 2048 * 5 * 512
        mlps = rows + 3 * SBH
        blocks = replace(first_stage(one).blocks, attention=0, moe=1)
        assert weight_gradient_bytes(one, blocks) == mlps

    def test_all_of_them_are_held(self) -> None:
        # of 4 microbatches two layers each, and four outputs of the embedding
        one = pipeline(4, 8, accumulation=16, **PAPER)
        assert activation_bytes(one, first_stage(one)) == 4 * 2 * 194 * SBH + 4 * 2 * SBH

    def test_one_layer_is_there_again_while_it_is_recomputed(self) -> None:
        one = case(**PAPER, recompute=2)
        ends = (1 + 2) * 2 * SBH  # embedding; input of the last norm and of the output matrix
        expected = 8 * 2 * SBH + (194 - 2) * SBH + ends
        assert activation_bytes(one, first_stage(one)) == expected

    def test_so_are_the_norms_of_one_layer(self) -> None:
        one = case(**PAPER, recompute=1, again_core_attn=0, again_layernorm=1)
        expected = 8 * (194 - 4) * SBH + 4 * SBH + (1 + 2) * 2 * SBH
        assert activation_bytes(one, first_stage(one)) == expected

    def test_token_prediction_keeps_layers_behind_the_last(self) -> None:
        one, more = case(**PAPER), case(**PAPER, mtp_layers=1)
        added = activation_bytes(more, first_stage(more)) - activation_bytes(one, first_stage(one))
        assert added == 194 * SBH


class TestState:
    """Rajbhandari et al., section 3.1: 2 + 2 + 12 bytes; here gradients have 4."""

    WEIGHTS = Weights(dense=1000.0, routed=600.0)
    NONE = Weights(dense=0.0, routed=0.0)

    @pytest.mark.parametrize(
        ("zero", "weights", "gradients", "optimizer"),
        [
            (0, 3200, 6400, 19200),
            (1, 3200, 6400, 12 * (1000 / 16 + 600 / 4)),
            (2, 3200, 4 * (1000 / 16 + 600 / 4), 12 * (1000 / 16 + 600 / 4)),
            (3, 2 * 212.5, 4 * 212.5, 12 * 212.5),
        ],
    )
    def test_stages_of_zero(
        self, zero: int, weights: float, gradients: float, optimizer: float
    ) -> None:
        # dp 8 x cp 2 replicas; experts spread over 8 of the 8 x 2 x tp 2 ranks: 4 replicas
        one = case(zero=zero, dp=8, cp=2, tp=2, ep=8)
        assert weight_bytes(one, self.WEIGHTS, self.NONE) == weights
        assert gradient_bytes(one, self.WEIGHTS) == gradients
        assert optimizer_bytes(one, self.WEIGHTS) == optimizer

    def test_experts_that_are_split_over_tensor_ranks(self) -> None:
        # ep 1: an expert's parts are on tp ranks like everything else: 16 replicas
        one = case(dp=8, cp=2, tp=2)
        assert optimizer_bytes(one, self.WEIGHTS) == 12 * (1000 / 16 + 600 / 16)

    def test_more_expert_ranks_than_there_are_keep_one_replica(self) -> None:
        one = case(dp=2, ep=8)
        assert optimizer_bytes(one, self.WEIGHTS) == 12 * (500 + 600)

    def test_hybrid_sharding_divides_by_the_group(self) -> None:
        one = case(zero=3, dp=64, shard_gpus=8)
        assert weight_bytes(one, Weights(1000.0, 0.0), self.NONE) == 250

    def test_offloaded_state_is_not_on_the_gpu(self) -> None:
        assert optimizer_bytes(case(offload=1), self.WEIGHTS) == 0
        assert gradient_bytes(case(offload=1), self.WEIGHTS) == 6400

    def test_eight_bit_products_need_forms_of_the_weights_of_layers(self) -> None:
        layers = Weights(dense=700.0, routed=600.0)
        besides, instead = case(low_bytes=2), case(low_bytes=2.0625, low_only=1)
        assert weight_bytes(besides, self.WEIGHTS, layers) == 2 * 1600 + 2 * 1300
        assert weight_bytes(instead, self.WEIGHTS, layers) == 2 * 300 + 2.0625 * 1300

    def test_bytes_of_software_and_mesh(self) -> None:
        assert optimizer_bytes(case(main_bytes=16), self.WEIGHTS) == 16 * 1600
        assert gradient_bytes(case(gradient_bytes=2), self.WEIGHTS) == 2 * 1600


class TestTheRest:
    def test_logits_in_fp32(self) -> None:
        assert logit_bytes(case()) == 4 * 2048 * 51200
        assert logit_bytes(case(tp=8, cp=2, mtp_layers=1)) == 2 * 4 * 1024 * 51200 / 8
        assert logit_bytes(case(logit_bytes=20)) == 20 * 2048 * 51200

    def test_a_head_that_gathers_has_the_whole_vocabulary_on_every_rank(self) -> None:
        split, whole = (case(tp=8, gathered_logits=value) for value in (0, 1))
        assert logit_bytes(split) == 4 * 2048 * 51200 / 8
        assert logit_bytes(whole) == 4 * 2048 * 51200

    def test_gathered_inputs_of_products_stay_whole(self) -> None:
        sizes = dict(tp=4, sequence_parallel=1)
        split, whole = (case(**sizes, gathered_inputs=value) for value in (0, 1))
        assert outside_pair(split) == 2 * 2 * SBH / 4
        assert outside_pair(whole) == 2 * SBH / 4 + 2 * SBH
        assert outside_pair(case(gathered_inputs=1)) == outside_pair(case())

    @pytest.mark.parametrize(("pp", "held"), [(1, [1, 1, 1]), (2, [0, 1, 1]), (4, [0, 0, 1])])
    def test_logits_are_on_the_last_stage(self, pp: int, held: list[int]) -> None:
        one = pipeline(pp, 8, tp=2)
        found = [float(stage_memory(one, stage).logits) for stage in stages_that_matter(one)]
        assert found == [4 * 2048 * 51200 / 2 * share for share in held]

    def test_receive_buffers_and_the_gathered_input(self) -> None:
        assert message_bytes(case(tp=4)) == 0
        assert message_bytes(pipeline(2, 8)) == 2 * 2 * SBH
        assert message_bytes(case(tp=4, sequence_parallel=1)) == 2 * SBH
        assert message_bytes(pipeline(2, 8, tp=4, sequence_parallel=1)) == 3 * SBH

    def test_placeholders_of_weight_gradients(self) -> None:
        # one layer of 12 h^2 and two norms of 2 h, the output matrix, in 16 bits
        one = case()
        own = 12 * 1024**2 + 2 * 2 * 1024
        assert transient_bytes(one, first_stage(one)) == 2 * own
        assert loss_bytes(one, first_stage(one)) == 2 * 51200 * 1024
        without = case(dummy_gradients=0)
        assert transient_bytes(without, first_stage(without)) == 0
        assert loss_bytes(without, first_stage(without)) == 0

    def test_16_bit_logits_beside_the_fp32_ones(self) -> None:
        # 2 bytes of 2048 x 51200 logits are more than 2 of the table's 1024 x 51200, less 4 of them
        one = case(narrow_logits=1)
        assert loss_bytes(one, first_stage(one)) == 2 * 2048 * 51200

    def test_a_table_larger_than_the_logits(self) -> None:
        # 16 tokens: fp32 logits have become 16-bit ones when the table's placeholder is there
        one = case(narrow_logits=1, seq=16)
        expected = 2 * 16 * 51200 + 2 * 1024 * 51200 - 4 * 16 * 51200
        assert loss_bytes(one, first_stage(one)) == expected
        assert loss_bytes(one, replace(first_stage(one), loss=0)) == 0

    def test_the_widest_gradient_where_there_are_no_logits(self) -> None:
        one = pipeline(2, 8, gated=1, dummy_gradients=0, tp=2)
        assert transient_bytes(one, first_stage(one)) == 2 * 2048 * 2 * 4096 / 2

    def test_placeholders_of_experts_are_shared(self) -> None:
        one = case(**EXPERTS, ep=2, dp=2)
        dense = 4 * 1024**2 + 3 * 1024 * 512 + 8 * 1024 + 2 * 2 * 1024
        single = 3 * 1024 * 2048
        found = transient_bytes(one, first_stage(one))
        assert found == 2 * (dense + single)

    def test_zero_3_gathers_two_whole_layers(self) -> None:
        one = case(**EXPERTS, zero=3, dp=2)
        dense = 4 * 1024**2 + 3 * 1024 * 512 + 8 * 1024 + 2 * 2 * 1024
        found = transient_bytes(one, first_stage(one))
        assert found == 2 * 2 * (dense + 8 * 3 * 1024 * 2048)

    def test_slack_is_the_allocators_and_context_is_outside(self) -> None:
        one, more = case(), case(slack=1.25, context_bytes=3e9)
        tight, loose = (stage_memory(c, first_stage(c)) for c in (one, more))
        for part in ("activations", "logits", "buffers"):
            assert getattr(loose, part) == pytest.approx(1.25 * getattr(tight, part))
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(loose, part) == getattr(tight, part)
        assert (tight.context, loose.context) == (0, 3e9)
        blocks = stage_memory(case(slack=1.25, bucket_bytes=7e9), first_stage(one))
        assert blocks.buffers - loose.buffers == pytest.approx(7e9), "without the factor"
        assert stage_memory(case(slack=0), first_stage(one)).total == tight.total


class TestScores:
    """Gradients of s x s matrices, of one layer."""

    PAIRS = 2048 * 2048 * 16

    @pytest.mark.parametrize(
        ("given", "each"),
        [
            (dict(flash=1), 0),
            (dict(flash=0), 2),  # in place
            (dict(flash=0, dropout=0.1), 4),
            (dict(flash=0, softmax_bytes=4), 8),
            (dict(flash=0, softmax_bytes=4, dropout=0.1), 8),
            (dict(flash=0, tp=2), 1),
        ],
    )
    def test_by_kernel(self, given: dict[str, float], each: float) -> None:
        assert score_gradient_bytes(case(**given)) == each * self.PAIRS

    def test_the_wider_of_them_and_of_the_mlp_passes(self) -> None:
        one, flash = (pipeline(2, 8, flash=kernel, dummy_gradients=0) for kernel in (0, 1))
        assert transient_bytes(one, first_stage(one)) == 2 * self.PAIRS
        assert transient_bytes(flash, first_stage(flash)) == 2 * 2048 * 4096

    def test_on_the_last_stage_what_is_more_than_the_logits_counts(self) -> None:
        many, few = (case(flash=0, vocab=vocab, dummy_gradients=0) for vocab in (51200, 1024))
        assert passing_buffers(many, first_stage(many)) == 0
        more = 2 * self.PAIRS - 4 * 2048 * 1024
        assert passing_buffers(few, first_stage(few)) == more


class TestOutside:
    """What nvidia-smi shows besides the allocator."""

    @pytest.mark.parametrize(
        ("given", "count"),
        [
            (dict(), 0),
            (dict(dp=8), 1),
            (dict(cp=2), 2),  # its own group, and that over which gradients are summed
            (dict(tp=8, pp=4, dp=2), 3),
            (dict(dp=8, ep=2), 1.5),
            (dict(dp=64, ep=64), 1 + 7 / 2),
        ],
    )
    def test_communicators(self, given: dict[str, int], count: float) -> None:
        assert communicators(case(**given)) == count
        one = case(**given, context_bytes=1e9, communicator_bytes=1e8)
        assert outside_allocator_bytes(one) == 1e9 + count * 1e8
        assert stage_memory(one, first_stage(one)).context == 1e9 + count * 1e8


class TestReserved:
    """What the allocator holds, which is more than a run needs."""

    def test_the_same_where_nothing_is_cached_or_copied(self) -> None:
        one = case(dp=2)
        assert reserved_bytes(one, 1e12) == peak_bytes(one)

    def test_a_share_of_what_passes_stays_cached(self) -> None:
        one = case(dp=2, cached=0.2)
        passing = passing_bytes(one, first_stage(one))
        assert reserved_bytes(one, 1e12) - peak_bytes(one) == pytest.approx(0.2 * passing)

    def test_copies_in_one_block_come_on_top(self) -> None:
        # 6 bytes for each of half of the parameters, less than the activations
        one = case(dp=2, gradient_copy=6, flat_copies=1, micro_batch=8)
        copies = copied_bytes(one, first_stage(one))
        assert copies < passing_bytes(one, first_stage(one))
        assert reserved_bytes(one, 1e12) - peak_bytes(one) == copies
        small = changed(one, micro_batch=1, recompute=2, gradient_copy=60)
        passing = passing_bytes(small, first_stage(small))
        assert passing < copied_bytes(small, first_stage(small))
        assert reserved_bytes(small, 1e12) - peak_bytes(small) == passing

    def test_small_copies_fit_into_freed_blocks(self) -> None:
        one = case(dp=2, gradient_copy=6, micro_batch=8)
        assert reserved_bytes(one, 1e12) == peak_bytes(one)

    def test_it_gives_back_what_it_cached_when_the_gpu_is_full(self) -> None:
        one = case(dp=2, cached=0.2)
        needed = float(peak_bytes(one))
        assert reserved_bytes(one, needed * 1.001) == pytest.approx(needed * 1.001)
        assert reserved_bytes(one, needed * 0.9) == needed
