"""An engine that hpctrain does not know: planned, rendered and trained, no shared file changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from toy_engine import ABILITIES as TOY
from toy_engine_document import ToyConfig

from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.engines.train_json import parse_train_config
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest, what_is_wrong
from hpctrain.records.run_records import DoneMarker, TrainerExit, read_metrics, read_record
from hpctrain.spec.engines.registry import (
    ENGINES,
    ENTRY_POINTS,
    UnknownEngineError,
    abilities_of,
    engine_names,
    registered,
)
from hpctrain.trials.variants import engine_overrides

HERE = Path(__file__).parent
SPEC = """\
name: line
engine: {name: toy}
model: {layers: 1, hidden: 64, heads: 4, vocab: 256, seq: 16}
batch: {global: 8, micro: 8}
budget: {steps: 6}
precision: fp32
optimizer: {lr: 1e-2, zero: 0}
checkpoint: {every_steps: 3, asynchronous: false}
resources: {gpus: 1, walltime: 00:10:00}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "line.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def toy() -> Iterator[None]:
    with registered(TOY):
        yield


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of packages in which the toy's distribution is installed."""
    about = tmp_path / "site/toy_engine-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntoy = toy_engine:ABILITIES\n")
    return about.parent


def prepared(spec: Path, runs: Path, *overrides: str) -> Prepared:
    return prepare(spec, "sandbox", overrides, runs=runs)


def train(run: RunLayout, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One rank, as `srun` would start it."""
    place = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", CUDA_VISIBLE_DEVICES="")
    path = os.pathsep.join(map(str, (site, HERE)))
    return subprocess.run(
        [sys.executable, "-m", "hpctrain.train", "train.json"],
        cwd=run.directory,
        env={**os.environ, **place, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.usefixtures("toy")
def test_it_is_planned_and_rendered(spec: Path, tmp_path: Path) -> None:
    found = prepared(spec, tmp_path / "runs")
    assert found.plan.engine == "toy" and found.plan.layout.world_size == 1
    assert "toy, 6 steps" in found.script
    assert isinstance(found.train, ToyConfig) and found.train.inputs == 64
    assert parse_train_config(found.train.model_dump_json()) == found.train


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.layers=2", "a line has one layer"),
        ("model.family=bert", "hpctrain trains gpt with toy, not bert"),
        ("optimizer.zero=1", "engine toy has no ZeRO stage 1"),
        ("optimizer.offload=cpu", "hpctrain does not train toy with the optimizer's state on cpu"),
        ("engine.ddp.bucket=1MiB", "these are settings of DDP, and toy would not read them"),
        ("profile={steps: [2], ranks: [0]}", "expected one value"),
        ("data.format=images", "reads tokens"),
    ],
)
def test_what_it_cannot_do_is_refused(
    spec: Path, tmp_path: Path, override: str, words: str
) -> None:
    with pytest.raises(HpctrainError) as caught:
        prepared(spec, tmp_path / "runs", override)
    assert words in str(caught.value)


@pytest.mark.usefixtures("toy")
def test_it_is_compared_with_others() -> None:
    found = engine_overrides("toy+micro4", "megatron")
    assert found[0] == "engine.name=toy" and found[-1] == "batch.micro=4"


@pytest.mark.variant("test_it_resumes_where_it_was")
def test_one_rank_trains_it_to_the_end(spec: Path, tmp_path: Path, site: Path) -> None:
    with registered(TOY):
        run = write_run_directory(prepared(spec, tmp_path / "runs"), tmp_path / "runs")
    done = train(run, site)
    assert done.returncode == TrainerExit.DONE, done.stderr
    losses = [row.loss for row in read_metrics(run)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    last = run.checkpoints / checkpoint_name(6)
    assert what_is_wrong(last, read_manifest(last), deep=True) is None
    assert read_record(run.done, DoneMarker) is not None


def test_it_resumes_where_it_was(spec: Path, tmp_path: Path, site: Path) -> None:
    with registered(TOY):
        run = write_run_directory(prepared(spec, tmp_path / "runs"), tmp_path / "runs")
    whole = train(run, site)
    assert whole.returncode == TrainerExit.DONE, whole.stderr
    losses = {row.step: row.loss_hex for row in read_metrics(run)}
    run.done.unlink()
    again = train(run, site, HPCTRAIN_RESUME=checkpoint_name(3))
    assert again.returncode == TrainerExit.DONE, again.stderr
    rows = read_metrics(run)
    assert [(row.step, row.loss_hex) for row in rows[6:]] == [(n, losses[n]) for n in (4, 5, 6)]


def test_without_its_distribution_nothing_is_imported(spec: Path, tmp_path: Path) -> None:
    with registered(TOY):
        run = write_run_directory(prepared(spec, tmp_path / "runs"), tmp_path / "runs")
    done = train(run, tmp_path)
    assert done.returncode == TrainerExit.CONFIG_ERROR
    assert "'megatron', 'megatron-lm', 'fsdp', 'deepspeed' or 'ddp'" in done.stderr


def test_an_installed_engine_is_found_by_its_name(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    assert "toy" in engine_names() and "toy" not in ENGINES
    try:
        assert abilities_of("toy") is TOY
    finally:
        ENGINES.pop("toy", None)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("toy = toy_engine_document:ToyConfig", "is not the abilities of an engine of that name"),
        ("other = toy_engine:ABILITIES", "is not the abilities of an engine of that name"),
        ("broken = no_such_module:ABILITIES", "cannot be imported"),
    ],
)
def test_an_unusable_distribution_is_named(
    site: Path, monkeypatch: pytest.MonkeyPatch, entry: str, words: str
) -> None:
    file = site / "toy_engine-1.0.dist-info/entry_points.txt"
    file.write_text(f"[{ENTRY_POINTS}]\n{entry}\n")
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(HpctrainError, match=words):
        abilities_of(entry.partition(" ")[0])


def test_a_document_cannot_name_a_module(tmp_path: Path, spec: Path) -> None:
    with registered(TOY):
        fields = json.loads(prepared(spec, tmp_path / "runs").train.model_dump_json())
        for more in ({"assembly": "os"}, {"document": "os:system"}):
            with pytest.raises(ValidationError):
                parse_train_config(json.dumps({**fields, **more}))
    for name in ("toy", "os", "toy_engine_training", "../toy", 7, None):
        with pytest.raises(ValidationError):
            parse_train_config(json.dumps({**fields, "engine": name}))


def test_registering_ends_and_hides_nobody(spec: Path, tmp_path: Path) -> None:
    names = engine_names()
    with registered(TOY), pytest.raises(ValueError, match="already"), registered(TOY):
        pass
    assert engine_names() == names
    with pytest.raises(UnknownEngineError, match="known are megatron, megatron-lm"):
        abilities_of("toy")
    with pytest.raises(InvalidInputError, match="expected `megatron` or `megatron-lm`"):
        prepared(spec, tmp_path / "runs")
