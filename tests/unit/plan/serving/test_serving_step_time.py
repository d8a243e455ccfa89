"""Seconds of one iteration, worked out by hand on a GPU without losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_specimens import (
    DEEPSEEK_V3,
    GPU,
    LLAMA_70B,
    NEVER,
    replica,
    served,
)

from hpctrain.serve.plan.served_model import (
    EIGHT,
    EIGHT_BLOCKS,
    EXPANDED,
    FOUR,
    WIDE,
    PartFormats,
    ReplicaLayout,
    operands,
    served_model,
    stack_served,
    weight_bytes,
)
from hpctrain.serve.plan.step_time import (
    IterationLoad,
    cached_seconds,
    exchange_seconds,
    group_seconds,
    iteration_seconds,
    launching_seconds,
    least_seconds,
    message_seconds,
    moe_seconds,
    product_seconds,
    prompt_attention_seconds,
    roofline,
)
from hpctrain.spec.loader import load_catalogue

IDLE = IterationLoad(0.0, 0.0, 1.0, 0.0)


def seconds(load: IterationLoad, layout: ReplicaLayout | None = None) -> float:
    return float(iteration_seconds(replica(layout=layout), load))


def test_one_token_reads_all_weights_once() -> None:
    # 141.1 GB less the table of embeddings, of which one row is read, over 4 x 4 TB/s
    read = 4 * float(weight_bytes(served(), ReplicaLayout(4))) - 2 * 128_256 * 8192
    fast = replace(GPU, links=replace(GPU.links, nvlink_bandwidth=NEVER))
    found = iteration_seconds(replica(gpu=fast), IDLE)
    assert float(found) == pytest.approx(read / 16e12, rel=1e-2)


def test_a_prompt_takes_two_operations_per_weight_and_token() -> None:
    # 2 x 69.5e9 x 4096 / (4 x 1e15) = 0.1424 s for linear layers, besides attention and messages
    load = IterationLoad(4096.0, 0.0, 0.0, 0.0)
    linear = 80 * (8192 * (64 + 2 * 8 + 64) * 128 + 3 * 8192 * 28_672)
    expected = 2 * linear * 4096 / 4e15
    fast = {"memory_bandwidth": NEVER}
    links = replace(GPU.links, nvlink_bandwidth=NEVER)
    machine = replace(GPU, **fast, links=links)
    found = float(iteration_seconds(replica(gpu=machine), load))
    assert found == pytest.approx(expected, rel=1e-2)


def test_decoding_reads_the_cache_of_every_sequence() -> None:
    # 64 sequences x 2000 tokens x 4096 bytes per layer / 4 ranks / 4 TB/s
    load = IterationLoad(0.0, 0.0, 64.0, 2000.0)
    expected = 64 * 2000 * 4096 / 4 / 4e12
    assert float(cached_seconds(replica(), load)) == pytest.approx(expected)


def test_latent_attention_computes_with_all_heads() -> None:
    # per key and head 2 x (512 + 64 + 512) operations: beyond 1e15 / 4e12 of them per byte
    load = IterationLoad(0.0, 0.0, 64.0, 2000.0)
    fast = replace(GPU, memory_bandwidth=NEVER)
    found = float(cached_seconds(replica(served(DEEPSEEK_V3), ReplicaLayout(8), fast), load))
    assert found == pytest.approx(64 * 2000 * 16 * 2 * (2 * 512 + 64) / 1e15)


def test_a_prompt_sees_half_of_itself() -> None:
    load = IterationLoad(1000.0, 500.0, 0.0, 0.0)
    expected = 2 * 1000 * 500 * 16 * 256 / 1e15
    assert float(prompt_attention_seconds(replica(), load)) == pytest.approx(expected)


def test_sparse_attention_reads_so_many_keys_at_most() -> None:
    load = IterationLoad(0.0, 0.0, 8.0, 100_000.0)
    few = replace(load, decode_context_tokens=2048.0)
    sparse = replica(served(sparse_keys=2048), ReplicaLayout(1))
    assert cached_seconds(sparse, load) == cached_seconds(sparse, few)


@pytest.mark.parametrize(
    ("tokens", "experts"),
    [(1, 8), (8, 256 * (1 - (1 - 8 / 256) ** 8)), (10_000, 256)],
)
def test_experts_that_a_token_chose_are_read(tokens: int, experts: float) -> None:
    # one expert: 3 x 7168 x 2048 weights of 2 bytes, over 8 ranks of 4 TB/s
    machine = replace(GPU, peak_16=NEVER, links=replace(GPU.links, nvlink_bandwidth=NEVER))
    load = IterationLoad(0.0, 0.0, float(tokens), 0.0)
    found = float(moe_seconds(replica(served(DEEPSEEK_V3), ReplicaLayout(8), machine), load))
    shared = 2 * (3 * 7168 * 2048 / 8 + 7168 * 256) / 4e12
    assert found - shared == pytest.approx(experts * 3 * 7168 * 2048 * 2 / 8 / 4e12, rel=1e-2)


def test_tokens_that_choose_alike_read_fewer_experts() -> None:
    load = IterationLoad(0.0, 0.0, 32.0, 0.0)
    alone, alike = (
        replica(served(DEEPSEEK_V3), ReplicaLayout(8), expert_variety=n) for n in (1.0, 0.5)
    )
    assert moe_seconds(alike, load) < moe_seconds(alone, load)


def test_an_all_reduce_moves_nearly_twice_the_tensor() -> None:
    # 2 (n - 1) / n of 8192 x 1000 x 2 bytes at 450 GB/s, and its least time
    eight, one = (
        replica(layout=ReplicaLayout(n), message_seconds=6e-6, message_hop_seconds=2e-6)
        for n in (8, 1)
    )
    found = float(message_seconds(eight, 8_192_000.0, 2.0))
    assert found == pytest.approx(6e-6 + 2 * 2e-6 + 2 * 7 / 8 * 16_384_000 / 450e9)
    assert float(message_seconds(one, 8_192_000.0, 2.0)) == 0


def test_beyond_the_nvlink_domain_the_network_counts() -> None:
    slow = replace(GPU, links=replace(GPU.links, network_bandwidth=5e9))
    cases = (replica(layout=ReplicaLayout(tp), gpu=slow) for tp in (8, 16))
    near, far = (float(message_seconds(case, 1e8, 2.0)) for case in cases)
    # two domains of eight, each with eight cards of 5 GB/s
    assert far == pytest.approx(2 * 2e8 * 0.5 / (8 * 5e9)) and far > near


def test_a_prompt_is_computed_by_one_attention_rank() -> None:
    one, four = (IterationLoad(4096.0, 2048.0, 0.0, 0.0, prompts=n) for n in (1.0, 4.0))
    spread = replica(layout=ReplicaLayout(tp=1, dp=4))
    alone = float(prompt_attention_seconds(replica(layout=ReplicaLayout(1)), one))
    assert float(prompt_attention_seconds(spread, one)) == pytest.approx(alone)
    assert float(prompt_attention_seconds(spread, four)) == pytest.approx(alone / 4)


def test_tokens_go_where_their_experts_are() -> None:
    # 8 ranks of 256 tokens; 8 choices reach 8 (1 - (7/8)^8) = 5.25 ranks; 2 bytes there and back
    load = IterationLoad(0.0, 0.0, 2048.0, 0.0)
    case = replica(served(DEEPSEEK_V3), ReplicaLayout(tp=1, ep=8, dp=8))
    moved = 256 * 8 * (1 - (7 / 8) ** 8) * 7168 * 4 * 7 / 8
    found = float(exchange_seconds(case, load))
    assert found == pytest.approx(moved / 450e9)
    assert found < float(group_seconds(case, load))
    # experts that are split over all ranks need all tokens on all of them
    split = replace(case, layout=ReplicaLayout(tp=1, ep=1, dp=8))
    whole = float(group_seconds(split, load))
    assert float(exchange_seconds(split, load)) == whole


def test_scales_lengthen_the_least_time() -> None:
    case = replica(scaling_seconds=5e-6)
    assert float(least_seconds(case, 20e-6, WIDE)) == pytest.approx(20e-6)
    assert float(least_seconds(case, 20e-6, EIGHT_BLOCKS)) == pytest.approx(25e-6)


def test_kernels_launched_one_by_one_hide_behind_the_work_of_the_gpu() -> None:
    # 80 blocks of attention and MLP with 30 microseconds each, launched in ten times as long
    eager, graphs = (
        replica(attention_seconds=20e-6, mlp_seconds=10e-6, eager_factor=n) for n in (10.0, 0.0)
    )
    short, long = IterationLoad(8.0, 4.0, 0.0, 0.0), IterationLoad(65536.0, 4.0, 0.0, 0.0)
    launched = float(launching_seconds(eager, short))
    assert launched == pytest.approx(80 * 30e-6 * 10)
    assert float(iteration_seconds(eager, short)) == launched
    times = [float(iteration_seconds(case, long)) for case in (eager, graphs)]
    assert times[0] == times[1] > launched
    assert float(launching_seconds(eager, IterationLoad(0.0, 0.0, 8.0, 4.0))) == 0


def test_a_cache_of_eight_bits_is_multiplied_in_eight_bits() -> None:
    fast = replace(GPU, memory_bandwidth=NEVER)
    load = IterationLoad(0.0, 0.0, 64.0, 4000.0)
    models = (served(DEEPSEEK_V3, cache_bytes=n) for n in (2.0, 1.0))
    cases = [replica(model, ReplicaLayout(8), fast) for model in models]
    times = [float(cached_seconds(case, load)) for case in cases]
    assert times[0] == pytest.approx(2 * times[1])


def test_ranks_of_data_parallel_attention_schedule_their_own_sequences() -> None:
    load = IterationLoad(0.0, 0.0, 64.0, 0.0)

    def added(layout: ReplicaLayout) -> float:
        own = iteration_seconds(replica(layout=layout, sequence_seconds=1e-3), load)
        return float(own) - seconds(load, layout)

    assert added(ReplicaLayout(4)) == pytest.approx(64e-3)
    assert added(ReplicaLayout(tp=1, dp=4)) == pytest.approx(16e-3)


def test_eight_and_four_bits_read_less() -> None:
    rows, weights = 1.0, 1e9
    wide = product_seconds(replica(), rows, weights, 2.0, WIDE)
    eight = product_seconds(replica(), rows, weights, 1.0, EIGHT)
    four = product_seconds(replica(), rows, weights, 0.5625, FOUR)
    assert float(eight) == pytest.approx(float(wide) / 2, rel=1e-3)
    assert float(four) == pytest.approx(float(wide) * 0.5625 / 2, rel=1e-3)


def test_expanded_weights_compute_in_sixteen_bits() -> None:
    rows, weights = 1e5, 1e9
    wide = product_seconds(replica(), rows, weights, 2.0, WIDE)
    expanded = product_seconds(replica(), rows, weights, 0.52, EXPANDED)
    assert float(expanded) == pytest.approx(float(wide), rel=1e-2)


@pytest.mark.parametrize(
    ("gpu", "stored", "expected"),
    [
        ("H100", "fp8", EIGHT),
        ("H100", "nvfp4", EXPANDED),
        ("B200", "nvfp4", FOUR),
        ("B200", "int4", EXPANDED),
        ("A100", "fp8", EXPANDED),
        ("A100", "bf16", WIDE),
    ],
)
def test_operands_follow_the_peaks_of_the_gpu(gpu: str, stored: str, expected: int) -> None:
    known = next(one for one in load_catalogue().gpus if one.name.startswith(gpu))
    assert operands(stored, known) == expected


def test_the_roofline_is_the_longer_time_far_from_its_corner() -> None:
    assert float(roofline(1.0, 1e-3)) == pytest.approx(1.0, rel=1e-5)
    assert float(roofline(1.0, 1.0)) == pytest.approx(2**0.5)


def test_more_of_anything_takes_no_less_time() -> None:
    base = IterationLoad(100.0, 50.0, 16.0, 1000.0)
    for field in ("prefill_tokens", "prefill_context_tokens", "decode_sequences",
                  "decode_context_tokens", "drafted_tokens"):  # fmt: skip
        more = replace(base, **{field: getattr(base, field) * 2 + 1})
        assert seconds(more) > seconds(base), field


def test_more_ranks_take_less_time_for_products() -> None:
    load = IterationLoad(2048.0, 1024.0, 64.0, 1000.0)
    times = [seconds(load, ReplicaLayout(tp)) for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_a_pipeline_gains_no_latency() -> None:
    load = IterationLoad(0.0, 0.0, 8.0, 1000.0)
    assert seconds(load, ReplicaLayout(1, pp=4)) > seconds(load, ReplicaLayout(1)) * 0.7


def test_arrays_give_what_numbers_give() -> None:
    models = [served(), served(DEEPSEEK_V3)]
    load = IterationLoad(512.0, 256.0, 32.0, 1500.0)
    layout = ReplicaLayout(np.array([8.0, 8.0]), ep=np.array([1.0, 8.0]))
    together = iteration_seconds(replica(stack_served(models), layout), load)
    for index, model in enumerate(models):
        alone = ReplicaLayout(8, ep=(1, 8)[index])
        single = iteration_seconds(replica(model, alone), load)
        assert np.asarray(together)[index] == pytest.approx(float(single))


def test_formats_of_parts_reach_the_served_model() -> None:
    gpu = next(one for one in load_catalogue().gpus if one.name == "B200-SXM")
    made = served_model(LLAMA_70B, PartFormats("fp8", "nvfp4", "mxfp4", "fp8"), gpu)
    assert (made.attention_operands, made.mlp_operands) == (EIGHT, FOUR)
    assert (made.mlp_bytes, made.expert_bytes, made.cache_bytes) == (0.5625, 0.53125, 1.0)
