"""The planner's parameter counts against the modules that megatron-core really builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trial_runs import once
from variants import varied

from hpctrain.plan.mesh.candidate import candidate_of, layout_of
from hpctrain.plan.mesh.rules import MODEL_RULES, broken_rules
from hpctrain.plan.mesh.stages import build_stages, split_layers
from hpctrain.plan.model.parameters import expert_tp, pad_vocab
from hpctrain.spec.run import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    OptimizerSpec,
    ParallelSpec,
    ResourcesSpec,
    RunSpec,
)

pytest.importorskip("megatron.core")

GPT = ModelSpec(layers=8, hidden=64, heads=8, vocab=300, seq=32)
UNTIED = GPT.model_copy(update={"tied": False})
NO_BIAS = GPT.model_copy(update={"bias": False})
LLAMA = ModelSpec(
    family="llama", layers=8, hidden=64, ffn=176, heads=8, kv_heads=4, vocab=500, seq=64
)
LLAMA_TIED = LLAMA.model_copy(update={"tied": True, "bias": True})
ONE_KV_HEAD = LLAMA.model_copy(update={"kv_heads": 1})
WIDE_HEADS = LLAMA.model_copy(update={"head_dim": 16})
LEARNED_RMS = LLAMA.model_copy(update={"positions": "learned", "norm": "layernorm"})
GPT175B = ModelSpec(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, tied=False)
BERT = ModelSpec(family="bert", layers=8, hidden=64, heads=8, vocab=300, seq=32)

EXPERTS = MoeSpec(experts=8, top_k=2, ffn=48)
LATENT = MlaSpec(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12)
MOE = LLAMA.model_copy(update={"moe": EXPERTS})
BIASED_MOE = GPT.model_copy(update={"moe": EXPERTS})
SHARED = LLAMA.model_copy(
    update={"moe": EXPERTS.model_copy(update={"shared_ffn": 96, "dense_layers": 3})}
)
MLA = LLAMA.model_copy(update={"mla": LATENT, "kv_heads": None})
MLA_FULL_QUERY = MLA.model_copy(update={"mla": LATENT.model_copy(update={"q_rank": None})})
MLA_LAYERNORM = MLA.model_copy(update={"norm": "layernorm", "bias": True})
MTP = LLAMA.model_copy(update={"mtp_layers": 2})
DEEPSEEK = SHARED.model_copy(update={"mla": LATENT, "kv_heads": None, "mtp_layers": 1})
DEEPSEEK_V3 = ModelSpec(
    family="llama",
    layers=61,
    hidden=7168,
    ffn=18432,
    heads=128,
    vocab=129280,
    seq=4096,
    moe=MoeSpec(experts=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    mla=MlaSpec(q_rank=1536, kv_rank=512),
    mtp_layers=1,
)

CASES: dict[str, tuple[ModelSpec, ParallelSpec]] = {
    "gpt": (GPT, ParallelSpec()),
    "gpt tp2": (GPT, ParallelSpec(tp=2)),
    "gpt tp4 pp2": (GPT, ParallelSpec(tp=4, pp=2)),
    "gpt pp4": (GPT, ParallelSpec(pp=4)),
    "gpt pp2 vpp2": (GPT, ParallelSpec(pp=2, vpp=2)),
    "gpt tp2 pp4 vpp2": (GPT, ParallelSpec(tp=2, pp=4, vpp=2)),
    "untied": (UNTIED, ParallelSpec()),
    "untied tp2 pp2": (UNTIED, ParallelSpec(tp=2, pp=2)),
    "no bias tp4": (NO_BIAS, ParallelSpec(tp=4)),
    "no bias tp2 pp2": (NO_BIAS, ParallelSpec(tp=2, pp=2)),
    "llama": (LLAMA, ParallelSpec()),
    "llama tp4 pp2": (LLAMA, ParallelSpec(tp=4, pp=2)),
    "llama tp2 pp2 vpp4": (LLAMA, ParallelSpec(tp=2, pp=2, vpp=4)),
    "llama tied tp2 pp2": (LLAMA_TIED, ParallelSpec(tp=2, pp=2)),
    "fewer kv heads than tp": (ONE_KV_HEAD, ParallelSpec(tp=4, pp=2)),
    "head size of its own": (WIDE_HEADS, ParallelSpec(tp=2)),
    "learned positions, layernorm": (LEARNED_RMS, ParallelSpec(tp=2, pp=2)),
    "uneven": (GPT, ParallelSpec(pp=3, stages=(2, 4, 2))),
    "uneven, interleaved": (UNTIED, ParallelSpec(tp=2, pp=2, vpp=2, stages=(1, 3, 3, 1))),
    "embedding and loss alone": (UNTIED, ParallelSpec(pp=4, stages=(0, 4, 4, 0))),
    "counted": (
        GPT.model_copy(update={"layers": 6}),
        ParallelSpec(pp=4, count_embedding=True, count_loss=True),
    ),
    "counted, interleaved": (
        LLAMA.model_copy(update={"layers": 6}),
        ParallelSpec(tp=2, pp=2, vpp=2, count_embedding=True, count_loss=True),
    ),
    "gpt 175b": (GPT175B, ParallelSpec(tp=8, pp=8)),
    "bert": (BERT, ParallelSpec()),
    "bert tp4 pp2": (BERT, ParallelSpec(tp=4, pp=2)),
    "bert tp2 pp2 vpp2": (BERT, ParallelSpec(tp=2, pp=2, vpp=2)),
    "bert untied, rms": (
        BERT.model_copy(update={"tied": False, "norm": "rmsnorm", "bias": False}),
        ParallelSpec(tp=2, pp=2),
    ),
    "moe": (MOE, ParallelSpec()),
    "moe tp2: experts split": (MOE, ParallelSpec(tp=2, pp=2)),
    "moe ep4": (MOE, ParallelSpec(ep=4)),
    "moe tp2 ep8: experts whole": (MOE, ParallelSpec(tp=2, pp=2, ep=8)),
    "moe tp2 ep2 etp2: experts spread and split": (MOE, ParallelSpec(tp=2, pp=2, ep=2, etp=2)),
    "moe tp4 ep2 etp2": (SHARED, ParallelSpec(tp=4, ep=2, etp=2)),
    "moe with biases": (BIASED_MOE, ParallelSpec(ep=2)),
    "moe with biases tp2 ep2": (BIASED_MOE, ParallelSpec(tp=2, ep=2)),
    "shared experts, dense layers": (SHARED, ParallelSpec(tp=4, pp=2, ep=2)),
    "dense layers, interleaved": (SHARED, ParallelSpec(tp=2, pp=2, vpp=2, ep=2)),
    "dense layers, uneven": (SHARED, ParallelSpec(pp=3, ep=4, stages=(2, 2, 4))),
    "mla": (MLA, ParallelSpec()),
    "mla tp4 pp2": (MLA, ParallelSpec(tp=4, pp=2)),
    "mla, full query": (MLA_FULL_QUERY, ParallelSpec(tp=2)),
    "mla, layernorm and bias": (MLA_LAYERNORM, ParallelSpec(tp=2, pp=2)),
    "mtp": (MTP, ParallelSpec()),
    "mtp tp2 pp2": (MTP, ParallelSpec(tp=2, pp=2)),
    "mtp tied": (MTP.model_copy(update={"tied": True}), ParallelSpec()),
    "mtp tied, pp2": (MTP.model_copy(update={"tied": True}), ParallelSpec(tp=2, pp=2)),
    "mtp tied, learned positions": (
        MTP.model_copy(update={"tied": True, "positions": "learned"}),
        ParallelSpec(tp=2),
    ),
    "mtp, interleaved": (MTP, ParallelSpec(tp=2, pp=2, vpp=2)),
    "mtp behind an empty stage": (MTP, ParallelSpec(pp=4, stages=(0, 4, 4, 0))),
    "mtp behind an empty chunk": (MTP, ParallelSpec(pp=2, vpp=2, stages=(2, 3, 3, 0))),
    "deepseek tp2 pp2 ep4": (DEEPSEEK, ParallelSpec(tp=2, pp=2, ep=4)),
    "deepseek pp4 vpp2 ep2": (DEEPSEEK, ParallelSpec(pp=4, vpp=2, ep=2)),
    "deepseek-v3": (
        DEEPSEEK_V3,
        ParallelSpec(tp=1, pp=16, ep=64, stages=(4, *[4] * 14, 1)),
    ),
}


def case_document(model: ModelSpec, parallel: ParallelSpec) -> dict[str, Any]:
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
    params = (getattr(item, "callspec", None) for item in request.session.items)
    chosen = {"gpt 175b", *(one.params.get("name") for one in params if one is not None)}
    cases = {name: case for name, case in CASES.items() if name in chosen}

    def build(directory: Path) -> None:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("meta_parameters.py"))],
            input=json.dumps([case_document(*case) for case in cases.values()]),
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
        (once(f"parameters of megatron-core: {list(cases)}", build) / "built.json").read_text()
    )
    return dict(zip(cases, found, strict=True))


@pytest.mark.variant("test_parameters_are_what_the_trainers_model_has")
@pytest.mark.parametrize("name", varied(CASES, *list(CASES)[::8], "gpt 175b"))
def test_parameters_per_gpu_are_what_megatron_builds(
    name: str, built: dict[str, list[int]]
) -> None:
    model, parallel = CASES[name]
    spec = spec_of(model, parallel)
    values = candidate_of(spec, parallel, spec.resources.gpus)
    assert not broken_rules(spec, values, MODEL_RULES)
    layout = layout_of(parallel, parallel.tp * parallel.pp * parallel.ep)
    stages = build_stages(model, layout, split_layers(model.layers, parallel))
    assert [stage.parameters_per_gpu for stage in stages] == built[name]


def test_gpt_175b_has_the_known_counts(built: dict[str, list[int]]) -> None:
    # per layer and GPU: (12 h^2 + 7 h) / 8 + 6 h = 226,576,896 at h 12288, twelve layers a stage;
    # stage 0: + 51200 h / 8 + 2048 h; stage 7: + 51200 h / 8 + 2 h
    assert built["gpt 175b"] == [2822731776, *[2718922752] * 6, 2797590528]


def spec_of(model: ModelSpec, parallel: ParallelSpec) -> RunSpec:
    return RunSpec(
        name="counted",
        model=model,
        batch=BatchSpec.model_validate({"global": 64}),
        budget=BudgetSpec(steps=1),
        optimizer=OptimizerSpec(lr=1e-3),
        parallel=parallel,
        checkpoint=CheckpointSpec(every_steps=1),
        resources=ResourcesSpec(gpus=parallel.tp * parallel.pp * parallel.ep),
    )
