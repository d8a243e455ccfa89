"""Layouts that are published as run, which a plan therefore may not refuse.

Recipes of NVIDIA-NeMo/Megatron-Bridge v0.6.0, src/megatron/bridge/perf_recipes/llama/*/llama3*.py:
no recomputation, gradients in 16 bits (_common.py), weights gathered in 8 bits but with NVFP4
(training/mixed_precision.py), embedding and loss as layers of the 405B. Their tables of measured
tokens per second are in docs/performance-summary-archive.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planner_knowledge import knowledge_of
from specimens import GPT_TINY, LLAMA405B, run_spec

from hpctrain.base.errors import DoesNotFitError
from hpctrain.plan.cost.case import Mesh
from hpctrain.plan.cost.from_spec import case_of, software_for
from hpctrain.plan.documents import Plan
from hpctrain.plan.mesh.candidate import candidate_of, columns_of
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.loader import load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec

PROFILES = Path(__file__).resolve().parents[3] / "cluster_profiles"
LLAMA70B = dict(
    family="llama",
    layers=80,
    hidden=8192,
    ffn=28672,
    heads=64,
    kv_heads=8,
    vocab=128256,
    seq=8192,
)
ENDS = dict(count_embedding=True, count_loss=True)
CURRENT = dict(fp8_recipe="tensorwise", fp8_param_gather=True)
MXFP8 = dict(fp8_recipe="mxfp8", fp8_param_gather=True)
GRAPHS = dict(cuda_graph_impl="transformer_engine")


def enough(name: str) -> ClusterProfile:
    """A packaged profile with as many nodes as the recipes have."""
    profile = load_profile(PROFILES / f"{name}.yaml").document
    return profile.model_copy(update={"nodes": profile.nodes.model_copy(update={"count": 256})})


def planned(
    profile: str,
    model: dict[str, Any],
    gpus: int,
    batch: int,
    layout: dict[str, Any],
    precision: str,
    settings: dict[str, Any],
) -> Plan:
    own = {"grad_reduce_in_fp32": False, "cross_entropy_loss_fusion": True, **settings}
    spec = run_spec(
        model,
        gpus=gpus,
        batch=batch,
        parallel=layout,
        precision=precision,
        recompute="none",
        engine={"name": "megatron", "megatron": own},
    )
    cluster = enough(profile)
    return make_plan(spec, cluster, knowledge_of(cluster))


@pytest.mark.parametrize(
    ("profile", "model", "gpus", "batch", "layout", "precision", "settings"),
    [
        ("h100x16", LLAMA70B, 64, 256, dict(tp=4, pp=4, cp=2, vpp=5), "bf16", {}),
        ("h100x16", LLAMA70B, 64, 128, dict(tp=4, pp=8, vpp=5), "fp8", CURRENT),
        ("h100x16", LLAMA405B, 1024, 1536, dict(tp=8, pp=8, cp=2, vpp=8, **ENDS), "fp8", CURRENT),
        ("gb200nvl72", LLAMA405B, 256, 1536, dict(tp=4, pp=16, vpp=4, **ENDS), "fp8", CURRENT),
        ("gb200nvl72", LLAMA405B, 256, 1536, dict(tp=4, pp=16, vpp=8, **ENDS), "fp8", MXFP8),
        ("gb200nvl72", LLAMA405B, 256, 1536, dict(tp=4, pp=16, vpp=8, **ENDS), "fp4", {}),
        ("gb200nvl72", LLAMA70B, 64, 256, dict(tp=2, pp=4, vpp=5), "fp8", MXFP8),
        ("gb200nvl72", LLAMA70B, 64, 256, dict(tp=2, pp=4, vpp=5), "fp4", GRAPHS),
    ],
)
def test_published_layouts_fit(
    profile: str,
    model: dict[str, Any],
    gpus: int,
    batch: int,
    layout: dict[str, Any],
    precision: str,
    settings: dict[str, Any],
) -> None:
    plan = planned(profile, model, gpus, batch, layout, precision, settings)
    peak = plan.memory[plan.peak_stage].total_bytes
    assert peak <= 0.94 * plan.gpu_memory_bytes  # with room for the allocator


def test_8_bit_activations_are_what_lets_the_70b_fit() -> None:
    # gradients in fp32 and no gathered 8-bit weights, as a spec that says no more than the table
    layout, own = dict(tp=4, pp=8, vpp=5), dict(fp8_recipe="tensorwise", grad_reduce_in_fp32=True)
    kept = planned("h100x16", LLAMA70B, 64, 128, layout, "bf16", {})
    spec = run_spec(
        LLAMA70B,
        gpus=64,
        batch=128,
        parallel=layout,
        precision="fp8",
        recompute="none",
        engine={"name": "megatron", "megatron": own},
    )
    cluster = enough("h100x16")
    plan = make_plan(spec, cluster, knowledge_of(cluster))
    first, wide = plan.memory[0], kept.memory[0]
    # of 562 MB of a layer on one rank 92 MB are a second byte of inputs of linear layers
    assert first.activations_bytes / wide.activations_bytes == pytest.approx(470 / 562, abs=0.005)


def mesh_of_layout(recipe: str, ep: int = 1, **others: Any) -> Mesh:
    """The numbers of one layout of a small model in fp8 with this scaling."""
    engine = {"name": "megatron", "megatron": {"fp8_recipe": recipe}}
    parallel = dict(tp=1, ep=ep)
    spec = run_spec(
        others.pop("model", GPT_TINY),
        gpus=8,
        parallel=parallel,
        precision="fp8",
        engine=engine,
        **others,
    )
    candidate = candidate_of(spec, ParallelSpec(**parallel), 8)
    return case_of(PlanRequest(spec, enough("h100x16")), columns_of(candidate)).mesh


@pytest.mark.parametrize(
    ("recipe", "kept", "projected"),
    [("tensorwise", 1, 0), ("delayed", 1, 1), ("blockwise", 1 + 4 / 128**2, 0)],
)
def test_formats_of_kept_activations(recipe: str, kept: float, projected: float) -> None:
    mesh = mesh_of_layout(recipe)
    assert (mesh.input_bytes, mesh.projected_bytes) == (kept, projected)


def test_spread_experts_are_not_balanced() -> None:
    model = {**GPT_TINY, "bias": False, "moe": dict(experts=4, top_k=2, ffn=512)}
    assert mesh_of_layout("tensorwise", model=model).imbalance == 1
    assert mesh_of_layout("tensorwise", ep=4, model=model).imbalance == 1.05


@pytest.mark.parametrize(
    ("engine", "precision", "narrow"),
    [("megatron", "bf16", 1), ("megatron", "fp32", 0), ("fsdp", "bf16", 0)],
)
def test_16_bit_logits_are_megatron_cores(engine: str, precision: str, narrow: int) -> None:
    spec = run_spec(GPT_TINY, gpus=8, precision=precision, engine={"name": engine})
    assert software_for(PlanRequest(spec, enough("h100x16"))).narrow_logits == narrow


@pytest.mark.parametrize(
    ("norm", "precision", "traffic"),
    [("layernorm", "bf16", 1), ("rmsnorm", "bf16", 11.2), ("rmsnorm", "fp32", 4.6)],
)
def test_rms_norms_of_hugging_face_are_several_kernels(
    norm: str, precision: str, traffic: float
) -> None:
    model = {**GPT_TINY, "norm": norm}
    spec = run_spec(model, gpus=8, precision=precision, engine={"name": "fsdp"})
    assert software_for(PlanRequest(spec, enough("h100x16"))).norm_traffic == traffic
    own = run_spec(model, gpus=8, precision=precision, engine={"name": "megatron"})
    assert software_for(PlanRequest(own, enough("h100x16"))).norm_traffic == 1


@pytest.mark.parametrize(
    ("implementation", "key"), [("local", "megatron-2022"), ("transformer_engine", "megatron-core")]
)
def test_layers_without_transformer_engine_move_more(implementation: str, key: str) -> None:
    engine = {"name": "megatron", "implementation": implementation}
    profile = enough("h100x16")
    knowledge = knowledge_of(profile)
    request = PlanRequest(run_spec(GPT_TINY, gpus=8, engine=engine), profile, knowledge)
    expected = knowledge.calibration.software[key]
    assert software_for(request).streaming == expected.streaming
    assert software_for(request).layer_overhead == expected.layer_overhead
    assert software_for(request).scatter_gather == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {},
            "engine.megatron.grad_reduce_in_fp32=false and engine.megatron.fp8_param_gather=true",
        ),
        ({"grad_reduce_in_fp32": False}, "engine.megatron.fp8_param_gather=true"),
        ({"fp8_param_gather": True}, "engine.megatron.grad_reduce_in_fp32=false"),
    ],
)
def test_a_spec_that_says_only_fp8_hears_which_settings_make_it_fit(
    settings: dict[str, Any], words: str
) -> None:
    layout = dict(tp=4, pp=16, vpp=4, **ENDS)
    given = {"grad_reduce_in_fp32": True, **settings}
    with pytest.raises(DoesNotFitError) as refused:
        planned("gb200nvl72", LLAMA405B, 256, 1536, layout, "fp8", given)
    assert f"with {words}, as NVIDIA's recipes" in str(refused.value.hint)
    own = dict(word.removeprefix("engine.megatron.").split("=") for word in words.split(" and "))
    chosen = {name: value == "true" for name, value in own.items()}
    planned("gb200nvl72", LLAMA405B, 256, 1536, layout, "fp8", {**given, **chosen})


def test_settings_are_not_proposed_where_they_do_not_help() -> None:
    layout = dict(tp=1, pp=16, vpp=4, **ENDS)
    with pytest.raises(DoesNotFitError) as refused:
        planned("gb200nvl72", LLAMA405B, 256, 1536, layout, "fp8", {"grad_reduce_in_fp32": True})
    assert "NVIDIA" not in str(refused.value.hint)
