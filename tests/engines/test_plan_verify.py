"""The planner's counts against the models that megatron-core really builds, and `plan --verify`."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from planned_job import planned_job
from trial_runs import once
from variants import varied

from hpctrain.engines.megatron import megatron_config
from hpctrain.engines.verification import Verification, compare, planned_kept_bytes
from hpctrain.job.verify import verify_plan
from hpctrain.plan.documents import NodeRequest, Plan, Stage
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.mesh.candidate import batch_split, candidate_of, layout_of
from hpctrain.plan.mesh.rules import MODEL_RULES, broken_rules
from hpctrain.plan.mesh.stages import build_stages, split_layers
from hpctrain.plan.model.parameters import expert_tp, pad_vocab
from hpctrain.plan.request import Knowledge
from hpctrain.spec.catalogue import cluster_gpu
from hpctrain.spec.loader import (
    find_profile,
    load_calibration,
    load_catalogue,
    load_profile,
    load_run_spec,
)
from hpctrain.spec.run import ParallelSpec, RunSpec
from hpctrain.train import software
from hpctrain.train.engines.megatron import verify
from hpctrain.train.engines.megatron.core_versions.supported import SUPPORTED
from hpctrain.train.engines.megatron.verify import build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPT: dict[str, Any] = dict(layers=8, hidden=64, heads=8, vocab=300, seq=64)
UNTIED = dict(GPT, tied=False)
NO_BIAS = dict(GPT, bias=False)
SHORT_GPT = dict(GPT, layers=6)
GPT175B: dict[str, Any] = dict(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, tied=False)
BERT = dict(GPT, family="bert")
LLAMA: dict[str, Any] = dict(
    family="llama", layers=8, hidden=64, ffn=176, heads=8, kv_heads=4, vocab=500, seq=64
)
EXPERTS: dict[str, Any] = dict(experts=8, top_k=2, ffn=48)
LATENT: dict[str, Any] = dict(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12)
MOE = dict(LLAMA, moe=EXPERTS)
BIASED_MOE = dict(GPT, moe=EXPERTS)
SHARED = dict(LLAMA, moe=dict(EXPERTS, shared_ffn=96, dense_layers=3))
MLA = dict(LLAMA, mla=LATENT, kv_heads=None)
MTP = dict(LLAMA, mtp_layers=2)
TIED_MTP = dict(MTP, tied=True)
DEEPSEEK = dict(SHARED, mla=LATENT, kv_heads=None, mtp_layers=1)
DEEPSEEK_V3: dict[str, Any] = dict(
    family="llama",
    layers=61,
    hidden=7168,
    ffn=18432,
    heads=128,
    vocab=129280,
    seq=4096,
    moe=dict(experts=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    mla=dict(q_rank=1536, kv_rank=512),
    mtp_layers=1,
)
COUNT_BOTH = dict(count_embedding=True, count_loss=True)

# model and layout
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": (GPT, {}),
    "gpt tp2": (GPT, dict(tp=2)),
    "gpt tp4 pp2": (GPT, dict(tp=4, pp=2)),
    "gpt pp4": (GPT, dict(pp=4)),
    "gpt pp2 vpp2": (GPT, dict(pp=2, vpp=2)),
    "gpt tp2 pp4 vpp2": (GPT, dict(tp=2, pp=4, vpp=2)),
    "gpt tp2 pp2, pipelines near": (GPT, dict(tp=2, pp=2, order="tp-cp-ep-pp-dp")),
    "untied": (UNTIED, {}),
    "untied tp2 pp2": (UNTIED, dict(tp=2, pp=2)),
    "no bias tp4": (NO_BIAS, dict(tp=4)),
    "no bias tp2 pp2": (NO_BIAS, dict(tp=2, pp=2)),
    "llama": (LLAMA, {}),
    "llama tp4 pp2": (LLAMA, dict(tp=4, pp=2)),
    "llama tp2 pp2 vpp4": (LLAMA, dict(tp=2, pp=2, vpp=4)),
    "llama tied tp2 pp2": (dict(LLAMA, tied=True, bias=True), dict(tp=2, pp=2)),
    "fewer kv heads than tp": (dict(LLAMA, kv_heads=1), dict(tp=4, pp=2)),
    "head size of its own": (dict(LLAMA, head_dim=16), dict(tp=2)),
    "learned positions, layernorm": (
        dict(LLAMA, positions="learned", norm="layernorm"),
        dict(tp=2, pp=2),
    ),
    "uneven": (GPT, dict(pp=3, stages=(2, 4, 2))),
    "uneven, interleaved": (UNTIED, dict(tp=2, pp=2, vpp=2, stages=(1, 3, 3, 1))),
    "embedding and loss alone": (UNTIED, dict(pp=4, stages=(0, 4, 4, 0))),
    "counted": (SHORT_GPT, dict(pp=4, **COUNT_BOTH)),
    "counted, interleaved": (dict(LLAMA, layers=6), dict(tp=2, pp=2, vpp=2, **COUNT_BOTH)),
    "gpt 175b": (GPT175B, dict(tp=8, pp=8)),
    "bert": (BERT, {}),
    "bert tp4 pp2": (BERT, dict(tp=4, pp=2)),
    "bert tp2 pp2 vpp2": (BERT, dict(tp=2, pp=2, vpp=2)),
    "bert untied, rms": (dict(BERT, tied=False, norm="rmsnorm", bias=False), dict(tp=2, pp=2)),
    "moe": (MOE, {}),
    "moe tp2: experts split": (MOE, dict(tp=2, pp=2)),
    "moe ep4": (MOE, dict(ep=4)),
    "moe tp2 ep8: experts whole": (MOE, dict(tp=2, pp=2, ep=8)),
    "moe tp2 ep2 etp2: experts spread and split": (MOE, dict(tp=2, pp=2, ep=2, etp=2)),
    "moe tp4 ep2 etp2": (SHARED, dict(tp=4, ep=2, etp=2)),
    "moe with biases": (BIASED_MOE, dict(ep=2)),
    "moe with biases tp2 ep2": (BIASED_MOE, dict(tp=2, ep=2)),
    "shared experts, dense layers": (SHARED, dict(tp=4, pp=2, ep=2)),
    "dense layers, interleaved": (SHARED, dict(tp=2, pp=2, vpp=2, ep=2)),
    "dense layers, uneven": (SHARED, dict(pp=3, ep=4, stages=(2, 2, 4))),
    "mla": (MLA, {}),
    "mla tp4 pp2": (MLA, dict(tp=4, pp=2)),
    "mla, full query": (dict(MLA, mla=dict(LATENT, q_rank=None)), dict(tp=2)),
    "mla, layernorm and bias": (dict(MLA, norm="layernorm", bias=True), dict(tp=2, pp=2)),
    "mtp": (MTP, {}),
    "mtp tp2 pp2": (MTP, dict(tp=2, pp=2)),
    "mtp tied": (TIED_MTP, {}),
    "mtp tied, pp2": (TIED_MTP, dict(tp=2, pp=2)),
    "mtp tied, learned positions": (dict(TIED_MTP, positions="learned"), dict(tp=2)),
    "mtp, interleaved": (MTP, dict(tp=2, pp=2, vpp=2)),
    "mtp behind an empty stage": (MTP, dict(pp=4, stages=(0, 4, 4, 0))),
    "mtp behind an empty chunk": (MTP, dict(pp=2, vpp=2, stages=(2, 3, 3, 0))),
    "deepseek tp2 pp2 ep4": (DEEPSEEK, dict(tp=2, pp=2, ep=4)),
    "deepseek tp2 pp4 vpp2 ep2": (DEEPSEEK, dict(tp=2, pp=4, vpp=2, ep=2)),
    "deepseek-v3": (DEEPSEEK_V3, dict(tp=1, pp=16, ep=64, stages=(4, *[4] * 14, 1))),
}
# those that the trainer builds, too
TRAINED = (
    *("gpt tp4 pp2", "untied", "gpt tp2 pp2, pipelines near", "llama tp2 pp2 vpp4"),
    *("fewer kv heads than tp", "uneven", "uneven, interleaved", "embedding and loss alone"),
    *("counted", "counted, interleaved", "moe tp2: experts split", "moe tp2 ep8: experts whole"),
    *("moe with biases", "mla tp4 pp2", "mtp behind an empty chunk", "deepseek tp2 pp4 vpp2 ep2"),
    "bert tp2 pp2 vpp2",
)


def spec_of(
    model: dict[str, Any], parallel: dict[str, Any], *, dp: int = 1, **others: Any
) -> RunSpec:
    sizes = ParallelSpec.model_validate(parallel)
    gpus = sizes.tp * sizes.pp * sizes.cp * sizes.ep * dp
    document: dict[str, Any] = dict(
        name="verified",
        model=model,
        batch={"global": 64, "micro": 1},
        budget={"steps": 1},
        optimizer={"lr": 1e-3},
        parallel=parallel,
        checkpoint={"every_steps": 1},
        resources={"gpus": gpus},
        recompute="none",
    )
    return RunSpec.model_validate({**document, **others})


def plan_of(spec: RunSpec) -> Plan:
    """The plan as far as an engine reads it; how it is found is not the matter here."""
    parallel = spec.parallel
    assert isinstance(parallel, ParallelSpec)
    values = candidate_of(spec, parallel, spec.resources.gpus)
    assert not broken_rules(spec, values, MODEL_RULES)
    layout = layout_of(parallel, spec.resources.gpus)
    return Plan(
        run_name=spec.name,
        profile_name="none",
        engine="megatron",
        layout=layout,
        layout_origin="spec",
        nodes=NodeRequest(nodes=1, gpus_per_node=layout.world_size),
        batch=batch_split(spec, layout.dp, 1),
        recompute=spec.recompute,
        precision=spec.precision,
        padded_vocab=pad_vocab(spec.model.vocab, layout.tp),
        parameters=0,
        stages=build_stages(spec.model, layout, split_layers(spec.model.layers, parallel)),
        memory=(),
        gpu_memory_bytes=1,
        placements=(),
        model_flops_per_step=1.0,
        reasons=(),
    )


def job_of(spec: RunSpec) -> TrainingJob:
    return TrainingJob(spec, load_profile(find_profile("sandbox")).document, plan_of(spec))


def verified(spec: RunSpec) -> Verification:
    """As `verify_plan`, in this process."""
    job = job_of(spec)
    return compare(job.plan, planned_kept_bytes(job), build(megatron_config(job)))


def case_document(name: str) -> dict[str, Any]:
    spec = spec_of(*CASES[name])
    model, parallel = spec.model, spec.parallel
    assert isinstance(parallel, ParallelSpec)
    return dict(
        family=model.family,
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn_size,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        head_size=model.head_size,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        gated=model.gated,
        bias=model.bias,
        tied=model.tied,
        seq=model.seq,
        padded_vocab=pad_vocab(model.vocab, parallel.tp),
        positions="rope" if model.positions == "rope" else "learned_absolute",
        mtp_layers=model.mtp_layers,
        moe=model.moe.model_dump() if model.moe else None,
        mla=model.mla.model_dump() if model.mla else None,
        tp=parallel.tp,
        ep=parallel.ep,
        expert_tp=expert_tp(parallel.tp, parallel.ep, parallel.etp),
        pp=parallel.pp,
        vpp=parallel.vpp,
        stages=parallel.stages,
        count_embedding=parallel.count_embedding,
        count_loss=parallel.count_loss,
    )


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """Parameters per pipeline stage of the cases of this run, as megatron-core builds them."""
    if software.megatron_core() == SUPPORTED[-1].number:
        pytest.skip("meta_parameters.py builds models of the installed megatron-core")
    params = (getattr(item, "callspec", None) for item in request.session.items)
    chosen = {"gpt 175b", *(one.params.get("name") for one in params if one is not None)}
    cases = [name for name in CASES if name in chosen]

    def build(directory: Path) -> None:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("meta_parameters.py"))],
            input=json.dumps([case_document(name) for name in cases]),
            env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        directory.mkdir()
        (directory / "built.json").write_text(done.stdout.splitlines()[-1])

    found = json.loads(
        (once(f"parameters of megatron-core: {cases}", build) / "built.json").read_text()
    )
    return dict(zip(cases, found, strict=True))


@pytest.mark.variant("test_parameters_are_what_the_trainers_model_has")
@pytest.mark.parametrize("name", CASES)
def test_parameters_per_gpu_are_what_megatron_builds(
    name: str, built: dict[str, list[int]]
) -> None:
    stages = plan_of(spec_of(*CASES[name])).stages
    assert [stage.parameters_per_gpu for stage in stages] == built[name]


def test_gpt_175b_has_the_known_counts(built: dict[str, list[int]]) -> None:
    # per layer and GPU: (12 h^2 + 7 h) / 8 + 6 h = 226,576,896 at h 12288, twelve layers a stage;
    # stage 0: + 51200 h / 8 + 2048 h; stage 7: + 51200 h / 8 + 2 h
    assert built["gpt 175b"] == [2822731776, *[2718922752] * 6, 2797590528]


# -- the trainer's model ---------------------------------------------------------------------------


@pytest.mark.variant("test_parameters_are_what_the_trainers_model_has")
def test_options_of_a_gpu_change_no_parameters() -> None:
    """Built without them: none can be had here, and none has parameters."""
    options = dict(
        tp_comm_overlap=True,
        defer_embedding_wgrad_compute=True,
        cross_entropy_loss_fusion=True,
        cuda_graph_impl="transformer_engine",
    )
    parallel = dict(tp=2, pp=2)
    plain = spec_of(GPT, parallel)
    wanted = spec_of(GPT, parallel, engine={"megatron": options})
    config = megatron_config(job_of(wanted))
    fp8 = config.model_copy(update=dict(fp8="hybrid", fp8_recipe="tensorwise"))
    without, found = (build(made) for made in (megatron_config(job_of(plain)), fp8))
    assert [stage.parameters for stage in found.stages] == [
        stage.parameters for stage in without.stages
    ]
    assert "built in bf16 or fp32 without options that need a GPU" in found.remarks


SHOWN = ("llama tp2 pp2 vpp4", "moe tp2: experts split", "deepseek tp2 pp4 vpp2 ep2")


@pytest.mark.parametrize("name", varied(TRAINED, *SHOWN))
def test_parameters_are_what_the_trainers_model_has(name: str) -> None:
    model, parallel = CASES[name]
    found = verified(spec_of(model, parallel, dp=2))
    assert found.equal, [(s.planned_parameters, s.built_parameters) for s in found.stages]
    assert len(found.stages) == parallel.get("pp", 1)
    assert not dist.is_initialized() and not parallel_state.is_initialized()


def test_a_wrong_plan_is_found_out_on_its_stage() -> None:
    spec = spec_of(GPT, dict(tp=2, pp=2))
    job = job_of(spec)
    plan = job.plan
    one_more = plan.stages[1].model_copy(
        update={"parameters_per_gpu": plan.stages[1].parameters_per_gpu + 1}
    )
    wrong = plan.model_copy(update={"stages": (plan.stages[0], one_more)})
    found = compare(wrong, (None, None), build(megatron_config(replace(job, plan=wrong))))
    assert not found.equal
    assert [stage.equal for stage in found.stages] == [True, False]


@pytest.mark.variant("test_a_wrong_plan_is_found_out_on_its_stage")
def test_a_split_that_moves_a_layer_moves_its_parameters() -> None:
    """The trainer's split is what is built, not one that the process works out again."""
    spec = spec_of(GPT, dict(pp=2, stages=(3, 5)))
    job = job_of(spec)
    plan = job.plan
    even: tuple[Stage, ...] = build_stages(spec.model, plan.layout, (4, 4))
    found = compare(
        plan.model_copy(update={"stages": even}),
        (None, None),
        build(megatron_config(job)),
    )
    per_layer = even[0].parameters_per_gpu - plan.stages[0].parameters_per_gpu
    assert [s.planned_parameters - s.built_parameters for s in found.stages] == [
        per_layer,
        -per_layer,
    ]


