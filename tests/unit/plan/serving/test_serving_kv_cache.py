"""Bytes of the KV cache, and what fits: printed by others, or worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_specimens import (
    DEEPSEEK_V3,
    GPU,
    LLAMA_70B,
    replica,
    served,
)

from hpctrain.serve.plan.served_model import ReplicaLayout, weight_bytes
from hpctrain.serve.plan.step_time import (
    fits,
    free_bytes,
    kv_bytes_per_token,
    largest_batch,
    sequence_bytes,
)


def test_a_token_of_llama_70b_takes_320_kib() -> None:
    # 2 (K and V) x 80 layers x 8 heads x 128 x 2 bytes = 327,680 (vLLM prints 0.3125 MiB)
    assert kv_bytes_per_token(served(), ReplicaLayout(1)) == 327_680


@pytest.mark.parametrize(("tp", "share"), [(2, 2), (8, 8), (16, 8), (64, 8)])
def test_more_ranks_than_kv_heads_keep_copies(tp: int, share: int) -> None:
    assert kv_bytes_per_token(served(), ReplicaLayout(tp)) == 327_680 / share


def test_a_latent_token_of_deepseek_is_the_same_on_every_rank() -> None:
    # DeepSeek-V2 (arXiv 2405.04434), table 1: (512 + 64) numbers per layer; 61 layers, 2 bytes
    for tp in (1, 8):
        assert kv_bytes_per_token(served(DEEPSEEK_V3), ReplicaLayout(tp)) == 61 * 576 * 2


def test_eight_bits_halve_the_cache() -> None:
    narrow = served(cache_bytes=1)
    assert kv_bytes_per_token(narrow, ReplicaLayout(1)) == 327_680 / 2


def test_a_window_bounds_what_a_sequence_keeps() -> None:
    # every second layer sees 128 tokens (gpt-oss): half grows, half stays at 128
    model = served(replace(LLAMA_70B, window=128, window_share=0.5))
    per_layer = 327_680 / 80
    expected = 40 * per_layer * 10_000 + 40 * per_layer * 128
    assert sequence_bytes(model, ReplicaLayout(1), 10_000) == pytest.approx(expected)


def test_a_recurrent_block_keeps_a_state_of_any_length() -> None:
    model = served(recurrent_blocks=30, recurrent_state=4_000_000)
    longer = np.asarray(sequence_bytes(model, ReplicaLayout(2), np.array([0.0, 1000.0])))
    assert longer[0] == 30 * 4_000_000 / 2
    assert longer[1] - longer[0] == pytest.approx(1000 * 327_680 / 2)


def test_weights_of_llama_70b_are_its_parameters() -> None:
    # 70,553,706,496 parameters (Meta), of which two tables of 128,256 x 8192
    assert weight_bytes(served(), ReplicaLayout(1)) == pytest.approx(2 * 70_553_706_496, rel=1e-4)


def test_weights_of_deepseek_in_eight_bits() -> None:
    # 671 x 10^9 parameters (arXiv 2412.19437) without the token prediction layer
    narrow = served(DEEPSEEK_V3, attention_bytes=1, mlp_bytes=1, expert_bytes=1)
    tables = 2 * 129_280 * 7168
    assert weight_bytes(narrow, ReplicaLayout(1)) == pytest.approx(671.0e9 + tables, rel=2e-3)


def test_experts_are_shared_by_ep_or_split_by_tp_alike() -> None:
    shared = weight_bytes(served(DEEPSEEK_V3), ReplicaLayout(8, ep=8))
    split = weight_bytes(served(DEEPSEEK_V3), ReplicaLayout(8))
    assert shared == pytest.approx(split, rel=1e-6)


def test_data_parallel_attention_keeps_its_weights_on_every_rank() -> None:
    whole = weight_bytes(served(DEEPSEEK_V3), ReplicaLayout(1, ep=8, dp=8))
    split = weight_bytes(served(DEEPSEEK_V3), ReplicaLayout(8, ep=8))
    attention = 187e6 * 61 * 2  # bytes of all attention blocks
    assert whole - split == pytest.approx(attention * 7 / 8, rel=0.25)


def test_capacity_is_what_remains_of_the_memory() -> None:
    layout = ReplicaLayout(4)
    rest = 0.9 * 80e9 - weight_bytes(served(), layout)
    logits = 4 * 256 * 128_256 / 4
    inside = 2 * 8192 * 2 * 28_672 / 4
    expected = (rest - logits - inside) / (327_680 / 4)
    found = free_bytes(replica(layout=layout)) / kv_bytes_per_token(served(), layout)
    assert float(found) == pytest.approx(expected)


def test_what_does_not_fit_has_no_room() -> None:
    alone = replica(layout=ReplicaLayout(1))  # 141 GB on 80 GB
    assert float(free_bytes(alone)) < 0
    assert float(largest_batch(alone, 100)) == 0


def test_the_whole_memory_decides_whether_a_replica_can_run() -> None:
    # 35.3 GB of weights and 8192 x 81,920 bytes per GPU
    def held(memory_bytes: float, tokens: float = 8192.0) -> bool:
        return bool(fits(replica(gpu=replace(GPU, memory=memory_bytes)), tokens))

    assert not held(35e9) and held(40e9)
    assert not held(40e9, tokens=1e6)


def test_the_engine_limits_the_batch() -> None:
    few = replica(layout=ReplicaLayout(8), max_sequences=7.0)
    assert float(largest_batch(few, 10)) == 7
    big = replace(GPU, memory=288e9)
    apart = ReplicaLayout(1, ep=8, dp=8)
    few = replica(served(DEEPSEEK_V3), apart, big, max_sequences=7.0)
    assert float(largest_batch(few, 10)) == 56


def test_data_parallel_ranks_hold_different_sequences() -> None:
    # the latent cache is whole on every rank: tp 8 holds it eight times, dp 8 once
    big = replace(GPU, memory=288e9)
    model = served(DEEPSEEK_V3)
    layouts = ReplicaLayout(8, ep=8), ReplicaLayout(1, ep=8, dp=8)
    cases = [replica(model, layout, big) for layout in layouts]
    split, apart = (largest_batch(case, 50_000) for case in cases)
    rooms = [float(free_bytes(case)) for case in cases]
    assert float(apart) / float(split) == pytest.approx(8 * rooms[1] / rooms[0])


def test_more_memory_or_shorter_sequences_hold_more() -> None:
    sizes = np.array([100.0, 1000.0, 10_000.0])
    small = replica(layout=ReplicaLayout(8))
    large = replace(small, gpu=replace(GPU, memory=141e9))
    held = np.asarray(largest_batch(large, sizes))
    assert (np.diff(held) <= 0).all() and held[2] > 0
    smaller = np.asarray(largest_batch(small, sizes))
    assert (smaller <= held).all()
