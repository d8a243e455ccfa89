"""The fields of `data`: which go together, and what follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.plan.abilities.trainable import data_format, unreadable
from hpctrain.spec.loader import load_run_spec
from hpctrain.spec.run import RunSpec

RESNET = """\
name: tiny
model: {family: resnet, layers: 18, vocab: 10, image: 32}
batch: {global: 8}
budget: {steps: 60}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 10}
engine: {name: ddp}
resources: {gpus: 4}
"""
BERT = "model: {family: bert, layers: 2, hidden: 64, heads: 4, vocab: 99, seq: 32, classes: 2}\n"


def spec_of(tmp_path: Path, text: str, *overrides: str) -> RunSpec:
    (tmp_path / "spec.yaml").write_text(text)
    return load_run_spec(tmp_path / "spec.yaml", overrides).document


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{workers: 2}", "workers is not for format tokens: remove it"),
        ("{format: packed, augment: crop}", "augment is not for format packed: remove it"),
        ("{format: examples, mean: [0.5]}", "mean is not for format examples: remove it"),
        ("{validation: other}", "validation is not for format tokens: remove it"),
        ("{format: images, validation: v, split: '90,10,0'}", "takes the place of `split`"),
        ("{format: images, mean: [0.5, 0.5]}", "mean has one number or three, not 2"),
        ("{format: images, std: [0.5, 0, 1]}", "std must be above 0"),
        ("{format: arrays, sources: [{path: a, weight: 2}]}", "weights are for a blend of tokens"),
        ("{format: folders}", "format"),
        ("{format: images, workers: -1}", "at least 0"),
    ],
)
def test_contradictions_are_named_with_their_place(data: str, words: str, tmp_path: Path) -> None:
    problems = problems_of(tmp_path, VALID + f"data: {data}\n")
    assert words in "\n".join(shown(tmp_path, problems))
    assert problems[0].line == 8


def test_habits_of_formats(tmp_path: Path) -> None:
    images = spec_of(tmp_path, RESNET, "data.format=images").data
    assert images.augmentation == "crop_flip"
    assert images.normalization == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    arrays = spec_of(tmp_path, RESNET, "data.format=arrays", "data.std=[0.3]").data
    assert arrays.augmentation == "none", "a mirrored digit is no digit"
    assert arrays.normalization == ((0.5,), (0.3,))


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (VALID, [], "tokens"),
        (VALID, ["engine.name=fsdp", "data.format=packed"], "packed"),
        (RESNET, [], "images"),
        (RESNET, ["data.format=arrays"], "arrays"),
    ],
)
def test_data_that_are_made_up_are_for_the_task(
    text: str, overrides: list[str], expected: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, text, *overrides)
    assert data_format(spec) == expected
    assert unreadable(spec) == []


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (VALID, ["data.format=packed"], "by megatron reads tokens, not packed"),
        (VALID, ["engine.name=ddp", "data.format=images"], "reads tokens or packed, not images"),
        (
            RESNET,
            ["data.sources=[{path: a}]"],
            "a resnet by ddp reads images or arrays, not tokens",
        ),
        (RESNET, ["data.format=examples"], "reads images or arrays, not examples"),
    ],
)
def test_what_a_model_cannot_learn_from(
    text: str, overrides: list[str], words: str, tmp_path: Path
) -> None:
    ((field, message),) = unreadable(spec_of(tmp_path, text, *overrides))
    assert field == "data.format" and words in message


def test_texts_with_classes_are_examples(tmp_path: Path) -> None:
    lines = [line for line in RESNET.splitlines(keepends=True) if not line.startswith("model")]
    spec = spec_of(tmp_path, BERT + "".join(lines))
    assert data_format(spec) == "examples"
