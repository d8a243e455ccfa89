"""Seconds of blocks, worked out by hand.

Most cases have free memory and links, so that seconds are operations over 1e15; T is 2048 tokens,
h 1024, 16 heads of 64. Others have free products and memory of 1e12 bytes/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


# Grouped queries: QKV 1024 x (16 + 2 x 4) 64, output 1024 x 1024, two operations each and token;
# core: 2 products x 2 operations x T^2 / 2 pairs x 16 heads x 64; five products back.
PROJECTIONS, CORE = 2 * T * (H * 1536 + H * H), 4 * (T * T // 2) * 1024
# Latent attention: down to 384 and 128 + 32, up to 16 x 96 and 16 x (64 + 64), output 16 x 64 x
# 1024; keys of 96 and values of 64: 2 operations x T^2 / 2 x 16 x (96 + 64).
DOWN, UP, LATENT_CORE = 393_216 + 163_840, 589_824 + 262_144 + 1_048_576, T * T * 16 * 160
# 4096 rows over 8 experts are 512 each, and half a tile of 128 more.
ROUTER, SHARED, ROUTED = T * H * 8, T * 3 * H * 512, 8 * 576 * 3 * H * 2048
# Mamba: into 2 x 2048 + 2 x 8 x 128 + 32 = 6176 columns, out of 2048 rows; the scan takes a chunk
# of 256 times (groups x state + inner), and four times inner x state.
SCAN = T * (256 * (1024 + 2048) + 4 * 2048 * 128)

# Block, changes, operations forward; backward so many of them, where it matters.
OPERATIONS: list[tuple[Any, dict[str, float], float, float | None]] = [
    (blocks.attention, dict(kv_heads=4), PROJECTIONS + CORE, 2 * PROJECTIONS + 2.5 * CORE),
    # masked pairs too
    (blocks.core_attention, dict(flash=0), 4 * T * T * 1024, 8 * T * T * 1024),
    (blocks.attention, LATENT | dict(q_rank=384), 2 * T * (DOWN + UP) + LATENT_CORE, None),
    (
        blocks.attention,
        LATENT | dict(q_rank=0),
        2 * T * (163_840 + 1_572_864 + 262_144 + 1_048_576) + LATENT_CORE,
        None,
    ),
    # tensor parallel ranks repeat the way down
    (blocks.latent_projections, LATENT | dict(tp=4), 2 * T * (DOWN + UP / 4), None),
    (blocks.mlp, dict(gated=0), 2 * T * 2 * H * 4096, 4 * T * 2 * H * 4096),
    (blocks.mlp, dict(gated=1), 2 * T * 3 * H * 4096, 4 * T * 3 * H * 4096),
    # eight bits double the rate, but for logits, which stay in sixteen
    (blocks.mlp, dict(gated=0, low=1), T * 2 * H * 4096, None),
    (blocks.output_layer, dict(low=0), 2 * T * H * V, None),
    (blocks.output_layer, dict(low=1), 2 * T * H * V, None),
    (blocks.moe, EXPERTS, 2 * (ROUTER + SHARED + ROUTED), 4 * (ROUTER + SHARED + ROUTED)),
    # spread experts are whole and see a share of the tokens: 2048 rows over 4 of them
    (blocks.experts, EXPERTS | dict(tp=2, ep=2), 2 * 4 * 576 * 3 * H * 2048, None),
    (blocks.experts, EXPERTS | dict(tp=2), 2 * 8 * 576 * 3 * H * 1024, None),
    # latent experts take in less
    (blocks.experts, EXPERTS | dict(expert_hidden=H // 4), 2 * ROUTED / 4, None),
    (
        blocks.mamba,
        MAMBA,
        2 * T * H * (6176 + 2048) + SCAN,
        2 * (2 * T * H * (6176 + 2048) + SCAN),
    ),
    # the scan has a rate of its own
    (
        blocks.mamba,
        MAMBA | dict(scan_efficiency=0.1),
        2 * T * H * (6176 + 2048) + 10 * SCAN,
        None,
    ),
]


@pytest.mark.parametrize(("block", "changes", "forward", "backward"), OPERATIONS)
def test_operations(
    block: Any, changes: dict[str, float], forward: float, backward: float | None
) -> None:
    passes = block(only_products(**changes))
    assert passes.forward * PEAK == pytest.approx(forward)
    assert backward is None or passes.backward * PEAK == pytest.approx(backward)


def product_bytes(*sizes: tuple[float, float]) -> float:
    """Bytes of products [T, k] x [k, n] of these (n, k) in 16 bits."""
    return sum(2 * (T * k + k * n + T * n) for n, k in sizes)


BYTES: list[tuple[Any, dict[str, float], float]] = [
    # joint down-projection, up-projections and output; none for a product of size 0
    (
        blocks.latent_projections,
        LATENT | dict(q_rank=0),
        product_bytes((160, 1024), (1536, 1024), (2048, 128), (1024, 1024)),
    ),
    # norm and residual move five tensors; sequence parallelism splits what is outside
    (blocks.surroundings, {}, 5 * 2 * T * H),
    (blocks.norm, {}, 2 * 2 * T * H),
    (blocks.surroundings, dict(tp=4, sequence_parallel=0), 10 * T * H),
    (blocks.surroundings, dict(tp=4, sequence_parallel=1), 10 * T * H / 4),
    (blocks.permutation, EXPERTS, 6 * 2 * 4096 * H),
    (blocks.expert_activation, EXPERTS, 3 * 2 * 4096 * 2048),
    # convolution and gate stream
    (
        blocks.mamba,
        MAMBA,
        product_bytes((6176, H), (H, 2048)) + 10 * T * H + 12 * 2 * T * 2048,
    ),
    # cross entropy moves each logit so often
    *(
        (
            blocks.output_layer,
            dict(fused_loss=fused, tp=2),
            product_bytes((V / 2, H)) + per_logit * T * V / 2 + 10 * T * H,
        )
        for fused, per_logit in ((0, 24), (1, 8))
    ),
    (blocks.embedding, {}, 3 * 2 * T * H),
]


@pytest.mark.parametrize(("block", "changes", "moved"), BYTES)
def test_bytes_that_move(block: Any, changes: dict[str, float], moved: float) -> None:
    assert block(only_memory(**changes)).forward * 1e12 == pytest.approx(moved)


# 4096 rows of 2 x 1024 bytes, of which 7 of 8 leave the GPU; there and back in either pass
SENT = 2 * (7 / 8 * 4096 * 2048 / 1e11 + hops(8))
# 2 x 3/4 of 2 x 2048 x 1024 bytes
REDUCED = 0.75 * (1.5 * 4_194_304 / 1e11 + 2 * hops(4))
# 4 grouped heads of keys and values: 2 x 512 tokens x 4 x 128 bytes, three exchanges
RING = 3 * (6e-6 + 524_288 / 1e11)
# on a slow network, where attention takes 2.1e-4 s and hides 0.8 of that
SLOW, HIDING = 3 * (6e-6 + 524_288 / 1e9), 0.8 * 4 * 512 * 1024 * 1024 / 1e13
GROUPED = dict(cp=4, kv_heads=4)

MESSAGES: list[tuple[Any, dict[str, float], float, float]] = [
    (blocks.dispatch_messages, EXPERTS | dict(ep=8), SENT, SENT),
    (blocks.dispatch_messages, EXPERTS | dict(ep=8, ep_overlap=0.75), SENT / 4, SENT / 4),
    # tensor parallel ranks send different tokens
    (
        blocks.dispatch_messages,
        EXPERTS | dict(ep=4, tp=2),
        2 * (3 / 4 * 2048 * 2048 / 1e11 + hops(4)),
        2 * (3 / 4 * 2048 * 2048 / 1e11 + hops(4)),
    ),
    (blocks.dispatch_messages, EXPERTS, 0, 0),
    (blocks.region_messages, dict(tp=4, sequence_parallel=0, tp_overlap=0.25), REDUCED, REDUCED),
    (blocks.region_messages, dict(tp=4, sequence_parallel=1, tp_overlap=0.25), REDUCED, REDUCED),
    (blocks.context_messages, GROUPED | dict(peak=NEVER), RING, 2 * RING),
    # attention hides nine tenths of the ring, and no more than it lasts
    (blocks.context_messages, GROUPED | dict(peak=1e11), RING / 10, RING / 5),
    (
        blocks.context_messages,
        GROUPED | dict(peak=1e13, domain=1, network_bandwidth=1e9),
        SLOW - HIDING,
        2 * SLOW - 2.5 * HIDING,
    ),
    (blocks.context_messages, {}, 0, 0),
]


@pytest.mark.parametrize(("block", "changes", "forward", "backward"), MESSAGES)
def test_messages(block: Any, changes: dict[str, float], forward: float, backward: float) -> None:
    passes = block(case(**changes))
    assert passes.forward_messages == pytest.approx(forward)
    assert passes.backward_messages == pytest.approx(backward)


class TestAttention:
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

    def test_rotation_streams_queries_and_keys(self) -> None:
        plain, turned = (blocks.attention(only_memory(kv_heads=4, rope=r)) for r in (0, 1))
        assert (turned.forward - plain.forward) * 1e12 == pytest.approx(2 * 2 * T * 20 * 64)


class TestMlp:
    def test_activation_function_streams(self) -> None:
        # with a gate three tensors [T, f], without two; 1.5 times the traffic of the minimum
        for gated in (0, 1):
            one = only_memory(gated=gated, streaming=1.5)
            products = product_bytes(((1 + gated) * 4096, H), (H, 4096))
            moved = products + 1.5 * 2 * T * 4096 * (gated + 2)
            assert blocks.feed_forward(one, 4096).forward * 1e12 == pytest.approx(moved)


class TestStreams:
    def test_the_backward_pass_moves_more(self) -> None:
        passes = blocks.surroundings(only_memory())
        assert passes.backward == pytest.approx(1.6 * passes.forward)

    def test_a_norm_of_many_kernels_moves_more_and_the_residual_does_not(self) -> None:
        one = only_memory(norm_traffic=EAGER_NORM_TRAFFIC)
        both = [blocks.norm(one).forward, blocks.norm(one).backward]
        # 36 bytes per element forward and 76 backward, split as those of a fused kernel
        assert sum(both) * 1e12 == pytest.approx((36 + 76) * T * H, rel=0.05)
        residual = 3 * 2 * T * H
        moved = blocks.surroundings(one).forward * 1e12
        assert moved == pytest.approx(both[0] * 1e12 + residual)


class TestExperts:
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


class TestMessages:
    def test_embedding_is_one_reduction_and_a_block_two(self) -> None:
        one = case(tp=4)
        part, whole = blocks.embedding(one), blocks.region_messages(one)
        assert part.forward_messages == pytest.approx(whole.forward_messages / 2)

    def test_blocks_enter_the_region_once(self) -> None:
        one = case(tp=4)
        once = blocks.region_messages(one).forward_messages
        for block in (blocks.attention, blocks.mlp, blocks.output_layer):
            assert block(one).forward_messages == pytest.approx(once)


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
