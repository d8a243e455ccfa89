from __future__ import annotations

import sys
from itertools import product
from types import FrameType
from typing import Any

import pytest
from specimens import GPT175B, GPT_TINY, LLAMA7B, LLAMA405B, cluster, run_spec

from hpctrain.base.errors import DoesNotFitError, HpctrainError
from hpctrain.plan.documents import Plan
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.planner import make_plan, nearest_fits, sizes_around
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Found, search
from hpctrain.plan.search.space import freedom_of
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def refusal(spec: RunSpec, profile: ClusterProfile | None = None) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(spec, profile or cluster())
    return caught.value


def as_proposed(spec: RunSpec, candidate: Candidate) -> RunSpec:
    """The spec as somebody writes it who follows a hint."""
    document = spec.model_dump(by_alias=True, exclude_unset=True)
    document["parallel"] = candidate.parallel.model_dump()
    document["batch"] = {"global": spec.batch.global_, "micro": candidate.micro_batch}
    document["recompute"] = candidate.mode
    document["resources"] = {"gpus": candidate.layout.world_size}
    return RunSpec.model_validate(document)


def test_main_job_of_the_demo() -> None:
    spec = run_spec(GPT_TINY, gpus=4, batch=8, parallel=dict(tp=2, pp=2))
    plan = make_plan(spec, cluster(nodes=2, per_node=2, domain=2))
    assert str(plan.layout) == "tp 2 · pp 2 · dp 1"
    assert plan.layout.sequence_parallel
    assert (plan.nodes.nodes, plan.nodes.gpus_per_node) == (2, 2)
    assert (plan.batch.accumulation, plan.batch.tokens_per_step) == (8, 8 * 64)
    assert [stage.chunk_layers for stage in plan.stages] == [(2,), (2,)]
    assert plan.layout_origin == "spec"
    assert plan.step_seconds is None


def test_gpt_175b_on_512_gpus() -> None:
    spec = run_spec(GPT175B, gpus=512, batch=1536, parallel=dict(tp=8, pp=8, vpp=3))
    plan = make_plan(spec, cluster())
    assert plan.layout.dp == 8
    assert plan.batch.accumulation == 192
    assert [stage.chunk_layers for stage in plan.stages] == [(4, 4, 4)] * 8
    assert plan.parameters == 175_244_992_512
    assert "tp 8 stays inside a node (NVLink 300 GB/s)." in plan.reasons
    assert plan.warnings == ()


def test_plan_survives_json() -> None:
    plan = make_plan(run_spec(), cluster())
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    ("model", "parallel", "batch", "micro", "words"),
    [
        (GPT_TINY, dict(tp=8), 8, 1, ["heads 4", "tp 8", "2 or 4"]),
        (
            {**GPT_TINY, "heads": 8, "kv_heads": 4, "hidden": 96, "ffn": 384},
            dict(tp=3),
            8,
            1,
            ["heads 8", "tp 3", "2 or 4"],
        ),
        (
            {**GPT_TINY, "heads": 12, "kv_heads": 6, "hidden": 96, "ffn": 384},
            dict(tp=4),
            8,
            1,
            ["kv_heads 6 is neither a multiple nor a divisor of tp 4", "2 or 3"],
        ),
        ({**GPT_TINY, "seq": 66}, dict(tp=4), 8, 1, ["66 tokens over tp 4", "64 or 68"]),
        ({**GPT_TINY, "seq": 68}, dict(cp=8), 8, 1, ["seq 68", "2 x cp 8", "1 or 2"]),
        (GPT_TINY, dict(tp=2, pp=2), 7, 1, ["global batch 7", "dp 2", "6 or 8"]),
        (GPT_TINY, dict(tp=2), 12, 2, ["global batch 12", "micro 2 x dp 4", "8 or 16", "1 or 3"]),
        (GPT_TINY, dict(pp=2, vpp=2), 12, 1, ["micro 1 x dp 4 x pp 2", "groups of pp", "8 or 16"]),
        (
            GPT_TINY,
            dict(tp=1, pp=3),
            8,
            1,
            ["4 layers", "pp 3", "8 GPUs cannot", "= 3: nearest 3 or 6 GPUs"],
        ),
    ],
)
def test_refusals_name_numbers_and_nearest_values(
    model: dict[str, Any], parallel: dict[str, Any], batch: int, micro: int, words: list[str]
) -> None:
    message = str(refusal(run_spec(model, gpus=8, batch=batch, micro=micro, parallel=parallel)))
    for word in words:
        assert word in message


