"""Options that an engine would not read, or could not train, are refused at `submit` by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specimens import GPT_TINY, cluster, run_spec
from test_search import MOE, SMALL

from hpctrain.engines.megatron import megatron_config
from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.plan.abilities.trainable_hugging_face import unrepresentable
from hpctrain.plan.documents import RECOMPUTES
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.model.parameters import model_flops_per_step, total_parameters
from hpctrain.plan.planner import _assemble
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Found, search
from hpctrain.plan.search.space import freedom_of, recompute_choices
from hpctrain.records.layout import RunLayout
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.families import family_named
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec
from hpctrain.train.engines.megatron.preflight import engine_problems

SIGMOID: dict[str, Any] = dict(experts=8, top_k=2, ffn=64, score="sigmoid")
BERT = {**GPT_TINY, "family": "bert"}
MLA = {**GPT_TINY, "family": "llama", "ffn": 128, "mla": dict(kv_rank=64)}


def spec(**changes: Any) -> RunSpec:
    usual: dict[str, Any] = dict(model=GPT_TINY, gpus=8, batch=64, micro="auto")
    return run_spec(**{**usual, **changes})


def megatron(**options: Any) -> dict[str, Any]:
    return {"megatron": options}


@pytest.mark.parametrize("precision", ["fp8", "fp4", "bf16", "fp32", "fp16"])
def test_each_engine_trains_the_precisions_of_its_abilities(precision: str) -> None:
    for name, abilities in ENGINES.items():
        if name == "megatron-lm":
            continue  # needs a checkout, and has a message of its own
        if precision not in abilities.precisions:
            continue  # refused where it is written (tests/unit/spec/test_spec_megatron.py)
        wanted = spec(engine={"name": name}, precision=precision)
        refused = "precision" in dict(untrainable_fields(wanted))
        assert refused is (precision not in abilities.trained_precisions), name


def test_another_engine_names_the_one_that_trains_it() -> None:
    (_, message), *_ = untrainable_fields(spec(engine={"name": "ddp"}, precision="fp8"))
    assert message == "hpctrain trains in bf16 and fp32 with ddp, not in fp8; engine megatron does"
    (_, message), *_ = untrainable_fields(spec(engine={"name": "ddp"}, precision="fp16"))
    assert message == "hpctrain trains in bf16 and fp32 with ddp, not in fp16"


@pytest.mark.parametrize(
    ("precision", "argument"), [("fp8", "fp8-format: hybrid"), ("fp4", "fp4-format: e2m1")]
)
def test_an_external_megatron_lm_takes_formats_by_its_arguments(
    precision: str, argument: str
) -> None:
    wanted = spec(engine={"name": "megatron-lm", "checkout": "/megatron"}, precision=precision)
    ((field, message),) = untrainable_fields(wanted)
    assert field == "precision" and f"`engine.arguments: {{{argument}}}`" in message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            dict(engine=megatron(fp8_param_gather=True), precision="fp8"),
            "engine.megatron.fp8_param_gather",
        ),
        (
            dict(engine=megatron(cross_entropy_loss_fusion=True), precision="fp32"),
            "engine.megatron.cross_entropy_loss_fusion",
        ),
        (
            dict(engine={**megatron(cross_entropy_loss_fusion=True), "deterministic": True}),
            "engine.megatron.cross_entropy_loss_fusion",
        ),
        (
            dict(
                engine=megatron(defer_embedding_wgrad_compute=True),
                model={**GPT_TINY, "mtp_layers": 1},
            ),
            "engine.megatron.defer_embedding_wgrad_compute",
        ),
        (
            dict(engine=megatron(cuda_graph_impl="local"), model=BERT),
            "engine.megatron.cuda_graph_impl",
        ),
        (dict(engine=megatron(tp_comm_overlap=True), model=MLA), "engine.megatron.tp_comm_overlap"),
        (dict(model={**GPT_TINY, "activation": "xielu"}), "model.activation"),
        (dict(model={**MLA, "attention": dict(qk_norm="head")}), "model.attention.qk_norm"),
        (
            dict(model={**GPT_TINY, "moe": dict(SIGMOID, normalize=False)}),
            "model.moe.normalize",
        ),
        (
            dict(model={**GPT_TINY, "moe": dict(SIGMOID, top_k=3, groups=2, top_groups=1)}),
            "model.moe.groups",
        ),
        (dict(model={**GPT_TINY, "config": dict(model_type="gpt2", colour=3)}), "model.config"),
        (
            dict(
                model={**GPT_TINY, "attention": dict(soft_cap=30)},
                engine={"implementation": "transformer_engine"},
            ),
            "engine.implementation",
        ),
        (
            dict(model={**GPT_TINY, "attention": dict(soft_cap=30)}, precision="fp8"),
            "precision",
        ),
        (
            dict(
                model={**GPT_TINY, "norm_place": "both"},
                engine={"name": "megatron-lm", "checkout": "/megatron"},
            ),
            "model.norm_place",
        ),
        (
            dict(engine=megatron(attention_backend="flash"), precision="fp32"),
            "engine.megatron.attention_backend",
        ),
        (
            dict(
                engine=megatron(attention_backend="fused"),
                model={**GPT_TINY, "head_dim": 20, "heads": 4},
            ),
            "engine.megatron.attention_backend",
        ),
        (
            dict(
                engine=megatron(attention_backend="flash"),
                model={**GPT_TINY, "attention": dict(sinks=True)},
            ),
            "engine.megatron.attention_backend",
        ),
        (
            dict(engine=megatron(attention_backend="unfused"), parallel=dict(cp=2)),
            "parallel.cp",
        ),
        (
            dict(
                engine=megatron(hierarchical_context_parallel_sizes=(2, 2)),
                parallel=dict(cp=4),
                model={**GPT_TINY, "attention": dict(window=16), "pattern": ("window",)},
            ),
            "engine.megatron.hierarchical_context_parallel_sizes",
        ),
        (
            dict(environment=dict(variables=dict(NVTE_FLASH_ATTN="0"))),
            "environment.variables.NVTE_FLASH_ATTN",
        ),
        (
            dict(engine=megatron(tp_comm_overlap=True), model={**GPT_TINY, "mtp_layers": 1}),
            "engine.megatron.tp_comm_overlap",
        ),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(changes: dict[str, Any], field: str) -> None:
    assert [name for name, _ in untrainable_fields(spec(**changes))] == [field]


@pytest.mark.parametrize(
    "changes",
    [
        dict(precision="fp8"),
        dict(precision="fp4"),
        dict(engine=megatron(grad_reduce_in_fp32=False, cross_entropy_loss_fusion=True)),
        dict(recompute="full", recompute_layers=1),
        dict(
            engine=megatron(attention_backend="fused"),
            environment=dict(variables=dict(NVTE_FLASH_ATTN="0")),
        ),
        dict(activation_offload_layers=1, recompute="none"),
    ],
)
def test_what_can_be_trained_is_not_refused(changes: dict[str, Any]) -> None:
    assert untrainable_fields(spec(**changes)) == []


# -- Which shapes Hugging Face's classes can have, and how a spec is told that they cannot ------


TEXT: dict[str, Any] = dict(layers=2, hidden=64, heads=4, vocab=100, seq=32)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": dict(TEXT, family="gpt"),
    "llama": dict(TEXT, family="llama", ffn=128, kv_heads=2, head_dim=32, bias=True),
    "bert": dict(TEXT, family="bert"),
    "distilbert": dict(TEXT, family="distilbert"),
    "vit": dict(family="vit", layers=2, hidden=64, heads=4, vocab=10),
    "resnet": dict(family="resnet", layers=50, vocab=10),
}


def run(model: dict[str, Any], **fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        dict(
            name="tiny",
            model=model,
            batch={"global": 8},
            budget=dict(steps=4),
            optimizer=dict(lr=1e-3),
            checkpoint=dict(every_steps=2),
            engine=dict(name="ddp"),
            resources=dict(gpus=1),
            **fields,
        )
    )


@pytest.mark.parametrize("family", SHAPES)
def test_every_family_has_a_class(family: str) -> None:
    assert unrepresentable(run(SHAPES[family])) == []
    known = family_named(family)
    assert known is not None and run(SHAPES[family]).learned_task == next(iter(known.classes))


def test_classes_of_texts_are_a_task_of_their_own() -> None:
    spec = run({**SHAPES["bert"], "classes": 3})
    assert spec.learned_task == "classification" and unrepresentable(spec) == []


T5: dict[str, Any] = dict(family="t5", encoder_layers=2, head_dim=16, logit_scale=0.125)
WRONG: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (T5, dict(lora={}), "lora", "hpctrain adapts no encoder-decoders, and a t5 is one"),
    (
        T5,
        dict(data=dict(documents="separate", document_end=1)),
        "data.documents",
        "joined documents, not of separate",
    ),
    (T5, dict(task="language_modeling"), "task", "a t5 learns span_corruption, not language"),
    (
        dict(T5, relative=dict(max_distance=16)),
        {},
        "model.relative.max_distance",
        "wants more than half of the 32 buckets",
    ),
    (dict(T5, logit_scale=1.0), {}, "model.logit_scale", "has logit_scale 0.125, not 1.0"),
    (dict(T5, attention=dict(scale=0.5)), {}, "model.attention.scale", "scale 1.0, not 0.5"),
    (
        dict(T5, activation="geglu", ffn=64),
        {},
        "model.activation",
        "has activation relu, not geglu",
    ),
    (dict(family="gpt", positions="rope"), {}, "model.positions", "has positions learned, not rop"),
    (dict(family="gpt", bias=False), {}, "model.bias", "GPT2LMHeadModel has bias true, not false"),
    (dict(family="gpt", kv_heads=2), {}, "model.kv_heads", "has kv_heads 4, not 2"),
    (dict(family="gpt", head_dim=8), {}, "model.head_dim", "has head_dim 16, not 8"),
    (
        dict(family="gpt", ffn=64, activation="swiglu"),
        {},
        "model.activation",
        "has activation gelu_tanh, not swiglu",
    ),
    (dict(family="gpt", moe=dict(experts=2, top_k=1, ffn=64)), {}, "model.moe", "has no moe"),
    (dict(family="llama", activation="gelu"), {}, "model.activation", "has activation swiglu"),
    (dict(family="llama", ffn=64, dropout=0.1), {}, "model.dropout", "has dropout 0.0, not 0.1"),
    (
        dict(family="llama", ffn=64, heads=3, head_dim=16),
        {},
        "model.heads",
        "wants hidden 64 divisible by heads",
    ),
    (dict(family="distilbert", norm_epsilon=1e-5), {}, "model.norm_epsilon", "not 1e-05"),
    (dict(family="distilbert", norm="rmsnorm"), {}, "model.norm", "has norm layernorm"),
    (
        dict(family="gpt"),
        dict(task="classification"),
        "task",
        "a gpt learns language_modeling, not classification",
    ),
    (
        dict(family="bert"),
        dict(task="language_modeling"),
        "task",
        "a bert learns masked_language_modeling or classification, not language_modeling",
    ),
    (dict(family="bert"), dict(task="classification"), "task", "needs `model.classes`"),
    (
        dict(family="bert", classes=2),
        dict(task="masked_language_modeling"),
        "model.classes",
        "classes are for `task: classification`",
    ),
    (
        dict(family="gpt"),
        dict(lora=dict(targets=("q_proj", "c_attn"))),
        "lora.targets",
        "a gpt has no linear layers q_proj; it has c_attn, c_fc, c_proj",
    ),
]


@pytest.mark.parametrize(("model", "fields", "field", "words"), WRONG)
def test_what_no_class_has_is_named(
    model: dict[str, Any], fields: dict[str, Any], field: str, words: str
) -> None:
    found = unrepresentable(run({**TEXT, **model}, **fields))
    assert [(field, True)] == [(name, words in said) for name, said in found], found


def test_megatron_says_in_one_line_that_it_has_no_encoder() -> None:
    (problem,) = untrainable_fields(spec(model={**TEXT, **T5}))
    assert problem == (
        "model.encoder_layers",
        "megatron-core cannot train this model: its GPT attends to no encoder: train by fsdp, ddp "
        "or deepspeed",
    )
    for engine in ("fsdp", "ddp", "deepspeed"):
        assert not untrainable_fields(spec(model={**TEXT, **T5}, engine=dict(name=engine)))


def test_convolutions_take_no_lora() -> None:
    spec = run(SHAPES["resnet"], lora={})
    assert [field for field, _ in unrepresentable(spec)] == ["lora"]


def test_convolutions_are_not_computed_again() -> None:
    spec = run(SHAPES["resnet"], recompute="full")
    assert [field for field, _ in unrepresentable(spec)] == ["recompute"]
    (way,) = recompute_choices(run(SHAPES["resnet"]))
    assert RECOMPUTES[way.mode] == "none"
    assert len(recompute_choices(run(SHAPES["vit"]))) == 2


# https://huggingface.co/distilbert/distilbert-base-uncased and google-bert/bert-base-uncased, as
# their classes count them (num_parameters); without the vocabulary's padding.
BASE: dict[str, Any] = dict(hidden=768, heads=12, vocab=30522, seq=512)
PUBLISHED = {
    "DistilBertForMaskedLM": (dict(BASE, family="distilbert", layers=6), 66_985_530),
    "DistilBertForSequenceClassification": (
        dict(BASE, family="distilbert", layers=6, classes=2),
        66_955_010,
    ),
    "BertForSequenceClassification": (
        dict(BASE, family="bert", layers=12, classes=2),
        109_483_778,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    shape, parameters = PUBLISHED[name]
    assert total_parameters(ModelSpec.model_validate(shape)) == parameters


def test_a_classifier_multiplies_no_vocabulary() -> None:
    words = ModelSpec.model_validate(dict(BASE, family="distilbert", layers=6))
    classes = ModelSpec.model_validate(dict(BASE, family="distilbert", layers=6, classes=2))
    less = 6 * 512 * (30522 * 768 + 768 * 768)
    assert model_flops_per_step(words, 1) - model_flops_per_step(classes, 1) == less


SPEC_PROBLEMS = [
    (dict(TEXT, family="gpt", classes=2), "classes goes with encoders of texts"),
    (dict(family="resnet", layers=50, vocab=10, classes=2), "classes of a resnet are its `vocab`"),
    (dict(TEXT, family="bert", classes=1), "greater than or equal to 2"),
]


@pytest.mark.parametrize(("shape", "words"), SPEC_PROBLEMS)
def test_classes_that_make_no_sense(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSpec.model_validate(shape)


# -- What the search proposes for megatron-core passes the checks of every launch ---------------


H100 = dict(type="h100", per_node=8, reserved="100MiB", model="H100-80GB SXM", memory="80GiB")
EXPERTS = {**MOE, "moe": dict(experts=8, top_k=2, ffn=512)}
BIASED = {**EXPERTS, "bias": True, "positions": "learned"}
AWAY = dict(activation_offload_layers="auto")


def own(**settings: Any) -> dict[str, Any]:
    return dict(engine={"megatron": settings})


GRAPHS = own(cuda_graph_impl="local")
SPECS: dict[str, dict[str, Any]] = {
    "dense": dict(model=SMALL),
    "offloading": dict(model=SMALL, **AWAY),
    "prediction layers": dict(model={**SMALL, "mtp_layers": 1}),
    "experts": dict(model=EXPERTS),
    "dense and expert layers": dict(model=MOE),
    "biased experts": dict(model=BIASED),
    "flex": dict(model=EXPERTS, **own(moe_token_dispatcher_type="flex")),
    "shared expert": dict(model=MOE, **own(moe_shared_expert_overlap=True)),
    "graphs": dict(model=SMALL, **GRAPHS, **AWAY),
    "graphs of dropout": dict(model={**SMALL, "family": "gpt", "dropout": 0.1}, **GRAPHS),
}
WITH_ENGINE: dict[str, dict[str, Any]] = {
    "8 bits": dict(model=SMALL, precision="fp8"),
    "8 bits with experts": dict(model=EXPERTS, precision="fp8"),
    "hidden messages": dict(model=SMALL, **own(tp_comm_overlap=True)),
    "deferred gradients": dict(model=SMALL, **own(defer_embedding_wgrad_compute=True)),
}
CASES = [
    *((name, True) for name in (*SPECS, *WITH_ENGINE)),
    *((name, False) for name in ("dense", "offloading", "experts", "graphs of dropout")),
]


def one_of_each_kind(found: Found) -> list[int]:
    """A row that fits for every combination of recomputation, offload and some axes in use."""
    columns, rows = found.columns, np.flatnonzero(found.fits)
    kinds = np.column_stack(
        [
            *(columns.recompute, columns.recompute_modules, columns.recompute_layers > 0),
            *(columns.offloaded_layers > 0, columns.etp > 0, columns.tp > 1, columns.pp > 1),
        ]
    )[rows]
    _, first = np.unique(kinds, axis=0, return_index=True)
    return [int(row) for row in rows[np.sort(first)]]


@pytest.mark.parametrize(("name", "installed"), CASES)
def test_the_engine_takes_one_proposal_of_each_kind(
    name: str, installed: bool, tmp_path: Path
) -> None:
    """`installed`: the profile promises TransformerEngine."""
    spec = run_spec(**dict(gpus=8, batch=32, micro="auto") | {**SPECS, **WITH_ENGINE}[name])
    profile = cluster(gpu=H100, software={"transformer_engine": installed})
    request = PlanRequest(spec, profile)
    found = search(request, freedom_of(request))
    rows = one_of_each_kind(found)
    assert rows
    refused = {
        problem.message
        for row in rows
        for problem in engine_problems(
            megatron_config(TrainingJob(request.spec, profile, _assemble(found, row))),
            RunLayout(tmp_path),
        )
    }
    assert not refused


def test_activations_are_offloaded_where_the_engine_can() -> None:
    spec = run_spec(**dict(gpus=8, batch=32, micro="auto") | SPECS["offloading"])
    offloaded = []
    for installed in (True, False):
        profile = cluster(gpu=H100, software={"transformer_engine": installed})
        request = PlanRequest(spec, profile)
        offloaded.append(bool(search(request, freedom_of(request)).columns.offloaded_layers.any()))
    assert offloaded == [True, False]
