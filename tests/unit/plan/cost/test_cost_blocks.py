"""Seconds of blocks, worked out by hand.

Most cases have free memory and links, so that seconds are operations over 1e15; T is 2048 tokens,
h 1024, 16 heads of 64. Others have free products and memory of 1e12 bytes/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from cost_specimens import NEVER, case, changed, only_products

from hpctrain.plan.cost import blocks
from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import EAGER_NORM_TRAFFIC, added_bytes
from hpctrain.plan.cost.step import stages_of
from hpctrain.spec.engines.abilities import GradientAddition

T, H, V = 2048, 1024, 51200
PEAK = 1e15
LATENT = dict(mla=1, q_rank=384, kv_rank=128, qk_dim=96, rope_dim=32)
EXPERTS = dict(
    mlp_blocks=0, moe_blocks=8, experts=8, top_k=2, expert_ffn=2048, shared_ffn=512, gated=1
)
MAMBA = dict(
    attention_blocks=4,
    mamba_blocks=4,
    mamba_inner=2048,
    mamba_state=128,
    mamba_groups=8,
    mamba_heads=32,
    mamba_chunk=256,
)


def only_memory(**changes: float) -> Case:
    """A case whose seconds are bytes over 1e12."""
    none = dict(peak=NEVER, peak_low=NEVER, nvlink_bandwidth=NEVER, network_bandwidth=NEVER)
    return case(**none, **changes)


def hops(size: int) -> float:
    return 6e-6 * math.log2(size + 1)


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize(
    ("block", "changes"), [(blocks.attention, {}), (blocks.mlp, {}), (blocks.mamba, MAMBA)]
)
def test_ranks_have_a_share_of_heads_widths_and_tokens(
    block: Callable[[Case], blocks.Passes], changes: dict[str, float], axis: str
) -> None:
    whole, part = (block(only_products(**changes, **{axis: size})) for size in (1, 4))
    assert part.forward == pytest.approx(whole.forward / 4)
    assert part.backward == pytest.approx(whole.backward / 4)


class TestAttention:
    def test_grouped_queries(self) -> None:
        # QKV 1024 x (16 + 2 x 4) 64, output 1024 x 1024, two operations each and token;
        # core: 2 products x 2 operations x T^2 / 2 pairs x 16 heads x 64; five products back
        passes = blocks.attention(only_products(kv_heads=4))
        projections, core = 2 * T * (H * 1536 + H * H), 4 * (T * T // 2) * 1024
        assert passes.forward * PEAK == pytest.approx(projections + core)
        assert passes.backward * PEAK == pytest.approx(2 * projections + 2.5 * core)

    @pytest.mark.parametrize(
        ("keys", "changes"),
        [
            (1024, dict()),
            (2048, dict(causal=0)),
            (512, dict(window=512, window_share=1)),
            (768, dict(window=512, window_share=0.5)),
            (1024, dict(window=1500, window_share=1)),
            (1500, dict(window=1500, window_share=1, causal=0)),
            (2048, dict(window=9999, window_share=1, causal=0)),
            (1024, dict(window=0, window_share=1)),
        ],
    )
    def test_keys_that_a_query_sees(self, keys: int, changes: dict[str, float]) -> None:
        seen = blocks.visible_pairs(only_products(**changes), 1.0)
        assert seen == pytest.approx(T * keys)

    def test_unfused_attention_computes_masked_pairs_too(self) -> None:
        core = blocks.core_attention(only_products(flash=0))
        assert core.forward * PEAK == pytest.approx(4 * T * T * 1024)
        assert core.backward * PEAK == pytest.approx(8 * T * T * 1024)

    @pytest.mark.parametrize(
        ("rank", "per_token"),
        [
            # down to 384 and 128 + 32, up to 16 x 96 and 16 x (64 + 64), output 16 x 64 x 1024
            (384, 393_216 + 163_840 + 589_824 + 262_144 + 1_048_576),
            (0, 163_840 + 1_572_864 + 262_144 + 1_048_576),
        ],
    )
    def test_latent_attention(self, rank: int, per_token: int) -> None:
        one = only_products(**LATENT | {"q_rank": rank})
        # keys of 96 and values of 64: 2 operations x T^2 / 2 x 16 x (96 + 64)
        core = T * T * 16 * 160
        assert blocks.attention(one).forward * PEAK == pytest.approx(2 * T * per_token + core)

    def test_without_a_query_rank_nothing_goes_down_to_it(self) -> None:
        # bytes of joint down-projection, up-projections and output; none for a product of size 0
        one = only_memory(**LATENT | {"q_rank": 0})
        ups = [(160, 1024), (1536, 1024), (2048, 128), (1024, 1024)]
        moved = sum(2 * (T * k + k * n + T * n) for n, k in ups)
        assert blocks.latent_projections(one).forward * 1e12 == pytest.approx(moved)

    def test_tensor_parallel_ranks_repeat_the_way_down(self) -> None:
        passes = blocks.latent_projections(only_products(**LATENT, tp=4))
        down, rest = 393_216 + 163_840, 589_824 + 262_144 + 1_048_576
        assert passes.forward * PEAK == pytest.approx(2 * T * (down + rest / 4))

    def test_rotation_streams_queries_and_keys(self) -> None:
        plain, turned = (blocks.attention(only_memory(kv_heads=4, rope=r)) for r in (0, 1))
        assert (turned.forward - plain.forward) * 1e12 == pytest.approx(2 * 2 * T * 20 * 64)


class TestMlp:
    @pytest.mark.parametrize(("gated", "matrices"), [(0, 2), (1, 3)])
    def test_products(self, gated: int, matrices: int) -> None:
        passes = blocks.mlp(only_products(gated=gated))
        assert passes.forward * PEAK == pytest.approx(2 * T * matrices * H * 4096)
        assert passes.backward == pytest.approx(2 * passes.forward)

    def test_eight_bits_double_the_rate(self) -> None:
        wide, low = (blocks.mlp(only_products(low=low)) for low in (0, 1))
        assert low.forward == pytest.approx(wide.forward / 2)

    def test_activation_function_streams(self) -> None:
        # with a gate three tensors [T, f], without two; 1.5 times the traffic of the minimum
        products = {n: 2 * (T * H + n * H * 4096 + n * T * 4096) for n in (1, 2)}
        second = 2 * (T * 4096 + 4096 * H + T * H)
        for gated in (0, 1):
            one = only_memory(gated=gated, streaming=1.5)
            streams = 1.5 * 2 * T * 4096 * (gated + 2)
            moved = products[1 + gated] + second + streams
            assert blocks.feed_forward(one, 4096).forward * 1e12 == pytest.approx(moved)


class TestStreams:
    def test_norm_and_residual_move_five_tensors(self) -> None:
        passes = blocks.surroundings(only_memory())
        assert passes.forward * 1e12 == pytest.approx(5 * 2 * T * H)
        assert passes.backward == pytest.approx(1.6 * passes.forward)
        assert blocks.norm(only_memory()).forward * 1e12 == pytest.approx(2 * 2 * T * H)

    def test_a_norm_of_many_kernels_moves_more_and_the_residual_does_not(self) -> None:
        one = only_memory(norm_traffic=EAGER_NORM_TRAFFIC)
        both = [blocks.norm(one).forward, blocks.norm(one).backward]
        # 36 bytes per element forward and 76 backward, split as those of a fused kernel
        assert sum(both) * 1e12 == pytest.approx((36 + 76) * T * H, rel=0.05)
        residual = 3 * 2 * T * H
        moved = blocks.surroundings(one).forward * 1e12
        assert moved == pytest.approx(both[0] * 1e12 + residual)

    @pytest.mark.parametrize(("sequence", "share"), [(0, 1.0), (1, 0.25)])
    def test_sequence_parallelism_splits_what_is_outside(self, sequence: int, share: float) -> None:
        one = only_memory(tp=4, sequence_parallel=sequence)
        assert blocks.surroundings(one).forward * 1e12 == pytest.approx(share * 10 * T * H)


class TestExperts:
    def test_routed_and_shared_and_router(self) -> None:
        # 4096 rows over 8 experts are 512 each, and half a tile of 128 more
        passes = blocks.moe(only_products(**EXPERTS))
        router, shared, routed = T * H * 8, T * 3 * H * 512, 8 * 576 * 3 * H * 2048
        assert passes.forward * PEAK == pytest.approx(2 * (router + shared + routed))
        assert passes.backward == pytest.approx(2 * passes.forward)

    def test_spread_experts_are_whole_and_see_a_share_of_the_tokens(self) -> None:
        # tp 2 x ep 2: 2048 rows over 4 experts of the full size
        passes = blocks.experts(only_products(**EXPERTS, tp=2, ep=2))
        assert passes.forward * PEAK == pytest.approx(2 * 4 * 576 * 3 * H * 2048)

    def test_without_expert_parallelism_every_expert_is_split(self) -> None:
        passes = blocks.experts(only_products(**EXPERTS, tp=2))
        assert passes.forward * PEAK == pytest.approx(2 * 8 * 576 * 3 * H * 1024)

    def test_latent_experts_take_in_less(self) -> None:
        full, latent = (
            blocks.experts(only_products(**EXPERTS, expert_hidden=width)) for width in (H, H // 4)
        )
        assert latent.forward == pytest.approx(full.forward / 4)

    def test_permutation_and_activation_stream_routed_rows(self) -> None:
        one = only_memory(**EXPERTS)
        assert blocks.permutation(one).forward * 1e12 == pytest.approx(6 * 2 * 4096 * H)
        activation = blocks.expert_activation(one)
        assert activation.forward * 1e12 == pytest.approx(3 * 2 * 4096 * 2048)

    def test_one_copy_goes_to_each_node_and_each_rank(self) -> None:
        # 1024 tokens of 2048 bytes; 2 of 8 experts' choices meet 2 (1 - 1/4) = 1.5 of 2 nodes and
        # 16 (1 - (15/16)^2) = 1.9375 of 16 ranks
        one = case(**{**EXPERTS, "seq": 1024, "experts": 64}, ep=16, one_copy=1)
        moved = 1024 * 2048
        near, far = 1.9375 / 8 * 7 * moved / 1e11, 1.5 / 2 * moved / 1e10
        there = blocks.exchange(one, 2048, 16, 1)
        assert there == pytest.approx(max(near, far) + hops(16))
        every = blocks.exchange(changed(one, one_copy=0), 2048, 16, 1)
        assert every == pytest.approx(2 * moved / 2 / 1e10 + hops(16))

    def test_with_many_choices_every_rank_is_met_once(self) -> None:
        wide = case(**{**EXPERTS, "seq": 1024, "experts": 512, "top_k": 200}, ep=8, one_copy=1)
        assert blocks.exchange(wide, 2048, 8, 1) == pytest.approx(
            7 / 8 * 8 * 1024 * 2048 / 1e11 + hops(8)
        )

    def test_a_dispatcher_reaches_a_share_of_the_links(self) -> None:
        whole, half = (
            blocks.exchange(case(**EXPERTS, ep=8, dispatch_efficiency=e), 2048, 8, 1)
            for e in (1.0, 0.5)
        )
        assert half == pytest.approx(2 * whole)

    def test_tokens_are_sent_there_and_back(self) -> None:
        # 4096 rows of 2 x 1024 bytes; 7 of 8 leave the GPU; there and back in either pass
        passes = blocks.dispatch_messages(case(**EXPERTS, ep=8))
        expected = 2 * (7 / 8 * 4096 * 2048 / 1e11 + hops(8))
        assert passes.forward_messages == pytest.approx(expected)
        assert passes.backward_messages == pytest.approx(expected)
        hidden = blocks.dispatch_messages(case(**EXPERTS, ep=8, ep_overlap=0.75))
        assert hidden.forward_messages == pytest.approx(expected / 4)

    def test_tensor_parallel_ranks_send_different_tokens(self) -> None:
        passes = blocks.dispatch_messages(case(**EXPERTS, ep=4, tp=2))
        expected = 2 * (3 / 4 * 2048 * 2048 / 1e11 + hops(4))
        assert passes.forward_messages == pytest.approx(expected)

    def test_experts_of_the_same_rank_need_no_messages(self) -> None:
        assert blocks.dispatch_messages(case(**EXPERTS)).forward_messages == 0


class TestMamba:
    def test_projections_and_scan(self) -> None:
        # into 2 x 2048 + 2 x 8 x 128 + 32 = 6176 columns, out of 2048 rows;
        # scan: a chunk of 256 times (groups x state + inner), and four times inner x state
        passes = blocks.mamba(only_products(**MAMBA))
        scan = T * (256 * (1024 + 2048) + 4 * 2048 * 128)
        assert passes.forward * PEAK == pytest.approx(2 * T * H * (6176 + 2048) + scan)
        assert passes.backward == pytest.approx(2 * passes.forward)

    def test_scan_has_a_rate_of_its_own(self) -> None:
        fast, slow = (blocks.mamba(only_products(**MAMBA, scan_efficiency=e)) for e in (1.0, 0.1))
        scan = T * (256 * 3072 + 4 * 2048 * 128)
        assert (slow.forward - fast.forward) * PEAK == pytest.approx(9 * scan)

    def test_convolution_and_gate_stream(self) -> None:
        products = 2 * (T * H + H * 6176 + T * 6176) + 2 * (T * 2048 + 2048 * H + T * H)
        moved = products + 10 * T * H + 12 * 2 * T * 2048
        assert blocks.mamba(only_memory(**MAMBA)).forward * 1e12 == pytest.approx(moved)


class TestEnds:
    def test_logits_stay_in_sixteen_bits(self) -> None:
        for low in (0, 1):
            passes = blocks.output_layer(only_products(low=low))
            assert passes.forward * PEAK == pytest.approx(2 * T * H * V)

    @pytest.mark.parametrize(("fused", "per_logit"), [(0, 24), (1, 8)])
    def test_cross_entropy_streams_logits(self, fused: int, per_logit: int) -> None:
        one = only_memory(fused_loss=fused, tp=2)
        product = 2 * (T * H + H * V / 2 + T * V / 2)
        moved = product + per_logit * T * V / 2 + 10 * T * H
        assert blocks.output_layer(one).forward * 1e12 == pytest.approx(moved)

    def test_embedding_reads_rows(self) -> None:
        assert blocks.embedding(only_memory()).forward * 1e12 == pytest.approx(3 * 2 * T * H)

    def test_embedding_is_one_reduction_and_a_block_two(self) -> None:
        one = case(tp=4)
        part, whole = blocks.embedding(one), blocks.region_messages(one)
        assert part.forward_messages == pytest.approx(whole.forward_messages / 2)


class TestMessages:
    @pytest.mark.parametrize("sequence", [0, 1])
    def test_an_all_reduce_of_the_input_each_way(self, sequence: int) -> None:
        # 2 x 3/4 of 2 x 2048 x 1024 bytes
        one = case(tp=4, sequence_parallel=sequence, tp_overlap=0.25)
        expected = 0.75 * (1.5 * 4_194_304 / 1e11 + 2 * hops(4))
        passes = blocks.region_messages(one)
        assert passes.forward_messages == pytest.approx(expected)
        assert passes.backward_messages == pytest.approx(expected)

    def test_blocks_enter_the_region_once(self) -> None:
        one = case(tp=4)
        once = blocks.region_messages(one).forward_messages
        for block in (blocks.attention, blocks.mlp, blocks.output_layer):
            assert block(one).forward_messages == pytest.approx(once)

    def test_keys_and_values_go_around_the_ring(self) -> None:
        # 4 grouped heads of keys and values: 2 x 512 tokens x 4 x 128 bytes, three exchanges
        one = case(cp=4, kv_heads=4, peak=NEVER)
        once = 3 * (6e-6 + 524_288 / 1e11)
        passes = blocks.context_messages(one)
        assert passes.forward_messages == pytest.approx(once)
        assert passes.backward_messages == pytest.approx(2 * once)

    def test_attention_hides_nine_tenths_of_the_ring(self) -> None:
        once = 3 * (6e-6 + 524_288 / 1e11)
        passes = blocks.context_messages(case(cp=4, kv_heads=4, peak=1e11))
        assert passes.forward_messages == pytest.approx(once / 10)
        assert passes.backward_messages == pytest.approx(once / 5)

    def test_attention_hides_what_it_lasts(self) -> None:
        # the slow network takes 1.59e-3 s; attention takes 2.1e-4 and hides 0.8 of that
        one = case(cp=4, kv_heads=4, peak=1e13, domain=1, network_bandwidth=1e9)
        once, core = 3 * (6e-6 + 524_288 / 1e9), 4 * 512 * 1024 * 1024 / 1e13
        passes = blocks.context_messages(one)
        assert passes.forward_messages == pytest.approx(once - 0.8 * core)
        assert passes.backward_messages == pytest.approx(2 * once - 0.8 * 2.5 * core)

    def test_one_rank_has_no_ring(self) -> None:
        assert blocks.context_messages(case()).forward_messages == 0


def test_a_step_of_gpt_takes_the_operations_of_narayanan() -> None:
    # 72 B s L h^2 (1 + s / 6h + V / 12 L h): arXiv 2104.04473, equation 3 without recomputation
    everything = stages_of(only_products(flash=0)).everything
    expected = 72 * T * 8 * H**2 * (1 + T / (6 * H) + V / (12 * 8 * H))
    assert everything * PEAK == pytest.approx(expected)


def test_full_recomputation_takes_96_instead_of_72() -> None:
    # equation 3: the layers' forward pass once more; the logits are not computed again
    everything = stages_of(only_products(flash=0, recompute=2)).everything
    layers, logits = 96 * T * 8 * H**2 * (1 + T / (6 * H)), 6 * T * H * V
    assert everything * PEAK == pytest.approx(layers + logits)


def test_arrays_and_numbers_give_the_same() -> None:
    lengths = np.array([1024.0, 2048.0, 8192.0])
    together = blocks.attention(only_products(seq=lengths))
    for index, length in enumerate(lengths):
        alone = blocks.attention(only_products(seq=float(length)))
        assert together.forward[index] == pytest.approx(float(alone.forward), rel=1e-12)


class TestBesideWeights:
    """8 ranks over NVLink; without sequence parallelism one all-reduce back for each region."""

    @pytest.mark.parametrize(("sequence_parallel", "share"), [(0, 0.8), (1, 0.4)])
    def test_reductions_of_the_backward_pass_hide(
        self, sequence_parallel: int, share: float
    ) -> None:
        slow = dict(peak=1e12, tp=8, sequence_parallel=sequence_parallel)
        plain, beside = case(**slow), case(beside_weights=1.0, **slow)
        hidden = share * blocks.region_messages(plain).backward_messages
        assert blocks.beside_weights(beside, blocks.mlp(beside)) == pytest.approx(hidden)
        assert blocks.beside_weights(plain, blocks.mlp(plain)) == 0
        before, after = (float(stages_of(one).slowest.tensor) for one in (plain, beside))
        assert before - after > 2 * 8 * hidden * (1 - 1e-9), "of each attention and each MLP"

    def test_no_longer_than_the_product_beside_them(self) -> None:
        slow_links = dict(nvlink_bandwidth=1e6, tp=8)
        one = blocks.attention(case(**slow_links))
        both = case(beside_weights=1.0, **slow_links)
        assert blocks.beside_weights(both, one) == pytest.approx(one.backward / 4)

    def test_later_weight_gradients_hide_nothing(self) -> None:
        late = case(tp=8, beside_weights=1.0, zero_bubble=1)
        assert blocks.beside_weights(late, blocks.mlp(late)) == 0


# -- Seconds of collectives: a GPU sends 1e11 bytes/s over NVLink and 1e10 over the network -----


GB = 1e9


@pytest.mark.parametrize(
    ("size", "stride", "inside"),
    [(4, 1, 4), (8, 1, 8), (16, 1, 8), (4, 4, 2), (4, 8, 1), (4, 16, 1), (2, 2, 2), (1, 1, 1)],
)
def test_members_of_one_domain_of_eight(size: int, stride: int, inside: int) -> None:
    assert blocks.members_inside(case(), size, stride) == inside


@pytest.mark.parametrize(
    ("one", "gigabytes", "size", "stride", "seconds"),
    [
        (case(), 4, 4, 1, 0.03),  # inside a domain the ring moves three quarters
        # across two half of the tensor comes in over 8 cards of 1e10, NVLink of 2e11 takes 0.0375
        (case(nvlink_bandwidth=2e11), 8, 16, 1, 0.05),
        (case(nvlink_bandwidth=1e10), 8, 16, 1, 0.75),  # the slower of both links counts
        # stride 8: 4 domains of one member, each with its own card only: 3/4 of 4e9 over 1e10;
        # stride 4: 2 of the 8 ranks share a domain, 4 domains, two cards: 3/4 x 4e9 / 2e10
        (case(), 4, 4, 8, 0.3),
        (case(), 4, 8, 4, 0.15),
        (case(domain=64), 4, 4, 8, 0.03),
        (case(), 0, 3, 1, 0),  # a small message waits for its start
        # NVLink does not pass the spine
        (case(dp=128, leaf_gpus=64, oversubscription=4), 4, 4, 1, 0.03),
    ],
)
def test_rings(one: Case, gigabytes: float, size: int, stride: int, seconds: float) -> None:
    found = blocks.gather_seconds(one, gigabytes * GB, size, stride)
    assert found == pytest.approx(seconds + hops(size))
    # an all-reduce is both halves
    assert blocks.reduce_seconds(one, gigabytes * GB, size, stride) == pytest.approx(2 * found)
    assert blocks.gather_seconds(one, gigabytes * GB, 1, stride) == 0, "alone it costs nothing"


@pytest.mark.parametrize(
    ("changes", "near", "far", "size", "seconds"),
    [
        ({}, 3, 0, 4, 0.03 + hops(4)),
        ({}, 3, 2, 16, 0.2 + hops(16)),
        (dict(nvlink_bandwidth=1e9), 1.75, 2, 16, 1.75 + hops(16)),
        ({}, 0, 0, 1, 0),
    ],
)
def test_all_to_all(
    changes: dict[str, float], near: float, far: float, size: int, seconds: float
) -> None:
    found = blocks.exchange_seconds(case(**changes), near * GB, far * GB, size)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(("stride", "seconds"), [(4, 0.01), (8, 0.1)])
def test_a_message_to_a_neighbour_and_to_another_domain(stride: int, seconds: float) -> None:
    assert blocks.send_seconds(case(), 1 * GB, stride) == pytest.approx(seconds + 6e-6)


class TestBandwidth:
    def test_shares_of_the_data_sheet(self) -> None:
        one = case(nvlink_efficiency=0.5, network_efficiency=0.2)
        assert (blocks.nvlink(one), blocks.network(one)) == (
            pytest.approx(5e10),
            pytest.approx(2e9),
        )

    @pytest.mark.parametrize(
        ("gpus", "leaf", "expected"), [(64, 64, 1e10), (128, 64, 2.5e9), (128, 0, 1e10)]
    )
    def test_spines_are_oversubscribed_beyond_one_leaf(
        self, gpus: int, leaf: int, expected: float
    ) -> None:
        one = case(dp=gpus, leaf_gpus=leaf, oversubscription=4)
        assert blocks.network(one) == pytest.approx(expected)


def test_groups_of_any_number_of_cases_at_once() -> None:
    sizes, strides = np.array([1, 4, 16, 4]), np.array([1, 1, 1, 8])
    expected = [0.0, 0.015 + hops(4), 0.01875 + hops(16), 0.15 + hops(4)]
    one = changed(case(), nvlink_bandwidth=np.full(4, 1e11))
    seconds = blocks.gather_seconds(one, 2 * GB, sizes, strides)
    assert seconds == pytest.approx(expected)


# -- Bytes that add a microbatch's weight gradients to earlier ones, and their seconds ----------


@pytest.mark.parametrize(
    ("way", "kept", "expected"),
    [
        ("product", 4, 0),
        ("main", 4, 2 + 4 + 4),  # reads the new one, reads and writes the sum
        ("main", 2, 2 + 2 + 2),
        ("autograd", 2, 3 / 4 * (2 + 2 + 2)),  # the first of four is assigned
        ("block", 4, 2 + 4),
        ("joined", 4, 2 + 2 + 2 + 4 + 4 + 4),  # joined, changed, divided
        ("joined", 2, 2 + 2 + 2 + 2),
    ],
)
def test_bytes_of_each_way(way: GradientAddition, kept: float, expected: float) -> None:
    assert added_bytes(way, 2, kept, 4) == pytest.approx(expected)


def test_a_single_microbatch_adds_to_nothing() -> None:
    found = added_bytes("autograd", 2, 2, np.array([1.0, 2.0]))
    assert list(np.asarray(found)) == [0, 3]


def test_a_linear_layer_adds_behind_its_weight_gradient() -> None:
    quick = dict(peak=NEVER, nvlink_bandwidth=NEVER)
    plain, adding = (blocks.linear(case(added_bytes=n, **quick), 100, 300, 200) for n in (0, 10))
    assert adding.forward == plain.forward
    assert adding.backward - plain.backward == pytest.approx(10 * 300 * 200 / 1e12)
    frozen = [
        blocks.linear(case(added_bytes=n, trainable=0.1), 100, 300, 200).backward for n in (0, 10)
    ]
    assert frozen[0] == frozen[1]
