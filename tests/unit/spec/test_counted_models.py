"""A config.json of no family: counted once, then read, planned and refused by these figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.module_subprocess import EndedProgram
from hpctrain.plan.planner import make_plan
from hpctrain.site import init
from hpctrain.spec.families import config_digest
from hpctrain.spec.families.settings import settings_of
from hpctrain.spec.loader import load_named_profile, load_run_spec

CONFIG = {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280}
FIGURES: dict[str, Any] = {
    "layers": 24,
    "hidden": 768,
    "heads": 12,
    "vocab": 50280,
    "tied": True,
    "counted": {
        "config": config_digest(CONFIG),
        "parameters": 129_135_360,
        "blocks": ["MambaBlock"],
        "recomputes": True,
    },
}
SPEC = """\
name: counted
batch: {global: 64, micro: 1}
budget: {steps: 10}
optimizer: {lr: 1.0e-4}
checkpoint: {every_steps: 5}
data: {made_up: true}
resources: {gpus: 8}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))

    def write(text: str = "", engine: str = "fsdp", **model: Any) -> Path:
        fields = {"config": "config.json", "seq": 2048, **FIGURES, **model}
        fields = {name: value for name, value in fields.items() if value is not None}
        sections = f"model: {json.dumps(fields)}\nengine: {{name: {engine}}}\n{text}"
        Path("spec.yaml").write_text(SPEC + sections)
        return Path("spec.yaml")

    return write


def problems_of(spec: Path) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        load_run_spec(spec)
    return [f"{one.line}: {one.message} | {one.hint}" for one in caught.value.problems]


def test_without_a_count_the_command_that_makes_one_is_named(write: Any) -> None:
    (problem,) = problems_of(write(counted=None))
    assert "state spaces of Mamba-1" in problem and "`hpctrain init --model DIR`" in problem


def test_the_class_gets_the_file_as_it_is(write: Any) -> None:
    model = load_run_spec(write()).document.model
    assert settings_of(model) == CONFIG == model.config
    assert (model.family, model.called) == ("other", "model of type mamba")


def test_weights_are_exact_and_the_rest_is_said_to_be_an_estimate(write: Any) -> None:
    spec, site = load_run_spec(write()).document, load_named_profile("a100x64").document
    plan = make_plan(spec, site)
    share = -(-129_135_360 // 8)
    assert plan.parameters == 129_135_360 == plan.stages[0].parameters_per_gpu
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (1, 1, 8)
    (memory,) = plan.memory
    assert memory.optimizer_bytes == 12 * share
    (note,) = [line for line in plan.warnings if "a count alone" in line]
    assert "estimate of a dense model of that size" in note
    dense = 64 * 2048 * (6 * 129_135_360 + 12 * 24 * 768 * 2048)  # all parameters, and attention
    assert plan.model_flops_per_step == pytest.approx(dense, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "axis"), [("fsdp", "tp"), ("deepspeed", "tp"), ("deepspeed", "pp"), ("fsdp", "cp")]
)
def test_it_is_not_split(write: Any, engine: str, axis: str) -> None:
    ran = hpctrain("plan", "-p", "a100x64", str(write(f"parallel: {{{axis}: 2}}\n", engine=engine)))
    assert ran.exit_code != 0
    assert f"model of type mamba, planned with data parallelism only, has no {axis}" in ran.stderr


def test_megatron_names_the_part_that_it_has_not(write: Any) -> None:
    ran = hpctrain("submit", "-p", "a100x64", "--dry-run", str(write(engine="megatron")))
    assert ran.exit_code == 3
    assert "megatron-core cannot train this model: state spaces of Mamba-1" in ran.stderr
    assert ran.stderr.count("megatron-core") == 1


CHANGED = [
    ({"counted": {**FIGURES["counted"], "config": "sha256:" + "0" * 64}}, "another config.json"),
    ({"counted": {**FIGURES["counted"], "parameters": 10**40}}, "`model.counted.parameters`"),
    ({"counted": 3}, "`model.counted`"),
    ({"config": "x" * 300}, "File name too long"),
    ({"ffn": 3072}, "ffn: a counted model is what its config.json says"),
    ({"dropout": 0.1}, "dropout: a counted model"),
    ({"max_seq": 1024}, "seq 2048 is longer than the 1024 positions"),
    ({"family": "llama"}, "no family"),
    ({"config": None}, "no family"),
]


@pytest.mark.parametrize(("change", "words"), CHANGED)
def test_what_contradicts_the_count_is_refused(
    write: Any, change: dict[str, Any], words: str
) -> None:
    assert any(words in problem for problem in problems_of(write(**change)))


CANNOT = [
    ("lora: {rank: 4}\n", "LoRA adapts linear layers, none are known of a model of type mamba"),
    ("task: classification\n", "learns language_modeling, not classification"),
    ("data: {made_up: true, documents: separate, document_end: 0}\n", "may not keep texts apart"),
    ("recompute: full\n", "no blocks to compute again"),
]


@pytest.mark.parametrize(("text", "words"), CANNOT)
def test_what_the_class_may_not_have_is_refused(write: Any, text: str, words: str) -> None:
    file = write(text, counted={**FIGURES["counted"], "recomputes": False})
    if text.startswith("data"):
        file.write_text(file.read_text().replace("data: {made_up: true}\n", "", 1))
    ran = hpctrain("submit", "-p", "a100x64", "--dry-run", str(file))
    assert ran.exit_code == 3 and words in ran.stderr


@pytest.mark.parametrize("kind", ["longt5", "whisper", "gemma4"])
def test_what_is_no_causal_model_stays_refused(write: Any, kind: str) -> None:
    config = {**CONFIG, "model_type": kind}
    file = write(counted={**FIGURES["counted"], "config": config_digest(config)})
    Path("config.json").write_text(json.dumps(config))
    (problem,) = problems_of(file)
    assert "hpctrain explain trainer" in problem


def test_init_counts_and_its_spec_is_planned(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(program: Any, *arguments: str, **_: Any) -> EndedProgram:
        asked.append(arguments)
        return EndedProgram(0, json.dumps(FIGURES), "")

    monkeypatch.setattr(init, "run_module", run)
    made = hpctrain("init", "own.yaml", "--model", "config.json", "--gpus", "8")
    assert made.exit_code == 0 and "a count alone" in made.stderr and asked == [("config.json",)]
    document = load_run_spec(Path("own.yaml")).document
    assert document.model.counted is not None and not document.engine.abilities.pads_vocab
    assert hpctrain("plan", "-p", "a100x64", "own.yaml").exit_code == 0


def test_init_says_why_a_model_cannot_be_counted(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "run_module", lambda *_, **__: EndedProgram(1, "", "no such class"))
    made = hpctrain("init", "own.yaml", "--model", "config.json", "--gpus", "8")
    assert made.exit_code == 3 and "it cannot be counted: no such class" in made.stderr
