"""Memory of plans by stage, and how layers are split over stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from specimens import GPT175B, GPT_TINY, LLAMA405B, cluster, run_spec

from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    DRIVER_BYTES,
    FRAGMENTED,
    bucket_bytes,
    case_of,
    software_for,
)
from hpctrain.plan.cost.memory import outside_allocator_bytes, peak_bytes, shards
from hpctrain.plan.cost.prediction import candidate_memory
from hpctrain.plan.documents import RECOMPUTES, MemoryBreakdown, Recompute
from hpctrain.plan.mesh.candidate import Candidate, candidate_of, columns_of, layout_of
from hpctrain.plan.mesh.rules import MESH_RULES, broken_rules
from hpctrain.plan.mesh.stages import (
    build_stages,
    split_layers,
    stage_expert_parameters,
    stage_layers,
)
from hpctrain.plan.model.parameters import (
    expert_parameters,
    layer_parameters,
    pad_vocab,
    total_parameters,
)
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.plan.search.layouts import BORDER
from hpctrain.spec.catalogue import match_gpu
from hpctrain.spec.loader import load_calibration, load_catalogue
from hpctrain.spec.run import ModelSpec, ParallelSpec, RunSpec

SBH = 2048 * 12288
DROPOUT = {**GPT175B, "dropout": 0.1}
LOCAL = {"implementation": "local"}
MOE = dict(
    family="llama",
    layers=8,
    hidden=1024,
    ffn=4096,
    heads=16,
    vocab=32000,
    seq=2048,
    moe=dict(experts=16, top_k=2, ffn=2048, dense_layers=2),
)


def candidate(
    model: dict[str, Any],
    recompute: Recompute = "none",
    gpus: int | None = None,
    batch: int = 1,
    others: dict[str, Any] | None = None,
    **axes: Any,
) -> tuple[RunSpec, Candidate]:
    parallel = ParallelSpec(**axes)
    gpus = gpus or parallel.tp * parallel.pp * parallel.cp
    spec = run_spec(model, gpus=gpus, batch=batch, parallel=axes, **(others or {}))
    one = candidate_of(spec, parallel, gpus)
    return spec, replace(one, recompute=RECOMPUTES.index(recompute))


def stages(model: dict[str, Any], *args: Any, **axes: Any) -> tuple[MemoryBreakdown, ...]:
    spec, one = candidate(model, *args, **axes)
    return candidate_memory(PlanRequest(spec, cluster()), one)


def layer_bytes(model: dict[str, Any], *args: Any, **axes: Any) -> int:
    """What a second layer keeps: everything but the layers is the same in both models."""
    one, two = (
        stages({**model, "layers": layers}, *args, **axes)[0].activations_bytes for layers in (1, 2)
    )
    return two - one


def case(model: dict[str, Any], *args: Any, **axes: Any) -> Case:
    spec, one = candidate(model, *args, **axes)
    return case_of(PlanRequest(spec, cluster()), columns_of(one))


# -- one layer: Korthikanti et al. 2022, arXiv 2205.05198 -------------------------------------


UNFUSED = dict(others={"engine": LOCAL})
WHOLE = dict(tp=8, sequence_parallel=False)


@pytest.mark.parametrize(
    ("model", "recompute", "axes", "expected"),
    [
        (DROPOUT, "selective", {}, 34 * SBH),  # eq. 1 without 5 a s / h
        (DROPOUT, "selective", WHOLE, 10 * SBH + 24 * SBH // 8),  # eq. 2: 10 + 24 / t
        (DROPOUT, "selective", dict(tp=8), 34 * SBH // 8),  # eq. 4 and 6: 34 / t
        # section 5: 2 sbh, over t where the input is split
        (DROPOUT, "full", {}, 2 * SBH),
        (GPT175B, "full", dict(tp=8), 2 * SBH // 8),
        (GPT175B, "selective", {}, 32 * SBH),  # no masks
        (GPT175B, "selective", dict(cp=4), 32 * SBH // 4),
        (GPT175B, "none", {}, 32 * SBH + 4 * 96 * 2048),  # flash: 4 bytes per head and token
        # unfused: eq. 1 has softmax 2, mask 1, dropped-out copy 2; the trainer's softmax is in
        # fp32, and without dropout its 16-bit copy is multiplied
        (DROPOUT, "none", UNFUSED, 34 * SBH + (4 + 1 + 2) * 96 * 2048**2),
        (GPT175B, "none", UNFUSED, 32 * SBH + (4 + 2) * 96 * 2048**2),
        # eq. 2: s b h (10 + 24 / t + 5 a s / (h t)) with t = 8
        (
            DROPOUT,
            "none",
            UNFUSED | WHOLE,
            SBH * (10 + 24 / 8 + 7 * 96 * 2048 / (12288 * 8)),
        ),
        # grouped queries and gate. T = 8192, e = 2, t = 8, SP. Outside 4 x 2 x 8192 x 16384 / 8.
        # Attention: Q, O 128 heads, K, V 8 heads, each of size 128: (2 x 128 + 2 x 8) x 128 =
        # 34,816; MLP 3 x 53,248 = 159,744; 2 x 8192 x 194,560 / 8. Softmax 4 x 8192 x 128 / 8.
        (LLAMA405B, "none", dict(tp=8), 134_217_728 + 398_458_880 + 524_288),
    ],
)
def test_what_a_layer_keeps(
    model: dict[str, Any], recompute: Recompute, axes: dict[str, Any], expected: float
) -> None:
    assert layer_bytes(model, recompute, **axes) == expected


def test_one_layer_is_whole_while_it_is_computed_again() -> None:
    # a model of one layer needs no less with full recomputation, but for its input
    full, none = (
        stages({**GPT175B, "layers": 1}, recompute)[0].activations_bytes
        for recompute in ("full", "none")
    )
    assert full == none


# -- pipelines ---------------------------------------------------------------------------------


def microbatches(pp: int, accumulation: int, vpp: int = 1) -> list[float]:
    """Microbatches in flight on each stage: its activations over what one microbatch keeps.

    With full recomputation a layer keeps its input x and one layer is whole meanwhile, so two
    models with twice the layers differ by flights x layers x x.
    """
    model = {**GPT_TINY, "seq": 128}
    unit = 2 * 128 * 128
    layers = pp * vpp
    held = [
        [
            stage.activations_bytes
            for stage in stages(
                {**model, "layers": layers * factor}, "full", batch=accumulation, pp=pp, vpp=vpp
            )
        ]
        for factor in (1, 2)
    ]
    return [(two - one) / (vpp * unit) for one, two in zip(*held, strict=True)]


@pytest.mark.parametrize(
    ("pp", "accumulation", "vpp", "held"),
    [
        (4, 100, 1, [4, 3, 2, 1]),  # Narayanan et al. 2021, section 2.2.1
        (4, 2, 1, [2, 2, 2, 1]),
        (1, 7, 1, [1]),
        # 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks: 11, 9, 7, 5; of 4 microbatches 8 in all
        (4, 16, 2, [5.5, 4.5, 3.5, 2.5]),
        (4, 4, 2, [4, 4, 3.5, 2.5]),
    ],
)
def test_microbatches_in_flight(pp: int, accumulation: int, vpp: int, held: list[float]) -> None:
    assert microbatches(pp, accumulation, vpp) == held


def test_gpt_175b_stage_by_stage() -> None:
    spec = run_spec(GPT175B, gpus=512, batch=1536, parallel=dict(tp=8, pp=8), recompute="selective")
    plan = make_plan(spec, cluster())
    first, last = plan.memory[0], plan.memory[7]
    assert first.weights_bytes == 2 * 2_822_731_776
    assert first.gradients_bytes == 4 * 2_822_731_776
    assert first.optimizer_bytes == 12 * 2_822_731_776 // 8  # distributed over dp 8
    # 12 layers x 8 microbatches x 32 sbh / 8, the softmax numbers of one layer (4 T a / 8), and
    # the embedding's output of 8 microbatches (2 sbh / 8)
    layers = 12 * 8 * 32 * SBH // 8
    assert first.activations_bytes - layers - 4 * 2048 * 96 // 8 == 8 * 2 * SBH // 8
    assert first.logits_bytes == 0
    assert first.reserved_bytes == 2 * 2**30
    # one microbatch; final norm and output layer keep 4 sbh / 8 more (section 4.3)
    assert last.activations_bytes == 12 * 32 * SBH // 8 + 4 * 2048 * 96 // 8 + 4 * SBH // 8
    assert last.logits_bytes == 4 * 2048 * 51200 // 8  # 4 sbv / t, section 4.3
    assert plan.peak_stage == 0
    assert first.total_bytes == sum(first.model_dump().values())


def test_uneven_stages_hold_what_they_are_given() -> None:
    split = stages({**GPT_TINY, "layers": 6}, "full", batch=8, pp=3, stages=(1, 3, 2))
    even = stages({**GPT_TINY, "layers": 6}, "full", batch=8, pp=3)
    unit = 2 * 64 * 128
    # 3, 2 and 1 microbatches in flight
    differences = [s.activations_bytes - e.activations_bytes for s, e in zip(split, even, strict=1)]
    assert differences == [-3 * unit, 2 * unit, 0]


# -- weights, gradients, optimizer ------------------------------------------------------------


def test_fp32_has_no_main_copy() -> None:
    plan = make_plan(run_spec(GPT_TINY, gpus=1, precision="fp32", parallel={}), cluster())
    parameters = plan.stages[0].parameters_per_gpu
    memory = plan.memory[0]
    assert memory.weights_bytes == 4 * parameters
    assert memory.gradients_bytes == 4 * parameters
    assert memory.optimizer_bytes == 8 * parameters


def test_the_optimizer_is_sharded_over_dp_and_cp_unless_zero_is_0() -> None:
    sizes = {}
    for zero in (None, 1, 0):
        spec = run_spec(
            GPT_TINY,
            gpus=8,
            parallel=dict(cp=2),
            optimizer={"lr": 1e-3, "zero": zero},
        )
        plan = make_plan(spec, cluster())
        sizes[zero] = plan.memory[0].optimizer_bytes
    parameters = plan.stages[0].parameters_per_gpu
    shard = 12 * -(-parameters // 8)
    assert sizes == {None: shard, 1: shard, 0: 12 * parameters}


@pytest.mark.parametrize(
    ("zero", "parts"),
    # Rajbhandari et al. 2020, arXiv 1910.02054, figure 1 with K = 12 and fp32 gradients: what is
    # divided by 8 of 2 + 4 + 12 bytes per parameter
    [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))],
)
def test_zero_stages_divide_optimizer_gradients_and_weights(
    zero: int, parts: tuple[int, int, int]
) -> None:
    optimizer = {"lr": 1e-3, "zero": zero}
    engine = {"name": "deepspeed" if zero else "ddp"}  # whose bf16 without ZeRO drifts: refused
    spec = run_spec(GPT_TINY, gpus=8, parallel={}, optimizer=optimizer, engine=engine)
    plan = make_plan(spec, cluster())
    parameters, memory = plan.stages[0].parameters_per_gpu, plan.memory[0]
    expected = [width * -(-parameters // n) for width, n in zip((2, 4, 12), parts, strict=True)]
    assert [memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes] == expected
    assert plan.zero == zero


def test_hsdp_shards_over_a_part_of_the_replicas() -> None:
    optimizer = {"lr": 1e-3, "zero": 3, "shard_gpus": 4}
    spec = run_spec(GPT_TINY, gpus=8, parallel={}, optimizer=optimizer, engine={"name": "fsdp"})
    plan = make_plan(spec, cluster())
    parameters = plan.stages[0].parameters_per_gpu
    assert plan.memory[0].optimizer_bytes == 12 * -(-parameters // 4)
    assert plan.shard_gpus == 4


def test_offload_leaves_no_optimizer_state_on_the_gpu() -> None:
    optimizer = {"lr": 1e-3, "offload": "cpu"}
    plan = make_plan(run_spec(GPT_TINY, gpus=8, parallel={}, optimizer=optimizer), cluster())
    assert plan.memory[0].optimizer_bytes == 0
    assert plan.offload == "cpu"


def test_experts_are_shared_by_fewer_replicas_than_the_rest() -> None:
    # tp 2, cp 1, dp 4: 8 ranks; ep 4 of whole experts leaves 2 replicas of each
    assert shards(case(MOE, gpus=8, batch=4, tp=2, ep=4), 1) == (4, 2)
    # without ep an expert is split over tp, and dp ranks hold the same
    assert shards(case(MOE, gpus=8, batch=4, tp=2), 1) == (4, 4)


def test_expert_parallelism_divides_experts_only() -> None:
    whole, parted = (stages(MOE, gpus=8, batch=8, ep=ep)[0].weights_bytes for ep in (1, 8))
    # 6 MoE layers of 16 experts with 3 x 1024 x 2048 weights of 2 bytes; 2 of 16 remain
    assert whole - parted == 2 * 6 * 14 * 3 * 1024 * 2048


# -- the search's closed forms against the exact plan -----------------------------------------


@pytest.mark.parametrize(
    ("model", "axes", "gpus"),
    [
        (GPT175B, dict(tp=8, pp=8, vpp=3), 512),
        (GPT175B, dict(tp=4, pp=16), 64),
        (LLAMA405B, dict(tp=8, pp=16, count_embedding=True, count_loss=True), 512),
        (MOE, dict(tp=2, ep=4), 16),
        (MOE, dict(pp=4, ep=2), 16),
        ({**MOE, "moe": dict(experts=64, top_k=2, ffn=2048, dense_layers=4)}, dict(pp=2), 16),
        ({**MOE, "mla": dict(q_rank=512, kv_rank=256), "mtp_layers": 1}, dict(tp=2, ep=4), 8),
        ({**GPT_TINY, "family": "bert"}, dict(tp=2), 4),
        ({**GPT_TINY, "layers": 6}, dict(pp=3, stages=(1, 3, 2)), 6),
    ],
)
def test_the_estimate_of_the_search_is_within_its_border(
    model: dict[str, Any], axes: dict[str, Any], gpus: int
) -> None:
    spec, one = candidate(model, gpus=gpus, batch=gpus * 16, **axes)
    exact = max(stage.total_bytes for stage in candidate_memory(PlanRequest(spec, cluster()), one))
    estimate = float(peak_bytes(case(model, gpus=gpus, batch=gpus * 16, **axes))[0])
    assert estimate == pytest.approx(exact, rel=BORDER - 1)


GIB = 2**30


@pytest.mark.parametrize(
    ("engine", "changes", "expected"),
    [
        ("deepspeed", {}, 2 * 200 * 2**20),
        ("deepspeed", dict(overlap_grad_reduce=False), 200 * 2**20),
        ("deepspeed", dict(zero=3), 200 * 2**20),
        ("fsdp", {}, 0),
        ("megatron", {}, 0),
    ],
)
def test_blocks_in_which_deepspeed_sums_gradients(
    engine: str, changes: dict[str, Any], expected: int
) -> None:
    optimizer = {"lr": 1e-3, **changes}
    spec = run_spec(GPT_TINY, engine={"name": engine}, optimizer=optimizer)
    assert bucket_bytes(spec) == expected
    assert software_for(PlanRequest(spec, cluster())).bucket_bytes == expected


def test_deepspeed_of_fp32_without_sharding_has_no_such_block() -> None:
    optimizer = {"lr": 1e-3, "zero": 0}
    spec = run_spec(GPT_TINY, engine={"name": "deepspeed"}, precision="fp32", optimizer=optimizer)
    assert bucket_bytes(spec) == 0


def test_what_is_outside_of_the_allocator_is_counted_where_the_profile_does_not_say() -> None:
    spec, layout = candidate(GPT_TINY, gpus=8, batch=8, tp=2, pp=2)
    stated = cluster(reserved="2GiB")
    silent = stated.model_copy(update={"gpu": stated.gpu.model_copy(update={"reserved": None})})
    found = [case_of(PlanRequest(spec, one), columns_of(layout)) for one in (stated, silent)]
    assert outside_allocator_bytes(found[0]) == 2 * GIB
    groups = 3  # tp, pp and dp
    counted = DRIVER_BYTES + CONTEXT_BYTES + groups * COMMUNICATOR_BYTES
    assert outside_allocator_bytes(found[1]) == counted


def test_amds_allocator_cannot_grow_its_segments() -> None:
    spec = run_spec(GPT_TINY, engine={"name": "megatron"})
    for name, slack in (("MI300X", FRAGMENTED), ("H100-80GB SXM", 1.0)):
        knowledge = Knowledge(match_gpu(load_catalogue(), name), load_calibration())
        assert software_for(PlanRequest(spec, cluster(), knowledge)).slack == slack


# -- Stages -------------------------------------------------------------------------------------


def chunks(layers: int, **parallel: object) -> list[tuple[int, ...]]:
    wanted = ParallelSpec.model_validate(parallel)
    model = ModelSpec.model_validate({**GPT_TINY, "layers": layers})
    layout = layout_of(wanted, wanted.tp * wanted.pp)
    return [
        stage.chunk_layers for stage in build_stages(model, layout, split_layers(layers, wanted))
    ]


def test_even_split() -> None:
    assert chunks(8, pp=4) == [(2,), (2,), (2,), (2,)]
    assert chunks(8, pp=2, vpp=2) == [(2, 2), (2, 2)]


def test_counted_embedding_and_loss_take_the_place_of_a_layer() -> None:
    # 126 + 2 = 128 layers over 16 x 4 chunks of 2: the first and the last chunk have one layer
    split = chunks(126, pp=16, vpp=4, count_embedding=True, count_loss=True)
    assert split[0] == (1, 2, 2, 2)
    assert split[1:15] == [(2, 2, 2, 2)] * 14
    assert split[15] == (2, 2, 2, 1)


def test_listed_stages_are_in_model_order() -> None:
    # virtual stage n is chunk n div pp of pipeline stage n mod pp
    assert chunks(10, pp=2, vpp=2, stages=(1, 2, 3, 4)) == [(1, 3), (2, 4)]


@pytest.mark.parametrize(
    ("layers", "parallel", "words"),
    [
        (126, dict(pp=16), ["126 layers", "pp 16", "14 or 18", "count_embedding and count_loss"]),
        (126, dict(pp=16, vpp=4), ["64 chunks", "42 or 63"]),
        (7, dict(pp=2), ["7 layers", "1 or 7", "one of count_embedding and count_loss"]),
        (10, dict(pp=4, count_loss=True), ["11 layers", "counted as asked", "1 or 11"]),
        (13, dict(pp=8), ["13 layers", "`stages`"]),
        (8, dict(pp=2, stages=(4, 5)), ["9 layers", "the model has 8"]),
        (8, dict(pp=2, stages=(9, -1)), ["negative", "-1"]),
        (8, dict(pp=3, stages=(4, 0, 4)), ["first and the last"]),
    ],
)
def test_impossible_splits_are_explained(
    layers: int, parallel: dict[str, object], words: list[str]
) -> None:
    wanted = ParallelSpec.model_validate(parallel)
    spec = run_spec({**GPT_TINY, "layers": layers}, gpus=wanted.pp)
    values = candidate_of(spec, wanted, wanted.pp)
    (rule,) = broken_rules(spec, values, MESH_RULES)
    message = rule.message(PlanRequest(spec, cluster()), values)
    for word in words:
        assert word in message


def test_every_possible_split_holds_every_layer() -> None:
    seen = 0
    for layers in range(1, 49):
        spec = run_spec({**GPT_TINY, "layers": layers})
        for pp in (1, 2, 3, 4, 6, 8):
            for vpp in (1, 2, 3) if pp > 1 else (1,):
                for counted in (dict(), dict(count_embedding=True), dict(count_loss=True)):
                    parallel = ParallelSpec(pp=pp, vpp=vpp, **counted)
                    values = candidate_of(spec, parallel, pp)
                    if broken_rules(spec, values, MESH_RULES):
                        continue
                    split = split_layers(layers, parallel)
                    assert (sum(split), len(split), min(split) >= 0) == (layers, pp * vpp, True)
                    seen += 1
    assert seen > 300


def test_parameters_of_all_gpus_add_up_to_the_model_and_what_is_replicated() -> None:
    base = ModelSpec.model_validate({**GPT_TINY, "layers": 12, "vocab": 1000})
    hidden, layers = base.hidden, base.layers
    for tied in (True, False):
        model = base.model_copy(update={"tied": tied})
        for tp in (1, 2, 4):
            for pp in (1, 2, 3, 4, 6):
                parallel = ParallelSpec(tp=tp, pp=pp)
                stages = build_stages(
                    model, layout_of(parallel, tp * pp), split_layers(layers, parallel)
                )
                # per layer two norms (2h each) and two row-parallel biases (h each); at the ends
                # the positions and the final norm
                replicated = layers * 6 * hidden + model.seq * hidden + 2 * hidden
                padding = (pad_vocab(1000, tp) - 1000) * hidden * (1 if tied else 2)
                copy = pad_vocab(1000, tp) * hidden if tied and pp > 1 else 0
                assert tp * sum(stage.parameters_per_gpu for stage in stages) == (
                    total_parameters(model) + (tp - 1) * replicated + padding + copy
                )


def test_embedding_and_loss_are_at_the_ends() -> None:
    model = ModelSpec.model_validate(GPT_TINY)
    parallel = ParallelSpec(pp=4)
    stages = build_stages(model, layout_of(parallel, 4), split_layers(4, parallel))
    assert [stage.embedding for stage in stages] == [True, False, False, False]
    assert [stage.loss for stage in stages] == [False, False, False, True]


MIXED = ModelSpec.model_validate(
    dict(
        family="llama",
        layers=8,
        hidden=64,
        ffn=176,
        heads=4,
        vocab=512,
        seq=64,
        moe=dict(experts=8, top_k=2, ffn=32, dense_layers=3),
    )
)


def test_layers_of_a_stage_are_those_of_its_chunks() -> None:
    assert stage_layers((1, 2, 3, 4), 2, 0) == (range(1), range(3, 6))
    assert stage_layers((1, 2, 3, 4), 2, 1) == (range(1, 3), range(6, 10))
    assert stage_layers((0, 4), 2, 0) == (range(0),)


@pytest.mark.parametrize("stages", [(4, 4), (2, 6), (0, 8), (3, 5), (8, 0)])
def test_each_stage_has_its_own_kinds_of_layers(stages: tuple[int, ...]) -> None:
    parallel = ParallelSpec(pp=2, ep=4, stages=stages)
    layout, split = layout_of(parallel, 8), split_layers(8, parallel)
    dense, experts = (layer_parameters(MIXED, 1, 4, layer) for layer in (0, 7))
    first, last = build_stages(MIXED, layout, split)
    ends = pad_vocab(512, 1) * 64
    kinds = [min(stages[0], 3), max(0, stages[0] - 3)]
    assert first.parameters_per_gpu == kinds[0] * dense + kinds[1] * experts + ends
    assert last.parameters_per_gpu == (3 - kinds[0]) * dense + (5 - kinds[1]) * experts + ends + 64
    one_layer = expert_parameters(MIXED, 1, 4)
    assert stage_expert_parameters(MIXED, layout, split, 0) == kinds[1] * one_layer
    assert stage_expert_parameters(MIXED, layout, split, 1) == (5 - kinds[1]) * one_layer


def test_experts_of_token_prediction_are_on_the_last_stage() -> None:
    model = MIXED.model_copy(update={"mtp_layers": 2})
    parallel = ParallelSpec(pp=2)
    layout, split = layout_of(parallel, 2), split_layers(8, parallel)
    one_layer = expert_parameters(model, 1)
    assert stage_expert_parameters(model, layout, split, 0) == one_layer
    assert stage_expert_parameters(model, layout, split, 1) == (4 + 2) * one_layer
    dense = ModelSpec.model_validate(GPT_TINY)
    assert stage_expert_parameters(dense, layout, (2, 2), 1) == 0