def test_where_no_number_of_gpus_helps_none_is_named() -> None:
    spec = run_spec(GPT_TINY, gpus=8, batch=8, parallel=dict(tp=4, pp=4))
    message = str(refusal(spec, cluster(nodes=1)))
    assert "8 GPUs cannot be divided into groups of tp 4 x pp 4 = 16" in message
    assert "none" not in message


def test_what_does_not_fit_is_itemised() -> None:
    # per GPU of stage 0: 10,979,500,032 parameters (48 layers of 226,576,896 + ends), 2 / 4 / 12
    # bytes each: 20.5, 40.9 and 122.7 GiB
    spec = run_spec(GPT175B, gpus=16, batch=1536, parallel=dict(tp=8, pp=2), recompute="none")
    error = refusal(spec)
    assert str(error).startswith(
        "tp 8 · pp 2 · dp 1 needs 195.6 of 80.0 GiB per GPU in stage 0 "
        "(optimizer 122.7, gradients 40.9, weights 20.5, activations 9.0, "
    )
    assert error.hint is not None and error.hint.startswith("48 GPUs would do: tp 8 · pp 6")


def test_nothing_fits_on_a_small_cluster() -> None:
    error = refusal(run_spec(GPT175B, gpus=8, batch=64), cluster(nodes=1))
    assert "no number of GPUs that one run may have here helps" in str(error.hint)
    assert "(tried: 1, 2, 4 or 8)" in str(error.hint)


@pytest.mark.parametrize("gpus", [496, 504])
def test_a_hint_finds_the_size_that_the_refusal_names(gpus: int) -> None:
    spec = run_spec(GPT175B, gpus=gpus, batch=1536, parallel=dict(tp=8, pp=8, vpp=3))
    error = refusal(spec, cluster(nodes=64))
    assert "nearest 448 or 512 GPUs" in str(error)
    assert error.hint is not None and error.hint.startswith("512 GPUs would do: tp 8 · pp 8")


def test_a_hint_names_the_nearest_size_not_a_power_of_two() -> None:
    spec = run_spec(GPT175B, gpus=511, batch=1536, parallel="auto")
    assert str(refusal(spec, cluster(nodes=64)).hint).startswith("512 GPUs would do:")


def test_a_hint_names_an_engine_that_shards() -> None:
    spec = run_spec(GPT175B | {"layers": 32, "hidden": 4096, "heads": 32}, gpus=1, batch=64)
    ddp = spec.engine.model_copy(update={"name": "ddp"})
    error = refusal(spec.model_copy(update={"engine": ddp}), cluster(nodes=1))
    assert "engine fsdp shards the model, and 2 GPUs would do" in str(error.hint)


@pytest.mark.parametrize(
    ("gpus", "per_node", "limit", "first", "last"),
    [
        (504, 8, 512, (512, 496, 488), 248),
        (512, 8, 512, (504, 496, 480), 1),
        (4, 8, 8, (5, 3), 8),
        (1, 8, 64, (2, 3), 64),
        (8, 8, 8, (4, 2, 1), 1),
    ],
)
def test_sizes_to_try(
    gpus: int, per_node: int, limit: int, first: tuple[int, ...], last: int
) -> None:
    sizes = sizes_around(gpus, per_node, limit)
    assert sizes[: len(first)] == first and last in sizes and gpus not in sizes
    assert all(n <= per_node or n % per_node == 0 for n in sizes) and max(sizes) <= limit
    assert len(sizes) < 40


@pytest.mark.parametrize(
    ("gpus", "profile", "number"),
    [
        (1024, cluster(), 512),  # more than the cluster has
        (100, cluster(), 96),  # whole nodes
        (512, cluster(partition={"max_nodes": 16}), 128),
        (1024, cluster(nodes=18, per_node=4, domain=72), 64),
    ],
)
def test_too_many_gpus_are_answered_with_a_layout_on_fewer(
    gpus: int, profile: ClusterProfile, number: int
) -> None:
    model = {**GPT175B, "layers": 64}
    spec = run_spec(model, gpus=gpus, batch=1024, parallel=dict(tp=8, pp=4))
    with pytest.raises(HpctrainError) as caught:
        make_plan(spec, profile)
    assert str(caught.value.hint).startswith(f"on {number} GPUs these fit:\n  tp ")
    found = nearest_fits(PlanRequest(spec, profile), gpus=number)
    assert found and all(
        make_plan(as_proposed(spec, candidate), profile).nodes.nodes for candidate in found
    )


