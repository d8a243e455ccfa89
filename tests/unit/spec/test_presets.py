"""Published models by name: what they are, and what a spec with one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.spec.catalogue import ModelPreset
from hpctrain.spec.loader import load_presets, load_run_spec
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.run import ModelSpec

SPEC = """\
name: one
model: MODEL
batch: {global: 8}
budget: {steps: 10}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 5}
resources: {gpus: 1}
"""
PRESETS = load_presets().presets
# What the planner counts and published totals do not, or the other way round.
DIFFERENCES = {"gpt3-6.7b": 0.02, "gpt3-13b": 0.02, "gpt3-175b": 0.003}


def spec(tmp_path: Path, model: str) -> Path:
    file = tmp_path / "one.yaml"
    file.write_text(SPEC.replace("MODEL", model))
    return file


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_it_has_the_published_number_of_parameters(preset: ModelPreset, tmp_path: Path) -> None:
    engine = ["engine.name=ddp"] if preset.shape["family"] in ("vit", "resnet") else []
    model = load_run_spec(spec(tmp_path, preset.name), engine).document.model
    assert model == ModelSpec.model_validate(preset.shape)
    counted = total_parameters(model)
    allowed = DIFFERENCES.get(preset.name, 0.01 if not model.causal else 1e-4)
    assert counted == pytest.approx(preset.parameters, rel=allowed)


def test_fields_of_the_file_and_of_set_replace_those_of_the_preset(tmp_path: Path) -> None:
    file = spec(tmp_path, "{preset: llama-3-8b, seq: 4096}")
    model = load_run_spec(file, ["model.layers=16"]).document.model
    assert (model.seq, model.layers, model.hidden, model.rope_base) == (4096, 16, 4096, 500_000)


def test_values_of_a_preset_come_from_its_line(tmp_path: Path) -> None:
    loaded = load_run_spec(spec(tmp_path, "llama-2-7b"))
    assert loaded.origin["model.hidden"] == "one.yaml:2"
    assert "hidden: 4096  # one.yaml:2" in write_resolved(loaded)
    again = tmp_path / "resolved.yaml"
    again.write_text(write_resolved(loaded))
    assert load_run_spec(again).document == loaded.document


@pytest.mark.parametrize(
    ("model", "words", "hint"),
    [
        ("llama-3-8B", "one.yaml:2:8: `model`: no preset is called `llama-3-8B`", "llama-3-8b"),
        ("{preset: nothing}", "one.yaml:2:17: `model`: no preset", "presets are gpt2"),
        ("{preset: 7}", "one.yaml:2:17: `model.preset`: expected the name", ""),
        ("{preset: llama-3-8b, layers: x}", "`model.layers`: expected an integer", ""),
    ],
)
def test_wrong_ones_are_refused_at_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str, hint: str
) -> None:
    spec(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError) as refused:
        load_run_spec("one.yaml")
    said: Any = refused.value.problems
    assert any(words in str(one) for one in said), [str(one) for one in said]
    assert any(hint in (one.hint or "") for one in said)