@pytest.mark.variant("test_parameters_are_what_the_trainers_model_has")
def test_ranks_are_the_first_of_each_stage() -> None:
    def ranks(order: str) -> list[int]:
        spec = spec_of(GPT, dict(tp=2, pp=2, order=order), dp=4)
        return [stage.rank for stage in build(megatron_config(job_of(spec))).stages]

    assert ranks("tp-cp-ep-dp-pp") == [0, 8]
    assert ranks("tp-cp-ep-pp-dp") == [0, 2]


# -- activations -----------------------------------------------------------------------------

BIG = dict(layers=4, hidden=1024, heads=16, vocab=1024, seq=1024)
# What the closed forms leave out: LayerNorm's two fp32 numbers per token, token numbers, the angles
# of rotary positions (four [s, d] a layer without TransformerEngine's fused rotation), and the
# causal mask of unfused attention (s x s bytes a layer).
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], float]] = {
    "flash": (BIG, dict(pp=2), {}, 0.005),
    "flash, tp without sp": (BIG, dict(tp=2, sequence_parallel=False), {}, 0.005),
    "flash, tp with sp": (BIG, dict(tp=4, pp=2, vpp=2), {}, 0.005),
    "flash, dropout": ({**BIG, "dropout": 0.1}, dict(tp=2, pp=2), {}, 0.005),
    "selective": ({**BIG, "dropout": 0.1}, dict(tp=2), dict(recompute="selective"), 0.005),
    "full": (BIG, dict(tp=2, pp=2), dict(recompute="full"), 0.01),
    "flash, context parallel": (BIG, dict(cp=2), {}, 0.005),
    "unfused fp32": (BIG, dict(tp=2), dict(precision="fp32"), 0.02),
    "unfused fp32, dropout": ({**BIG, "dropout": 0.1}, dict(tp=2), dict(precision="fp32"), 0.005),
    "llama": ({**BIG, "family": "llama", "ffn": 2752, "kv_heads": 4}, dict(tp=2, pp=2), {}, 0.035),
    # besides, what the head of masked words keeps: some s x h of the last stage
    "bert": ({**BIG, "family": "bert"}, dict(tp=2, pp=2), {}, 0.08),
}