def test_tiny_models_have_readable_numbers() -> None:
    plan = make_plan(run_spec(GPT_TINY), cluster(reserved="0B"))
    assert any("MiB of 80.0 GiB per GPU" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "parallel", "others"),
    [
        (GPT175B, 64, 1536, dict(tp=4, pp=4), {}),
        (GPT175B, 64, 1536, dict(tp=8, pp=7), {}),
        (GPT175B, 512, 1536, dict(tp=8, pp=1), dict(recompute="none")),
        (LLAMA405B, 512, 512, dict(tp=8, pp=16, vpp=4), {}),
        (LLAMA405B, 128, 1024, "auto", dict(recompute="none", micro=8)),
        (LLAMA7B, 8, 512, dict(tp=1), dict(micro=16)),
        (LLAMA7B, 8, 512, dict(tp=3), dict(micro=3)),
    ],
)
def test_proposed_layouts_fit_when_planned(
    model: dict[str, Any], gpus: int, batch: int, parallel: Any, others: dict[str, Any]
) -> None:
    spec = run_spec(model, gpus=gpus, batch=batch, parallel=parallel, **others)
    hint = str(refusal(spec).hint)
    found = nearest_fits(PlanRequest(spec, cluster()))
    assert 1 <= len(found) <= 3
    assert hint.splitlines()[1 : 1 + len(found)] == [f"  {candidate}" for candidate in found]
    for candidate in found:
        plan = make_plan(as_proposed(spec, candidate), cluster())
        assert plan.layout == candidate.layout
        assert max(stage.total_bytes for stage in plan.memory) <= plan.gpu_memory_bytes
        assert not any("tight" in warning for warning in plan.warnings)


def test_auto_takes_the_smallest_group_that_fits() -> None:
    plan = make_plan(run_spec(LLAMA7B, gpus=8, batch=512), cluster())
    assert (plan.layout.tp, plan.layout.pp, plan.layout_origin) == (1, 1, "auto")
    plan = make_plan(run_spec(GPT175B, gpus=512, batch=1536, recompute="none"), cluster())
    # tp 8 x pp 2 would use 95 % of the memory; tp 8 rather than pp 8 x tp 4
    assert (plan.layout.tp, plan.layout.pp) == (8, 4)


def test_auto_takes_a_tight_layout_when_there_is_no_other() -> None:
    spec = run_spec(LLAMA7B, gpus=1, batch=8, recompute="none")
    need = make_plan(spec, cluster(gpu_memory="200GiB")).memory[0].total_bytes
    plan = make_plan(spec, cluster(gpu_memory=f"{need}B"))
    assert any("Memory is tight" in warning and "100%" in warning for warning in plan.warnings)
    with pytest.raises(DoesNotFitError):
        make_plan(spec, cluster(gpu_memory=f"{need - 1}B"))


def everything(spec: RunSpec, profile: ClusterProfile) -> Found:
    request = PlanRequest(spec, profile)
    return search(request, freedom_of(request), timed=False)


def test_hints_keep_tp_inside_the_nvlink_domain() -> None:
    spec = run_spec({**GPT175B, "layers": 8}, gpus=16, batch=64)
    proposed = nearest_fits(PlanRequest(spec, cluster(domain=4)), count=100)
    assert {candidate.layout.tp for candidate in proposed} == {1, 2, 4}
    found = everything(spec, cluster(domain=4))
    assert set(found.columns.tp.tolist()) == {1, 2, 4, 8, 16}


def test_the_search_leaves_what_the_spec_says_alone() -> None:
    spec = run_spec(GPT175B, gpus=64, batch=64, micro="auto", recompute="full")
    columns = everything(spec, cluster()).columns
    assert set(columns.recompute.tolist()) == {2}
    assert {1, 2, 4, 8} <= set(columns.micro_batch.tolist())
    gpus = columns.tp * columns.pp * columns.cp * columns.dp
    assert set(gpus.tolist()) == {64}
    fixed = run_spec(GPT175B, gpus=64, batch=64, micro=2, recompute="auto")
    assert set(everything(fixed, cluster()).columns.micro_batch.tolist()) == {2}
    assert set(everything(fixed, cluster()).columns.recompute.tolist()) == {0, 1, 2}


