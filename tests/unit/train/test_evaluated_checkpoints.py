"""Which checkpoints retention leaves for evaluation jobs where the file system answers errors."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from fabricated_runs import SUBMITTED, fabricate, published

from hpctrain.records.evaluations import EvaluationJob, EvaluationSettings, read_settings
from hpctrain.records.layout import RunLayout
from hpctrain.train.saving.save_interval import steps_to_evaluate


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    found = fabricate(tmp_path, "gpt-1234", SUBMITTED)
    for step in (4, 8, 10):
        published(found, step)
    return found.layout


@pytest.mark.parametrize("method", ["stat", "read_bytes"])
@pytest.mark.parametrize("name", ["evaluation.json", "evaluations.jsonl"])
def test_an_error_that_passes_deletes_nothing(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    assert steps_to_evaluate(run) == set(), "a run without evaluation jobs"
    jobs = (EvaluationJob(name="score", every_steps=4),)
    settings = EvaluationSettings(jobs=jobs, last_step=100)
    run.evaluation_config.write_text(settings.model_dump_json())
    run.evaluations.touch()
    assert steps_to_evaluate(run) == {4, 8}
    whole = getattr(Path, method)

    def fails(path: Path, **options: object) -> object:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return whole(path, **options)

    monkeypatch.setattr(Path, method, fails)
    kept = steps_to_evaluate(run)
    assert {4, 8} <= kept
    if (name, method) == ("evaluation.json", "read_bytes"):
        assert kept == {4, 8, 10}
        with pytest.raises(OSError, match="Input/output"):
            read_settings(run)


def test_a_manifest_that_cannot_be_read_keeps_its_checkpoint(run: RunLayout) -> None:
    jobs = (EvaluationJob(name="score", every_steps=100),)
    settings = EvaluationSettings(jobs=jobs, last_step=100)
    run.evaluation_config.write_text(settings.model_dump_json())
    assert steps_to_evaluate(run) == set()
    for path in (run.checkpoints / "iter_0000008").glob("*manifest*"):
        path.unlink()
    assert steps_to_evaluate(run) == {8}