MEASURED = ("flash, tp with sp", "full")


@pytest.mark.parametrize("name", varied(KEPT, *MEASURED))
def test_kept_activations_are_near_the_planned_ones(name: str) -> None:
    model, parallel, others, tolerance = KEPT[name]
    found = verified(spec_of(model, parallel, dp=2, **others))
    errors = [stage.kept_error for stage in found.stages]
    assert None not in errors
    assert max(abs(error or 0.0) for error in errors) <= tolerance, errors


@pytest.mark.variant("test_kept_activations_are_near_the_planned_ones")
def test_kept_bytes_of_full_recomputation_are_exactly_the_layers_inputs() -> None:
    """Inner stages keep nothing else (Korthikanti et al., section 5: 2 s b h)."""
    spec = spec_of({**BIG, "layers": 6}, dict(pp=3, tp=2), recompute="full")
    inner = build(megatron_config(job_of(spec))).stages[1]
    assert inner.kept_bytes == 2 * 1024 * 1024 * 2 // 2


def test_what_is_not_measured_is_said() -> None:
    found = verified(spec_of({**LLAMA, "moe": EXPERTS}, dict(ep=2)))
    assert [stage.measured_kept_bytes for stage in found.stages] == [None]
    assert found.stages[0].planned_kept_bytes is None
    assert any("not measured" in remark for remark in found.remarks)