def test_auto_micro_is_the_largest_that_divides_and_fits() -> None:
    spec = run_spec(GPT_TINY, gpus=2, batch=12, micro="auto", parallel={})
    assert make_plan(spec, cluster()).batch.micro_batch == 2  # 12 / dp 2 = 6: 1 or 2 of 1, 2, 4, 8
    usual: dict[str, Any] = dict(gpus=8, batch=512, recompute="none", parallel=dict(tp=2))
    spec = run_spec(LLAMA7B, micro="auto", **usual)
    sizes = {}
    for size in (1, 2, 4, 8):
        try:
            fixed = run_spec(LLAMA7B, micro=size, **usual)
            plan = make_plan(fixed, cluster())
            sizes[size] = not any("tight" in warning for warning in plan.warnings)
        except DoesNotFitError:
            sizes[size] = False
    expected = max(size for size, good in sizes.items() if good)
    assert 1 < expected < 8
    assert make_plan(spec, cluster()).batch.micro_batch == expected


def test_auto_micro_keeps_the_bubble_small() -> None:
    # pp 4: bubble 3 / m; of m = 64, 32, 16, 8 microbatches only 64 and 32 keep it under 10 %
    model = {**GPT_TINY, "layers": 8}
    plan = make_plan(
        run_spec(model, gpus=4, batch=64, micro="auto", parallel=dict(pp=4)), cluster()
    )
    assert plan.batch.micro_batch == 2
    assert any("9.4%" in reason for reason in plan.reasons)


def test_large_bubble_is_warned_about_with_its_formula() -> None:
    plan = make_plan(run_spec(gpus=4, batch=8, parallel=dict(pp=4)), cluster())
    (warning,) = plan.warnings
    assert "37.5%" in warning and "3 / (8 x 1)" in warning


def test_tp_beyond_nvlink_is_warned_about() -> None:
    plan = make_plan(run_spec(gpus=4, parallel=dict(tp=4)), cluster(domain=2))
    assert any("tp 4 leaves the NVLink domain of 2" in warning for warning in plan.warnings)


def test_context_parallelism_needs_transformer_engine() -> None:
    spec = run_spec(gpus=4, parallel=dict(cp=2), engine={"implementation": "local"})
    assert "needs TransformerEngine" in str(refusal(spec))
    assert make_plan(run_spec(gpus=4, parallel=dict(cp=2)), cluster()).layout.cp == 2


def test_auto_is_planned_as_what_the_profile_promises() -> None:
    spec, small = run_spec(gpus=4, parallel=dict(cp=2)), run_spec(gpus=4)
    without = cluster(software={"transformer_engine": False})
    plan, other = make_plan(small, cluster()), make_plan(small, without)
    assert (plan.implementation, other.implementation) == ("transformer_engine", "local")
    assert other.memory[0].activations_bytes > plan.memory[0].activations_bytes
    with pytest.raises(DoesNotFitError, match="cp 2 needs TransformerEngine"):
        make_plan(spec, without)


def test_emulated_gpus_have_no_transformer_engine() -> None:
    plan = make_plan(run_spec(gpus=4), load_profile(find_profile("sandbox")).document)
    assert (plan.accelerator, plan.implementation) == ("cpu", "local")
    assert make_plan(run_spec(gpus=4), cluster()).accelerator == "cuda"


def test_interleaving_over_two_stages_says_that_transfers_overlap() -> None:
    plan = make_plan(run_spec(gpus=2, parallel=dict(pp=2, vpp=2)), cluster())
    assert any("overlapped" in reason for reason in plan.reasons)


def test_sequence_parallelism_can_be_switched_off_and_costs_memory() -> None:
    on = make_plan(run_spec(LLAMA7B, gpus=8, parallel=dict(tp=8)), cluster())
    off = make_plan(
        run_spec(LLAMA7B, gpus=8, parallel=dict(tp=8, sequence_parallel=False)), cluster()
    )
    assert off.memory[0].activations_bytes > on.memory[0].activations_bytes


