"""`model.pretrained` is looked at before the queue, and complaints have a line of the spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from staged_weights import write_safetensors

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.input_checks import check_inputs
from hpctrain.job.prepare import Prepared, prepare

SPEC = """\
name: tuned
model:
  family: gpt
  layers: 2
  hidden: 64
  heads: 4
  vocab: 256
  seq: 64
  activation: gelu_tanh
  pretrained: weights/gpt2
batch: {{global: 8, micro: 2}}
budget: {{steps: 4}}
optimizer: {{lr: 1e-3}}
checkpoint: {{every_steps: 2}}
engine: {{name: {engine}}}
precision: fp32
resources: {{gpus: 2, walltime: 10min}}
"""
CONFIG = dict(model_type="gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ready(place: Path, engine: str = "ddp") -> Prepared:
    Path("spec.yaml").write_text(SPEC.format(engine=engine))
    return prepare(Path("spec.yaml"), "sandbox", runs=place / "runs")


def stage(place: Path, **changes: object) -> None:
    directory = place / "weights" / "gpt2"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    write_safetensors(directory / "model.safetensors")


def complaints(prepared: Prepared) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        check_inputs(prepared.spec)
    return [str(problem) for problem in caught.value.problems]


def test_a_job_is_told_the_absolute_path(place: Path) -> None:
    stage(place)
    prepared = ready(place)
    check_inputs(prepared.spec)
    told = json.loads(prepared.train.model_dump_json())
    assert told["model"]["pretrained"] == str(place / "weights" / "gpt2")


def test_an_absent_model_is_named_with_its_line_and_how_to_stage_it(place: Path) -> None:
    prepared = ready(place)
    with pytest.raises(InvalidInputError) as caught:
        check_inputs(prepared.spec)
    (problem,) = caught.value.problems
    path = place / "weights" / "gpt2"
    assert str(problem) == f"spec.yaml:10:15: `model.pretrained`: {path} does not exist"
    assert f"hf download OWNER/MODEL --local-dir {path}" in (problem.hint or "")


def test_every_field_that_differs_is_told_at_once(place: Path) -> None:
    stage(place, n_layer=3, n_positions=32)
    assert [line.partition("`: ")[2] for line in complaints(ready(place))] == [
        "layers is 2 in the spec and 3 in config.json",
        "seq is 64 in the spec, config.json has 32 positions",
    ]


def test_megatron_core_wants_converted_weights(place: Path) -> None:
    stage(place)
    (line,) = complaints(ready(place, "megatron"))
    assert "megatron-core cannot start from" in line
    for name in ("metadata.json", "common.pt"):
        (place / "weights" / "gpt2" / name).touch()
    prepared = ready(place, "megatron")
    check_inputs(prepared.spec)
    told = json.loads(prepared.train.model_dump_json())
    assert told["model"]["pretrained"].startswith(str(place))
