"""Ways to compute activations again: which are tried, their words, what the engine gets."""

from __future__ import annotations

from typing import Any

import pytest
from planner_knowledge import knowledge_of
from pydantic import ValidationError
from specimens import GPT_TINY, LLAMA7B, cluster, run_spec

from hpctrain.base.errors import DoesNotFitError
from hpctrain.base.units import ByteSize
from hpctrain.engines.megatron import megatron_config
from hpctrain.job.plan_text import plan_lines
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.mesh.candidate import (
    MODULES,
    module_bits,
    modules_of,
    recomputations,
    recompute_words,
)
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import search
from hpctrain.plan.search.space import freedom_of
from hpctrain.spec.run import RunSpec

GPU = {"type": "a100", "per_node": 8, "model": "A100-80GB SXM", "reserved": "1GiB"}
MODES = ("none", "selective", "full")
EXPERTS = {**GPT_TINY, "bias": False, "moe": dict(experts=4, top_k=2, ffn=512)}


def planned(memory: str, **others: Any) -> tuple[RunSpec, Plan]:
    """LLaMA-7B on 8 GPUs without model parallelism, with so much memory each."""
    spec = run_spec(LLAMA7B, gpus=8, batch=64, parallel=dict(tp=1), **others)
    profile = cluster(gpu={**GPU, "memory": memory})
    return spec, make_plan(spec, profile, knowledge_of(profile))


def test_modules_are_bits_in_megatrons_order() -> None:
    assert module_bits(["core_attn"]) == 1 and module_bits(["mlp", "core_attn"]) == 3
    assert modules_of(3) == ("core_attn", "mlp")
    assert modules_of(module_bits(MODULES)) == MODULES


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (("none", ("core_attn",), None), "none"),
        (("selective", ("core_attn",), None), "selective"),
        (("selective", ("mlp", "layernorm"), None), "selective (mlp, layernorm)"),
        (("full", ("mlp",), None), "full"),
        (("full", ("core_attn",), 1), "full of 1 layer a chunk"),
        (("full", ("core_attn",), 3), "full of 3 layers a chunk"),
    ],
)
def test_words(way: tuple[Any, ...], words: str) -> None:
    assert recompute_words(*way) == words


def test_what_is_tried() -> None:
    free = recomputations(run_spec(), MODES)
    assert [(MODES[one.mode], modules_of(one.modules), one.quarters) for one in free] == [
        ("none", ("core_attn",), 0),
        ("selective", ("core_attn",), 0),
        ("full", ("core_attn",), 0),
        ("selective", ("mlp",), 0),
        *(("full", ("core_attn",), quarters) for quarters in (1, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (dict(recompute="full"), 3),  # the modes given here, and nothing of them
        (dict(recompute_modules=["layernorm"]), 3 + 3),  # modules are given, layers are free
        (dict(model=EXPERTS), 4 + 3),
    ],
)
def test_what_the_spec_says_is_fixed(others: dict[str, Any], expected: int) -> None:
    assert len(recomputations(run_spec(**others), MODES)) == expected


def test_experts_are_computed_again_where_all_layers_have_them() -> None:
    sets = {modules_of(one.modules) for one in recomputations(run_spec(EXPERTS), MODES)}
    assert sets == {("core_attn",), ("moe",)}
    some = {**EXPERTS, "moe": {**EXPERTS["moe"], "dense_layers": 1}}
    sets = {modules_of(one.modules) for one in recomputations(run_spec(some), MODES)}
    assert sets == {("core_attn",), ("mlp",)}


def test_engines_that_cannot_count_layers_recompute_all_of_them() -> None:
    ways = recomputations(run_spec(engine={"name": "fsdp"}), ("none", "full"))
    assert [one.quarters for one in ways] == [0, 0]


def test_less_memory_takes_more_recomputation() -> None:
    """Each plan is the fastest that fits: none, MLPs, some layers, all layers."""
    found = [planned(memory)[1] for memory in ("80GiB", "68GiB", "63GiB", "56GiB")]
    ways = [(plan.recompute, plan.recompute_modules, plan.recompute_layers) for plan in found]
    assert ways[0] == ("none", ("core_attn",), None)
    assert ways[-1] == ("full", ("core_attn",), None)
    between = ways[1:-1]
    assert all(way[1] == ("mlp",) or way[2] is not None for way in between)
    seconds = [plan.step_seconds for plan in found]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]  # type: ignore[type-var, operator]


@pytest.mark.parametrize("memory", ["80GiB", "68GiB", "63GiB", "56GiB"])
def test_the_engine_gets_what_was_planned(memory: str) -> None:
    spec, plan = planned(memory)
    config = megatron_config(TrainingJob(spec, cluster(), plan))
    assert config.recompute_granularity == (None if plan.recompute == "none" else plan.recompute)
    assert config.recompute_modules == plan.recompute_modules
    assert config.recompute_num_layers == plan.recompute_layers