def test_recomputation_is_ordered() -> None:
    for implementation in ("local", "transformer_engine"):
        peaks = [
            make_plan(
                run_spec(
                    {**LLAMA7B, "seq": 2048},
                    gpus=8,
                    recompute=recompute,
                    parallel=dict(tp=4),
                    engine={"implementation": implementation},
                ),
                cluster(gpu_memory="400GiB"),
            )
            .memory[0]
            .activations_bytes
            for recompute in ("none", "selective", "full")
        ]
        assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.variant) for part in (1, 2, 3))]
)
def test_every_combination_is_planned_consistently_or_refused_with_words(part: int) -> None:
    profile = cluster(nodes=4, per_node=6, domain=6)
    outcomes = {"planned": 0, "refused": 0}
    axes = product((1, 2, 3, 5), (1, 2, 3, 7), (1, 2), (1, 2), (4, 6, 7, 24, 36), (1, 12, 30))
    for tp, pp, vpp, cp, gpus, batch in list(axes)[part::4]:
        if vpp > 1 and pp == 1:
            continue
        parallel = dict(tp=tp, pp=pp, vpp=vpp, cp=cp)
        model = {**GPT_TINY, "layers": 6, "heads": 6, "hidden": 96, "ffn": 384}
        spec = run_spec(model, gpus=gpus, batch=batch, micro="auto", parallel=parallel)
        try:
            plan = make_plan(spec, profile)
        except HpctrainError as error:
            assert error.exit_code == 4 and any(letter.isdigit() for letter in str(error))
            outcomes["refused"] += 1
            continue
        outcomes["planned"] += 1
        assert plan.layout.world_size == gpus
        assert plan.nodes.nodes * plan.nodes.gpus_per_node == gpus
        split = plan.batch
        assert split.micro_batch * split.accumulation * plan.layout.dp == batch
        assert sum(sum(stage.chunk_layers) for stage in plan.stages) == 6
        assert vpp == 1 or split.accumulation % pp == 0
        assert len(plan.memory) == len(plan.stages) == pp
    assert outcomes["planned"] > 8 and outcomes["refused"] > 50


@pytest.mark.parametrize(
    "spec",
    [
        run_spec({**GPT_TINY, "layers": 1, "heads": 1}, gpus=512, batch=1),
        run_spec({**GPT_TINY, "heads": 2, "kv_heads": 1}, gpus=8, batch=3, micro=7),
        run_spec({**GPT_TINY, "seq": 3}, gpus=8, parallel=dict(tp=2, pp=2, cp=2)),
        run_spec(GPT_TINY, gpus=8, parallel=dict(tp=2, pp=2, stages=(0, 4))),
        run_spec(GPT_TINY, gpus=8, parallel=dict(pp=8, count_embedding=True, count_loss=True)),
        run_spec(GPT_TINY, gpus=10**6, parallel=dict(tp=2)),
        run_spec({**GPT_TINY, "layers": 10**4}, gpus=512, batch=512),
        run_spec({**GPT_TINY, "vocab": 10**9, "seq": 10**6}, gpus=8, batch=8),
    ],
)
def test_hostile_specs_end_in_a_plan_or_a_refusal(spec: RunSpec) -> None:
    try:
        assert make_plan(spec, cluster()).layout.world_size == spec.resources.gpus
    except HpctrainError as error:
        assert error.exit_code == 4 and str(error)


def test_planning_a_given_layout_takes_few_function_calls() -> None:
    """Calls, not seconds: these depend on the machine. `bench/planner_search.py` measures them."""
    spec = run_spec(GPT175B, gpus=512, batch=1536, micro="auto", parallel=dict(tp=8, pp=8))
    profile = cluster()
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        make_plan(spec, profile)
    finally:
        sys.setprofile(None)
    assert 1000 < calls < 16_000


@pytest.mark.parametrize("tp", [2, 4])
def test_fewer_kv_heads_than_tp_are_planned_with_a_warning(tp: int) -> None:
    spec = run_spec({**GPT_TINY, "kv_heads": 1}, gpus=4, parallel=dict(tp=tp))
    (warning,) = make_plan(spec, cluster()).warnings
    assert f"kv_heads 1 is below tp {tp}" in warning
