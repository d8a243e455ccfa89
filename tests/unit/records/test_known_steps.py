"""What a run's records know of its past, whatever became of its checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from step_rows import trained_step

from hpctrain.records.known_steps import fresh_start_pending, known_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import (
    Progress,
    SaveRecord,
    append_metrics,
    append_save,
    write_record,
)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    return layout


def saved(run: RunLayout, step: int, epoch: int = 1) -> None:
    record = SaveRecord(
        step=step, epoch=epoch, time=1.0, stall_seconds=0, publish_seconds=0, size_bytes=1
    )
    append_save(run, record)


def trained(run: RunLayout, step: int, epoch: int = 1) -> None:
    append_metrics(run, trained_step(step, epoch=epoch, time=1.0))


def progressed(run: RunLayout, checkpoint_step: int, epoch: int = 1) -> None:
    progress = Progress(
        epoch=epoch, phase="training", step=9, target_step=90, time=time.time(),
        checkpoint_step=checkpoint_step,
    )  # fmt: skip
    write_record(run.progress, progress)


def ledger_of(run: RunLayout, *events: tuple[EventKind, dict[str, Any]]) -> Ledger:
    ledger = Ledger(run.ledger)
    for kind, fields in events:
        ledger.append(kind, **fields)
    return ledger


def test_a_new_run_knows_nothing(run: RunLayout) -> None:
    known = known_steps(run, [])
    assert (known.saved, known.trained) == ({}, 0)
    started = ledger_of(run, (EventKind.RESUME, {"resume_step": 0}))
    assert known_steps(run, started.events()).saved == {}


def test_steps_without_a_checkpoint_are_no_loss_of_one(run: RunLayout) -> None:
    trained(run, 7)
    known = known_steps(run, [])
    assert (known.saved, known.trained) == ({}, 7)


def test_each_record_alone_is_enough(run: RunLayout) -> None:
    saved(run, 20)
    assert known_steps(run, []).saved == {"saves.jsonl": 20}
    run.saves.unlink()
    progressed(run, 15)
    assert known_steps(run, []).saved == {"progress.json": 15}
    run.progress.unlink()
    for kind, field in (
        (EventKind.LAUNCH_ENDED, "checkpoint_step"),
        (EventKind.LAUNCH_STARTED, "resume_step"),
        (EventKind.RESUME, "resume_step"),
        (EventKind.CHECKPOINT_REJECTED, "checkpoint_step"),
    ):
        run.ledger.unlink(missing_ok=True)
        events = ledger_of(run, (kind, {field: 10})).events()
        known = known_steps(run, events)
        assert known.saved == {"ledger.jsonl": 10}, kind
        assert known.sources == "step 10 (ledger.jsonl)"


def test_what_a_person_has_given_up_does_not_count(run: RunLayout) -> None:
    saved(run, 20, epoch=3)
    trained(run, 21, epoch=3)
    progressed(run, 20, epoch=3)
    ledger = ledger_of(
        run,
        (EventKind.LAUNCH_ENDED, {"checkpoint_step": 20, "epoch": 3}),
        (EventKind.FRESH_START_ACCEPTED, {"epoch": 3, "user": "ada"}),
    )
    assert fresh_start_pending(ledger.events())
    known = known_steps(run, ledger.events())
    assert (known.saved, known.trained) == ({}, 0)
    ledger.append(EventKind.LAUNCH_STARTED, epoch=4, resume_step=0)
    assert not fresh_start_pending(ledger.events())
    assert known_steps(run, ledger.events()).saved == {}
    saved(run, 5, epoch=4)
    progressed(run, 5, epoch=4)
    ledger.append(EventKind.LAUNCH_ENDED, epoch=4, checkpoint_step=5)
    known = known_steps(run, ledger.events())
    assert set(known.saved.values()) == {5} and len(known.saved) == 3
