"""What an earlier launch of somebody's own trainer has left complete, and nobody has published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.checkpoints.publish import published_steps, quarantine
from hpctrain.engines.trainer import TrainerSettings
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.supervise.srun_launch import TrainerLauncher


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    for name in ("checkpoints", "epochs", "output"):
        (tmp_path / name).mkdir()
    trainer = {
        "command": ["train", "{resume}"],
        "checkpoint": {"path": "step-{step}", "complete": {"files": ["sign"]}},
        "done": {"step": 99},
    }
    fields = {"run_name": "r", "directory": "/", "gpus_per_node": 1, "accelerator": "cpu"}
    settings = TrainerSettings.model_validate({**fields, "trainer": trainer})
    run = RunLayout(tmp_path)
    run.train_config.write_text(settings.model_dump_json(by_alias=True))
    return run


def left(run: RunLayout, launch: int, step: int, *names: str) -> None:
    for name in names:
        path = run.launch_output(launch) / f"step-{step}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{launch} {step}")


def publish_before(run: RunLayout, *started: Event) -> list[int]:
    """As before the next launch; returns the published steps."""
    epoch = claim_epoch(run.epochs, "test")
    context: Any = SimpleNamespace(
        run_layout=run,
        config=SimpleNamespace(shapes=(SimpleNamespace(nodes=1),)),
        ledger=SimpleNamespace(events=lambda: started),
    )
    launcher: Any = SimpleNamespace(context=context, epoch=epoch)
    TrainerLauncher.publish_left(launcher)
    return published_steps(run.checkpoints)


def test_complete_ones_of_all_launches_are_published_once(run: RunLayout) -> None:
    left(run, 1, 5, "weights", "sign")
    left(run, 1, 10, "weights")
    left(run, 2, 8, "weights", "sign")
    assert publish_before(run) == [5, 8] == publish_before(run)
    manifest = read_manifest(run.checkpoints / checkpoint_name(8))
    assert manifest is not None
    assert [file.name for file in manifest.files] == ["step-8/sign", "step-8/weights"]


def test_what_was_put_into_quarantine_does_not_come_back(run: RunLayout) -> None:
    left(run, 1, 5, "weights", "sign")
    left(run, 1, 10, "weights", "sign")
    assert publish_before(run) == [5, 10]
    quarantine(run.checkpoints, run.checkpoints / checkpoint_name(10), "damaged")
    assert publish_before(run) == [5]
    left(run, 4, 10, "weights", "sign")  # trained once more, by a later launch
    assert publish_before(run) == [5, 10]


def test_what_a_launch_was_given_to_resume_from_is_none_of_its_own(run: RunLayout) -> None:
    """It was damaged, so it went into quarantine; a copy lies where the trainer looked for it."""
    left(run, 1, 10, "weights", "sign")
    assert publish_before(run) == [10]
    left(run, 2, 10, "weights", "sign")
    left(run, 2, 15, "weights", "sign")
    quarantine(run.checkpoints, run.checkpoints / checkpoint_name(10), "damaged")
    started = Event(event=EventKind.LAUNCH_STARTED, time=1.0, epoch=2, resume_step=10)
    ended = Event(event=EventKind.LAUNCH_ENDED, time=2.0, epoch=2)
    assert publish_before(run, started, ended) == [15]


def test_without_a_rule_nothing_is_known_of_what_is_left(run: RunLayout) -> None:
    left(run, 1, 5, "weights", "sign")
    text = run.train_config.read_text().replace('"files":["sign"]', '"files":[]')
    run.train_config.write_text(text)
    assert publish_before(run) == []