# -- examples/, at full size -------------------------------------------------------------------

FULL = [
    ("gpt175b", "a100x64"),
    pytest.param("gpt130b", "h100x16", marks=pytest.mark.variant),
    pytest.param("moe", "h100x16", marks=pytest.mark.variant),
]


@pytest.mark.parametrize(("example", "cluster"), FULL)
def test_examples_are_planned_as_they_are_built(
    example: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages, with the layout that is planned; what they keep takes too long to measure."""
    monkeypatch.setattr(verify, "unmeasured_reason", lambda config: "counted only")
    spec = load_run_spec(EXAMPLES / example / "full.yaml").document
    profile = load_profile(find_profile(cluster)).document
    knowledge = Knowledge(cluster_gpu(load_catalogue(), profile), load_calibration())
    job = planned_job(spec, profile, knowledge)
    found = compare(job.plan, planned_kept_bytes(job), build(megatron_config(job)))
    assert found.equal, [(s.planned_parameters, s.built_parameters) for s in found.stages]
    assert len(found.stages) == job.plan.layout.pp


# -- the process -----------------------------------------------------------------------------


def verified_by_a_process(spec: RunSpec) -> tuple[Verification, int]:
    """The answer, and the most memory that the process has had which builds the model."""
    found = verify_plan(job_of(spec))
    return found, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


# Of each of the eight stages of GPT-175B, and of these two, the weights are 5.6 GB.
@pytest.mark.variant("test_examples_are_planned_as_they_are_built")
@pytest.mark.parametrize("pp", [2, pytest.param(8, marks=pytest.mark.variant)])
def test_gpt_175b_is_verified_without_its_memory(pp: int) -> None:
    """As large a stage of a quarter of the layers takes a third of the time."""
    model = {**GPT175B, "layers": 12 * pp}
    spec = spec_of(model, dict(tp=8, pp=pp, vpp=3), dp=8, recompute="selective")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        found, peak_kib = process.submit(verified_by_a_process, spec).result(300)
    assert found.equal
    assert peak_kib < 1_000_000, "its stage alone would be 5.6 GB of weights"
    # 12 layers of (12 h^2 + 7 h) / 8 + 6 h = 226,576,896 parameters
    built = [stage.built_parameters for stage in found.stages]
    assert built == [2822731776, *[2718922752] * (pp - 2), 2797590528]
    assert [stage.rank for stage in found.stages] == list(range(0, 64 * pp, 64))
    assert max(abs(stage.kept_error or 1.0) for stage in found.stages) < 0.001
