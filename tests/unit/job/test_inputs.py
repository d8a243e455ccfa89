"""What every node has to see: the files that the trainer's own checks look for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.job.prepare import input_paths, prepare

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples/gpt-tiny.yaml"


def train(directory: Path, *overrides: str) -> TrainConfig:
    prepared = prepare(TINY, "sandbox", overrides, runs=directory / "runs")
    assert prepared.supervise.inputs == input_paths(prepared.train)
    return prepared.train


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.sources=[]"], []),
        (["data.sources=[{path: a},{path: b}]"], ["a.bin", "a.idx", "b.bin", "b.idx"]),
        # token numbers need no tokenizer
        (["data.sources=[{path: a}]", "data.tokenizer=t.json"], ["a.bin", "a.idx"]),
    ],
)
def test_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(input_paths(train(tmp_path, *overrides))) == [str(tmp_path / p) for p in expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_format": "arrays", "data_validation": "/v"}, ["/a.npz", "/b.npz", "/v.npz"]),
        ({"data_format": "packed"}, ["/a.npz", "/b.npz"]),
        ({"task": "masked_language_modeling"}, ["/a.bin", "/a.idx", "/b.bin", "/b.idx", "/t.json"]),
    ],
)
def test_other_formats(tmp_path: Path, changes: dict[str, object], expected: list[str]) -> None:
    settings = train(
        tmp_path, "engine.name=ddp", "parallel.tp=1", "parallel.pp=1", "data.sources=[]"
    )
    assert isinstance(settings, ModuleConfig)
    given = {"data_blend": ((1.0, "/a"), (1.0, "/b")), "tokenizer": "/t.json"}
    assert list(input_paths(settings.model_copy(update={**given, **changes}))) == expected


def test_folders_of_images_and_weights_to_start_from(tmp_path: Path) -> None:
    settings = train(
        tmp_path, "engine.name=ddp", "parallel.tp=1", "parallel.pp=1", "data.sources=[]"
    )
    assert isinstance(settings, ModuleConfig)
    folder = tmp_path / "pictures"
    folder.mkdir()
    model = settings.model.model_copy(update={"pretrained": "/weights"})
    blend = ((1.0, str(folder)), (1.0, "/listed"))
    changes = {"data_format": "images", "data_blend": blend, "model": model}
    found = input_paths(settings.model_copy(update=changes))
    assert found == (str(folder), "/listed.npz", "/weights")