def test_a_given_number_of_layers_stays() -> None:
    plan = planned("80GiB", recompute="full", recompute_layers=5)[1]
    assert plan.recompute_layers == 5
    assert any("full of 5 layers a chunk saves" in reason for reason in plan.reasons)
    whole = planned("80GiB", recompute="full")[1]
    assert plan.prediction is not None and whole.prediction is not None
    ratio = plan.prediction.mfu / plan.prediction.hfu, whole.prediction.mfu / whole.prediction.hfu
    # 5 of 32 layers are computed again
    assert 1 / ratio[0] - 1 == pytest.approx(5 / 32 * (1 / ratio[1] - 1))


TE = {"name": "megatron", "implementation": "transformer_engine"}


def offloading(memory: str, host_gib: int = 1024, **others: Any) -> tuple[RunSpec, Plan]:
    """The same with activations that may wait on the host."""
    settings = dict(activation_offload_layers="auto", recompute="none", engine=TE, **others)
    spec = run_spec(LLAMA7B, gpus=8, batch=64, parallel=dict(tp=1), **settings)
    profile = cluster(gpu={**GPU, "memory": memory})
    nodes = profile.nodes.model_copy(update={"memory": ByteSize(host_gib * 2**30)})
    profile = profile.model_copy(update={"nodes": nodes})
    return spec, make_plan(spec, profile, knowledge_of(profile))


def test_the_planner_offloads_activations_where_it_has_to() -> None:
    assert offloading("80GiB")[1].activation_offload_layers == 0
    spec, plan = offloading("60GiB")
    assert plan.activation_offload_layers in (8, 16, 24)
    assert plan.recompute == "none" and plan.memory[0].total_bytes <= 60 * 2**30
    assert any("layers keep their activations in the host's memory" in r for r in plan.reasons)
    config = megatron_config(TrainingJob(spec, cluster(), plan))
    assert config.cpu_offloading_num_layers == plan.activation_offload_layers


def test_it_offloads_no_more_than_a_host_has() -> None:
    with pytest.raises(DoesNotFitError):
        offloading("60GiB", host_gib=32)


def test_it_offloads_nothing_behind_a_pipeline_or_beside_recomputation() -> None:
    settings = dict(activation_offload_layers="auto", engine=TE, micro="auto")
    spec = run_spec(LLAMA7B, gpus=8, batch=64, **settings)
    profile = cluster(gpu={**GPU, "memory": "80GiB"})
    request = PlanRequest(spec, profile, knowledge_of(profile))
    columns = search(request, freedom_of(request)).columns
    away = columns.offloaded_layers > 0
    assert away.any()
    assert (columns.pp[away] == 1).all() and (columns.recompute[away] == 0).all()
    assert sorted(set(columns.offloaded_layers.tolist())) == [0, 8, 16, 24]


def test_only_an_engine_that_offloads_may_be_told_to() -> None:
    with pytest.raises(ValidationError, match="keeps activations on the GPU"):
        run_spec(activation_offload_layers="auto", engine={"name": "fsdp"})
    with pytest.raises(ValidationError, match="offloaded by TransformerEngine"):
        run_spec(activation_offload_layers="auto", engine={**TE, "implementation": "local"})


def test_the_plan_names_what_is_computed_again_and_what_waits_on_the_host() -> None:
    lines = "\n".join(plan_lines(planned("80GiB", recompute="full", recompute_layers=5)[1]))
    assert "recompute full of 5 layers a chunk" in " ".join(lines.replace("\xa0", " ").split())
    lines = "\n".join(plan_lines(offloading("60GiB")[1]))
    assert "layers on the host" in " ".join(lines.replace("\xa0", " ").split())


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_stages_beside_context_parallelism(zero: int) -> None:
    """FSDP shards over dp x cp; engines without either say so by name."""
    spec = dict(
        gpus=64, batch=64, parallel=dict(cp=4), optimizer={"lr": 1e-3, "zero": zero}, micro=1
    )
    profile = cluster(gpu={**GPU, "memory": "80GiB"})
    plan = make_plan(
        run_spec({**LLAMA7B, "seq": 32768}, engine={"name": "fsdp"}, **spec),
        profile,
        knowledge_of(profile),
    )
    assert (plan.zero, plan.layout.cp, plan.layout.dp) == (zero, 4, 16)
    # 6.7 G parameters: main copy and moments in 12 bytes, over 64 ranks
    assert plan.memory[0].optimizer_bytes == pytest.approx(12 * plan.parameters / 64, rel=0.01)
    weights = 2 * plan.parameters / (64 if zero == 3 else 1)
    assert plan.memory[0].weights_bytes == pytest.approx(weights, rel=0.01)
    for engine, words in (("deepspeed", "has no cp"), ("megatron", f"no ZeRO stage {zero}")):
        with pytest.raises(DoesNotFitError, match=words):
            make_plan(run_spec(LLAMA7B, engine={"name": engine}, **spec), profile)
