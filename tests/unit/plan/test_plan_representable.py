"""Which shapes Hugging Face's classes can have, and how a spec is told that they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.plan.abilities.trainable_hugging_face import TASKS, unrepresentable
from hpctrain.plan.documents import RECOMPUTES
from hpctrain.plan.model.parameters import model_flops_per_step, total_parameters
from hpctrain.plan.search.space import recompute_choices
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec

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
    assert run(SHAPES[family]).learned_task == TASKS[family][0]


def test_classes_of_texts_are_a_task_of_their_own() -> None:
    spec = run({**SHAPES["bert"], "classes": 3})
    assert spec.learned_task == "classification" and unrepresentable(spec) == []


WRONG: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (dict(family="gpt", positions="rope"), {}, "model.positions", "has positions learned, not rop"),
    (dict(family="gpt", bias=False), {}, "model.bias", "GPT2LMHeadModel has bias true, not false"),
    (dict(family="gpt", kv_heads=2), {}, "model.kv_heads", "as many key/value heads as heads (4)"),
    (dict(family="gpt", head_dim=8), {}, "model.head_dim", "head_dim hidden / heads = 16"),
    (dict(family="gpt", ffn=64, activation="swiglu"), {}, "model.activation", "needs family llama"),
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
    (dict(TEXT, family="gpt", classes=2), "classes goes with families bert and distilbert"),
    (dict(family="resnet", layers=50, vocab=10, classes=2), "classes of a resnet are its `vocab`"),
    (dict(TEXT, family="bert", classes=1), "greater than or equal to 2"),
]


@pytest.mark.parametrize(("shape", "words"), SPEC_PROBLEMS)
def test_classes_that_make_no_sense(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSpec.model_validate(shape)
