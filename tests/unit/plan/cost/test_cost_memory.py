"""Bytes against Korthikanti et al. 2022 (arXiv 2205.05198), Rajbhandari et al. 2020 (arXiv
1910.02054), and peaks that others printed.

`s b h` of the specimen is 2048 x 1 x 1024 = 2,097,152; a s / h is 16 x 2048 / 1024 = 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cost_specimens import GIB, case, changed, drawn, many, pipeline

from hpctrain.plan.cost.case import Case, Mesh, Shape
from hpctrain.plan.cost.from_spec import NO_MACHINE, software_of
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
from hpctrain.plan.cost.weights import Blocks, Weights, all_blocks, first_blocks, later_blocks
from hpctrain.spec.loader import load_calibration

SBH = 2_097_152
PAPER = dict(flash=0, dropout=0.1)  # unfused attention, dropout masks
SPLIT = dict(tp=8, sequence_parallel=1)
EXPERTS = dict(
    mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=2048, shared_ffn=512, gated=1
)
MAMBA = dict(mamba_inner=2048, mamba_state=128, mamba_groups=8)
LATENT = dict(mla=1, q_rank=384, kv_rank=128, qk_dim=96, rope_dim=32)
SELECTIVE = dict(recompute=1, again_core_attn=0)
FLASH = 4 * 16 * 2048  # one fp32 number per head and token


def layer(**changes: Any) -> float:
    """Bytes that one transformer layer keeps."""
    one = case(**changes)
    return float(kept_bytes(one, all_blocks(one))) / 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (PAPER, SBH * (34 + 5 * 32)),  # section 4, equation 1
        (PAPER | dict(tp=8), SBH * (10 + 24 / 8 + 5 * 32 / 8)),  # equation 2
        (PAPER | SPLIT, SBH / 8 * (34 + 5 * 32)),  # equation 4
        (PAPER | SPLIT | dict(recompute=1), SBH * 34 / 8),  # equation 6
        (PAPER | dict(recompute=2), 2 * SBH),  # the input
        (PAPER | SPLIT | dict(recompute=2), 2 * SBH / 8),
        (PAPER | dict(recompute=2, full_share=0.25), SBH * (0.5 + 0.75 * 194)),
        (dict(recompute=2, checkpoint_copies=2.5), 5 * SBH),
        # no masks: two on [s, h] and, of 5 a s^2, those on the scores and a copy behind them
        (dict(flash=0), SBH * (32 + 2 * 32)),
        ({}, 32 * SBH + FLASH),
        (dict(cp=4), (32 * SBH + FLASH) / 4),
        (PAPER | dict(micro_batch=3), 3 * SBH * 194),
        (dict(element_bytes=4, flash=0), 2 * SBH * (32 + 2 * 32)),
        # keys and values of 4 instead of 16 heads: 2 x 2 s b h shrink to a quarter
        (dict(kv_heads=4), 29 * SBH + FLASH),
        (dict(rope=0, turned_copy=1), 32 * SBH + FLASH),
        # switches of selective recomputation do nothing without it
        (PAPER | dict(again_mlp=1, again_layernorm=1), SBH * 194),
        (PAPER | SELECTIVE, SBH * 194),
    ],
)
def test_what_a_layer_keeps(changes: dict[str, float], expected: float) -> None:
    assert layer(**changes) == expected


@pytest.mark.parametrize(
    ("more", "less", "difference"),
    [
        (dict(gated=1), {}, 8 * SBH),  # a gate keeps another tensor
        (dict(rope=1, turned_copy=1), dict(rope=1), 4 * SBH),
        (dict(norm_bytes=8), {}, 2 * 8 * SBH),
        # what selective recomputation drops: core attention, an MLP but the input of its norm, what
        # two norms put out
        (PAPER | SELECTIVE, PAPER | dict(recompute=1), 160 * SBH),
        (PAPER | SELECTIVE, PAPER | SELECTIVE | dict(again_mlp=1), (21 - 2) * SBH),
        (PAPER | SELECTIVE, PAPER | SELECTIVE | dict(again_layernorm=1), 2 * 2 * SBH),
        # products in 8 or 4 bits: a byte less of what two norms put out (2 s b h) and of the output
        # of GELU (4 s b h); their scales; delayed scaling keeps the output of attention twice
        ({}, dict(input_bytes=1), (2 + 4) * SBH),
        (dict(input_bytes=1 + 1 / 32), dict(input_bytes=1), (2 + 4) * SBH / 32),
        (dict(input_bytes=1, projected_bytes=1), dict(input_bytes=1), SBH),
        (SPLIT, SPLIT | dict(input_bytes=1), (2 + 4) * SBH / 8),
        (dict(input_bytes=1), SELECTIVE | dict(again_layernorm=1, input_bytes=1), 2 * SBH),
        (SELECTIVE | dict(again_mlp=1), SELECTIVE | dict(again_mlp=1, input_bytes=1), SBH),
    ],
)
def test_what_makes_a_layer_keep_more(
    more: dict[str, float], less: dict[str, float], difference: float
) -> None:
    assert layer(**more) - layer(**less) == difference


class TestOtherBlocks:
    @pytest.mark.parametrize(
        ("changes", "elements", "again"),
        [
            # norm and its output 2 x 2 h; 16 heads x (2 x 96 + 2 x 64); ranks 2 (384 + 128) + 32
            ({}, 2 * 1024 + 16 * 320 + 2 * 512 + 32, 2 * 2048 * 16 * 2 * 96),
            # tensor parallel ranks repeat the ranks of latent attention
            (dict(tp=4), 2 * 1024 + 16 * 320 / 4 + 2 * 512 + 32, 2 * 2048 * 4 * 2 * 96),
            # norm's input 2 h, two inputs of h; ranks 2 + 1 bytes; heads and rotation in 16 bits
            (
                dict(input_bytes=1),
                (2 * 1024 + 2 * 1024 + 2 * 16 * 320 + 3 * 512 + 2 * 32) / 2,
                2 * 2048 * 16 * 2 * 96,
            ),
        ],
    )
    def test_latent_attention(
        self, changes: dict[str, float], elements: float, again: float
    ) -> None:
        one = case(**LATENT, **changes)
        assert attention_kept(one).whole == 2 * 2048 * elements + FLASH / changes.get("tp", 1)
        assert attention_kept(changed(one, again_core_attn=0, again_mla_up_proj=1)).again == again

    def test_experts(self) -> None:
        # 4096 routed rows: their input, and 3 x 2048 inside; shared 3 x 512; scores 3 x 8 in fp32
        one = case(**EXPERTS)
        rows, shared = 2 * 4096 * (1024 + 3 * 2048), 2 * 2048 * 3 * 512
        expected = 2 * 2 * SBH + rows + shared + 4 * 3 * 2048 * 8
        assert moe_kept(one).whole == expected
        assert moe_kept(changed(one, again_moe=1)).again == expected - 2 * SBH
        assert moe_kept(changed(one, again_moe_act=1)).again == 2 * 4096 * 2048
        # rows of the fullest rank
        assert moe_kept(changed(one, imbalance=1.5)).whole - expected == 0.5 * rows
        # router and shared expert have one 16-bit tensor; 4096 rows of 1024 and of 2048 in 8 bits
        low = changed(one, input_bytes=1)
        assert expected - moe_kept(low).whole == 4096 * (1024 + 2048) + 2048 * 512
        assert moe_kept(changed(low, projected_bytes=1)).whole - moe_kept(low).whole == SBH
        assert moe_kept(changed(low, again_moe_act=1)).again == 4096 * 2048

    def test_spread_experts_see_a_share_of_the_tokens(self) -> None:
        one = case(**EXPERTS, tp=2, ep=2, sequence_parallel=1)
        rows, shared = 2 * 2048 * (1024 + 3 * 2048), 2 * 2048 * 3 * 256
        assert moe_kept(one).whole == 2 * SBH + rows + shared + 4 * 3 * 1024 * 8

    def test_mamba(self) -> None:
        one = case(**MAMBA, tp=2)
        assert mamba_kept(one).whole == 4 * SBH + 2 * 2048 * (5 * 2048 + 4 * 1024) / 2
        assert mamba_kept(one).again == 0
        less = mamba_kept(case(**MAMBA)).whole - mamba_kept(case(**MAMBA, input_bytes=1)).whole
        assert less == SBH + 2048 * 2048

    def test_hybrids_add_up(self) -> None:
        # two blocks of each kind; eager norms keep 8 bytes more, each block has one
        each = dict(attention_blocks=2, mlp_blocks=2, moe_blocks=2, mamba_blocks=2)
        one = case(**EXPERTS | each, **MAMBA)
        kinds = (attention_kept(one), mlp_kept(one), moe_kept(one), mamba_kept(one))
        expected = 2 * sum(kept.whole for kept in kinds)
        assert kept_bytes(one, all_blocks(one)) == pytest.approx(expected)
        eager = changed(one, norm_bytes=8)
        assert kept_bytes(eager, all_blocks(one)) == pytest.approx(expected + 8 * 8 * SBH)


def first_stage(one: Case) -> Stage:
    return stages_that_matter(one)[0]


class TestInFlight:
    """Microbatches that wait for their backward pass."""

    @pytest.mark.parametrize(
        ("pp", "layers", "changes", "index", "expected"),
        [
            (4, 8, dict(accumulation=16), 0, 4),
            (4, 8, dict(accumulation=16), 1, 3),
            (4, 8, dict(accumulation=16), 3, 1),
            (8, 8, dict(accumulation=3), 0, 3),  # never more than there are
            # Korthikanti, section 4.2.3: interleaved, on the first stage 1 + (p - 1) / (p v) times
            # the p of 1F1B
            (4, 8, dict(accumulation=64, vpp=2), 0, 4 * (1 + 3 / 8)),
            (8, 32, dict(accumulation=64, vpp=4), 0, 8 * (1 + 7 / 32)),
            (16, 48, dict(accumulation=64, vpp=3), 0, 16 * (1 + 15 / 48)),
            # on the last one 2 (4 - 3 - 1) + 3 x 4 + 1 = 13 chunks of four
            (4, 16, dict(accumulation=64, vpp=4), 3, 13 / 4),
            (4, 16, dict(accumulation=4, vpp=4), 0, 4),
            # zero-bubble schedules use up one limit on all stages
            *((4, 8, dict(accumulation=16, zero_bubble=1), index, 4) for index in (0, 3)),
            *((4, 8, dict(accumulation=16, zero_bubble=2), index, 8) for index in (0, 3)),
            (4, 8, dict(accumulation=6, zero_bubble=2), 0, 6),
        ],
    )
    def test_by_schedule_and_stage(
        self, pp: int, layers: int, changes: dict[str, int], index: int, expected: float
    ) -> None:
        one = pipeline(pp, layers, **changes)
        found = microbatches_in_flight(one, replace(first_stage(one), index=index))
        assert found == pytest.approx(expected, rel=1e-12)

    def test_late_weight_gradients_of_one_microbatch(self) -> None:
        # 14 s b h of inputs and 18 of gradients wait in a layer, where its input of 2 was kept
        one = pipeline(4, 8, accumulation=16, recompute=2)
        late = changed(one, zero_bubble=1)
        assert weight_gradient_bytes(one, first_stage(one).blocks) == 2 * 32 * SBH
        more = activation_bytes(late, first_stage(late)) - activation_bytes(one, first_stage(one))
        assert more == 2 * (32 - 2) * SBH
        # they need no more than a forward pass that keeps everything
        whole, late = changed(one, recompute=0), changed(late, recompute=0)
        kept = activation_bytes(whole, first_stage(whole))
        assert activation_bytes(late, first_stage(late)) == kept

    def test_late_weight_gradients_of_experts_in_8_bits(self) -> None:
        one = case(**EXPERTS, input_bytes=1)
        rows = 4096 * (3 * 1024 + 5 * 2048) + 2048 * 5 * 512
        blocks = replace(first_stage(one).blocks, attention=0, moe=1)
        assert weight_gradient_bytes(one, blocks) == rows + 3 * SBH

    @pytest.mark.parametrize(
        ("one", "expected"),
        [
            # of 4 microbatches two layers each, and four outputs of the embedding
            (pipeline(4, 8, accumulation=16, **PAPER), (4 * 2 * 194 + 4 * 2) * SBH),
            # one layer is there again while it is recomputed, so are the norms of one layer; ends:
            # embedding, input of the last norm and of the output matrix
            (case(**PAPER, recompute=2), (8 * 2 + (194 - 2) + (1 + 2) * 2) * SBH),
            (
                case(**PAPER, **SELECTIVE, again_layernorm=1),
                (8 * (194 - 4) + 4 + (1 + 2) * 2) * SBH,
            ),
            # token prediction keeps layers behind the last
            (case(**PAPER, mtp_layers=1), (9 * 194 + (1 + 2) * 2) * SBH),
        ],
    )
    def test_all_activations(self, one: Case, expected: float) -> None:
        assert activation_bytes(one, first_stage(one)) == expected


# dp 8 x cp 2 replicas; experts spread over 8 of the 8 x 2 x tp 2 ranks: 4 replicas
SPREAD = dict(dp=8, cp=2, tp=2, ep=8)


class TestState:
    """Rajbhandari et al., section 3.1: 2 + 2 + 12 bytes; here gradients have 4."""

    WEIGHTS = Weights(dense=1000.0, routed=600.0)
    NONE = Weights(dense=0.0, routed=0.0)
    SHARE = 1000 / 16 + 600 / 4

    @pytest.mark.parametrize(
        ("changes", "weights", "gradients", "optimizer"),
        [
            (dict(SPREAD, zero=0), 3200, 6400, 19200),
            (dict(SPREAD, zero=1), 3200, 6400, 12 * SHARE),
            (dict(SPREAD, zero=2), 3200, 4 * SHARE, 12 * SHARE),
            (dict(SPREAD, zero=3), 2 * SHARE, 4 * SHARE, 12 * SHARE),
            # ep 1: an expert's parts are on tp ranks like everything else: 16 replicas
            (dict(dp=8, cp=2, tp=2), 3200, 6400, 12 * (1000 / 16 + 600 / 16)),
            # more expert ranks than there are keep one replica
            (dict(dp=2, ep=8), 3200, 6400, 12 * (500 + 600)),
            (dict(offload=1), 3200, 6400, 0),
            (dict(main_bytes=16), 3200, 6400, 16 * 1600),
            (dict(gradient_bytes=2), 3200, 3200, 19200),
        ],
    )
    def test_bytes_of_weights_gradients_and_optimizer(
        self, changes: dict[str, float], weights: float, gradients: float, optimizer: float
    ) -> None:
        one = case(**changes)
        assert weight_bytes(one, self.WEIGHTS, self.NONE) == weights
        assert gradient_bytes(one, self.WEIGHTS) == gradients
        assert optimizer_bytes(one, self.WEIGHTS) == optimizer

    def test_hybrid_sharding_divides_by_the_group(self) -> None:
        one = case(zero=3, dp=64, shard_gpus=8)
        assert weight_bytes(one, Weights(1000.0, 0.0), self.NONE) == 250

    def test_eight_bit_products_need_forms_of_the_weights_of_layers(self) -> None:
        layers = Weights(dense=700.0, routed=600.0)
        besides, instead = case(low_bytes=2), case(low_bytes=2.0625, low_only=1)
        assert weight_bytes(besides, self.WEIGHTS, layers) == 2 * 1600 + 2 * 1300
        assert weight_bytes(instead, self.WEIGHTS, layers) == 2 * 300 + 2.0625 * 1300


class TestTheRest:
    OWN = 12 * 1024**2 + 2 * 2 * 1024  # a layer: 12 h^2 and two norms of 2 h
    DENSE = 4 * 1024**2 + 3 * 1024 * 512 + 8 * 1024 + 2 * 2 * 1024  # one with experts, without them
    EXPERT = 3 * 1024 * 2048

    @pytest.mark.parametrize(
        ("bytes_of", "one", "expected"),
        [
            (logit_bytes, case(), 4 * 2048 * 51200),
            (logit_bytes, case(tp=8, cp=2, mtp_layers=1), 2 * 4 * 1024 * 51200 / 8),
            (logit_bytes, case(logit_bytes=20), 20 * 2048 * 51200),
            (logit_bytes, case(tp=8), 4 * 2048 * 51200 / 8),
            # the whole vocabulary on each rank
            (logit_bytes, case(tp=8, gathered_logits=1), 4 * 2048 * 51200),
            # gathered inputs of products stay whole
            (outside_pair, case(**SPLIT), 2 * 2 * SBH / 8),
            (outside_pair, case(**SPLIT, gathered_inputs=1), 2 * SBH / 8 + 2 * SBH),
            (outside_pair, case(gathered_inputs=1), outside_pair(case())),
            # buffers to receive in, and the gathered input
            (message_bytes, case(tp=4), 0),
            (message_bytes, pipeline(2, 8), 2 * 2 * SBH),
            (message_bytes, case(tp=4, sequence_parallel=1), 2 * SBH),
            (message_bytes, pipeline(2, 8, tp=4, sequence_parallel=1), 3 * SBH),
            # placeholders of weight gradients in 16 bits: of one layer, of the output matrix
            (transient_bytes, case(), 2 * OWN),
            (loss_bytes, case(), 2 * 51200 * 1024),
            (transient_bytes, case(dummy_gradients=0), 0),
            (loss_bytes, case(dummy_gradients=0), 0),
            # 16-bit logits beside the fp32 ones: 2 bytes of 2048 x 51200 are more than 2 of the
            # table's 1024 x 51200, less 4 of them
            (loss_bytes, case(narrow_logits=1), 2 * 2048 * 51200),
            # 16 tokens: fp32 logits have become 16-bit ones when the table's placeholder is there
            (
                loss_bytes,
                case(narrow_logits=1, seq=16),
                2 * 16 * 51200 + 2 * 1024 * 51200 - 4 * 16 * 51200,
            ),
            # the widest gradient where there are no logits
            (
                transient_bytes,
                pipeline(2, 8, gated=1, dummy_gradients=0, tp=2),
                2 * 2048 * 2 * 4096 / 2,
            ),
            # experts share their placeholders; ZeRO 3 gathers two whole layers
            (transient_bytes, case(**EXPERTS, ep=2, dp=2), 2 * (DENSE + EXPERT)),
            (transient_bytes, case(**EXPERTS, zero=3, dp=2), 2 * 2 * (DENSE + 8 * EXPERT)),
        ],
    )
    def test_bytes(self, bytes_of: Any, one: Case, expected: float) -> None:
        of_a_stage = bytes_of in (transient_bytes, loss_bytes)
        found = bytes_of(one, first_stage(one)) if of_a_stage else bytes_of(one)
        assert found == expected

    def test_without_the_loss_there_is_no_placeholder_of_its_table(self) -> None:
        one = case(narrow_logits=1, seq=16)
        assert loss_bytes(one, replace(first_stage(one), loss=0)) == 0

    @pytest.mark.parametrize(("pp", "held"), [(1, [1, 1, 1]), (2, [0, 1, 1]), (4, [0, 0, 1])])
    def test_logits_are_on_the_last_stage(self, pp: int, held: list[int]) -> None:
        one = pipeline(pp, 8, tp=2)
        found = [float(stage_memory(one, stage).logits) for stage in stages_that_matter(one)]
        assert found == [4 * 2048 * 51200 / 2 * share for share in held]

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


# 3 dense layers in front of 5 with experts
DENSE_FIRST = dict(
    mlp_blocks=3,
    moe_blocks=5,
    dense_first=1,
    experts=8,
    top_k=2,
    expert_ffn=2048,
    pp=4,
    layers_middle=2,
    layers_last=2,
)
MIXED = dict(mlp_blocks=4, moe_blocks=4, dense_first=0)


class TestComposition:
    """Dense layers at the front, the rest spread evenly."""

    def stages(self, layers_first: int) -> list[Blocks]:
        one = case(**DENSE_FIRST, layers_first=layers_first)
        behind = (8 - layers_first) / 3
        return [first_blocks(one), later_blocks(one, behind)]

    def test_all_dense_layers_fit_into_the_first_stage(self) -> None:
        first, later = self.stages(5)
        assert (first.mlp, first.moe) == (3, 2)
        assert (later.mlp, later.moe) == (0, 1)

    def test_dense_layers_that_do_not_fit_are_behind_it(self) -> None:
        first, later = self.stages(2)
        assert (first.mlp, first.moe) == (2, 0)
        assert (later.mlp, later.moe) == (pytest.approx(1 / 3), pytest.approx(5 / 3))

    @pytest.mark.parametrize("dense_first", [0, 1])
    def test_stages_add_up_to_the_model(self, dense_first: int) -> None:
        one = case(**{**DENSE_FIRST, "dense_first": dense_first}, layers_first=2)
        first, later = first_blocks(one), later_blocks(one, 2)
        for name in Blocks.__dataclass_fields__:
            total = getattr(first, name) + 3 * getattr(later, name)
            assert total == pytest.approx(getattr(all_blocks(one), name)), name

    def test_kinds_in_turn_are_spread_evenly(self) -> None:
        one = case(**DENSE_FIRST | MIXED, layers_first=2)
        for blocks in (first_blocks(one), later_blocks(one, 2)):
            assert (blocks.mlp, blocks.moe, blocks.attention) == (1, 1, 2)

    def test_fewer_layers_at_the_ends(self) -> None:
        one = changed(pipeline(4, 30), layers_first=7, layers_middle=8, layers_last=7)
        first, second, last = stages_that_matter(one)
        assert [s.blocks.layers for s in (first, second, last)] == [7, 8, 7]
        assert [s.index for s in (first, second, last)] == [0, 1, 3]

    def test_of_two_stages_the_second_is_the_last(self) -> None:
        one = changed(pipeline(2, 9), layers_first=5, layers_middle=99, layers_last=4)
        assert [s.blocks.layers for s in stages_that_matter(one)] == [5, 4, 4]


LLAMA = dict(causal=1, gated=1, rope=1, rms_norm=1, vocab=128256, qk_dim=128, value_dim=128)
LLAMA70B_12 = dict(LLAMA, hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=12)
LLAMA405B_4 = dict(LLAMA, hidden=16384, ffn=53248, heads=128, kv_heads=16, layers=4)
DEEPSEEK_V2_4 = dict(
    LLAMA,
    hidden=5120,
    ffn=12288,
    heads=128,
    kv_heads=128,
    layers=4,
    vocab=102400,
    qk_dim=192,
    mla=1,
    q_rank=1536,
    kv_rank=512,
    rope_dim=64,
    mlp_blocks=1,
    dense_first=1,
    moe_blocks=3,
    experts=160,
    top_k=6,
    expert_ffn=1536,
    expert_hidden=5120,
    shared_ffn=3072,
)


def published(model: dict[str, Any], seq: int, **mesh: int) -> Case:
    """Megatron-core and TransformerEngine: bf16, fp32 gradients, distributed optimizer."""
    layers = model["layers"]
    each = layers / mesh.get("pp", 1)
    shape = Shape(**dict(seq=seq, attention_blocks=layers, mlp_blocks=layers) | model)
    return Case(
        shape,
        Mesh(
            **mesh,
            accumulation=4,
            sequence_parallel=int(mesh.get("tp", 1) > 1),
            zero=1,
            layers_first=each,
            layers_middle=each,
            layers_last=each,
        ),
        NO_MACHINE,
        replace(software_of(load_calibration().software["megatron-core"]), context_bytes=0),
    )


# GiB of max_memory_allocated on the fullest of eight B200: Megatron-LM at 23e00ed, as printed in
# MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md (columns of the real runs)
PRINTED = [
    ("70B of 12 layers, pp 2", published(LLAMA70B_12, 4096, pp=2, dp=4), 66.55),
    ("70B of 12 layers, tp 2", published(LLAMA70B_12, 4096, tp=2, dp=4), 60.68),
    ("405B of 4 layers, pp 2", published(LLAMA405B_4, 4096, pp=2, dp=4), 87.08),
    ("405B of 4 layers, tp 4", published(LLAMA405B_4, 4096, tp=4, dp=2), 52.89),
    ("DeepSeek-V2 of 4 layers, ep 8", published(DEEPSEEK_V2_4, 4096, ep=8, dp=8), 45.63),
    ("DeepSeek-V2, ep 4, pp 2", published(DEEPSEEK_V2_4, 4096, ep=4, pp=2, dp=4), 44.7),
    ("131072 tokens", published(LLAMA70B_12, 131072, tp=2, cp=4), 112.67),
]


@pytest.mark.parametrize(("name", "one", "gibibytes"), PRINTED, ids=[row[0] for row in PRINTED])
def test_peaks_that_were_printed(name: str, one: Case, gibibytes: float) -> None:
    assert float(peak_bytes(one)) / GIB == pytest.approx(gibibytes, rel=0.02)


CASES = drawn(seed=1, count=100)
TOGETHER = many(CASES)


class TestManyCases:
    def test_the_parts_add_up_and_none_is_negative(self) -> None:
        for stage in stages_that_matter(TOGETHER):
            memory = stage_memory(TOGETHER, stage)
            parts = [getattr(memory, name) for name in type(memory).__dataclass_fields__]
            assert memory.total == pytest.approx(sum(np.broadcast_arrays(*parts)))
            assert min(np.min(part) for part in parts) >= 0

    def test_the_peak_is_that_of_the_fullest_stage(self) -> None:
        totals = [stage_memory(TOGETHER, s).total for s in stages_that_matter(TOGETHER)]
        assert np.array_equal(peak_bytes(TOGETHER), np.max(totals, axis=0))
        fullest = np.argmax(totals, axis=0)
        assert {0, 2} <= set(fullest), "no case whose first or whose last stage is the fullest"

    def test_rows_at_once_are_rows_one_by_one(self) -> None:
        together = peak_bytes(TOGETHER)
        assert together.shape == (100,)
        assert together == pytest.approx([float(peak_bytes(one)) for one in CASES], rel=1e-12)

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("micro_batch", [1, 2, 4]),
            ("seq", [1024, 2048, 8192]),
            ("layers_first", [2, 4, 8]),
            ("main_bytes", [8, 12, 16]),
        ],
    )
    def test_more_never_takes_less(self, field: str, values: list[float]) -> None:
        peaks = [peak_bytes(changed(TOGETHER, **{field: value})) for value in values]
        assert np.all(np.diff(peaks, axis=0) >= 0) and np.any(np.diff(peaks, axis=0) > 0)

    @pytest.mark.parametrize(("field", "values"), [("zero", [0, 1, 2]), ("recompute", [0, 1, 2])])
    def test_what_saves_memory_never_takes_more(self, field: str, values: list[float]) -> None:
        # some layers computed again in full may keep more than all of them in part
        whole = changed(TOGETHER, full_layers=0)
        peaks = [peak_bytes(changed(whole, **{field: value})) for value in values]
        assert np.all(np.diff(peaks, axis=0) <= 0) and np.any(np.diff(peaks, axis=0) < 0)

    def test_arrays_in_one_field_are_enough(self) -> None:
        peaks = peak_bytes(case(dp=np.array([1, 2, 4]), zero=1))
        assert np.all(np.diff(peaks) < 0)
