"""What a run's records know of its past, whatever became of its checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from old_runs import NOVEMBER_2026, unpack
from step_rows import trained_step

from hpctrain.base.formats import NewerFormatError
from hpctrain.records import step_times
from hpctrain.records.known_steps import fresh_start_pending, known_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import (
    Progress,
    SaveRecord,
    StepMetrics,
    append_metrics,
    append_save,
    read_metrics,
    write_record,
)
from hpctrain.records.step_times import StepTime, read_step_times


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


# -- The quick reader of step times reads what the reader of all metrics reads -------------------


ROW = StepMetrics(
    step=3, epoch=2, time=1.5e9, loss=2.0, loss_hex="0x1p+1", grad_norm=None, learning_rate=1e-9,
    step_seconds=0.5, tokens_per_second=4096.0, mfu=None, memory_bytes=5, consumed_samples=6,
)  # fmt: skip


def rows_of(layout: RunLayout) -> list[StepTime]:
    return [
        StepTime(row.step, row.epoch, row.time, row.step_seconds,
                 round(row.step_seconds * row.tokens_per_second))
        for row in read_metrics(layout)
    ]  # fmt: skip


def test_an_old_run(tmp_path: Path) -> None:
    layout = unpack(NOVEMBER_2026, tmp_path).layout
    rows = read_step_times(layout)
    assert rows == rows_of(layout) and len(rows) > 200


def test_what_is_written_is_read_without_a_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would still be right, and no longer fast."""
    layout = RunLayout(tmp_path)
    append_metrics(layout, ROW)
    append_metrics(layout, ROW.model_copy(update={"loss": None, "eval_loss": 1e-7, "mfu": 0.4}))
    monkeypatch.setattr(step_times, "parse_record", None)
    assert read_step_times(layout) == [StepTime(3, 2, 1.5e9, 0.5, 2048)] * 2


GOOD = ROW.model_dump(exclude={"schema_version"})


LINES = (
    json.dumps(GOOD),  # blanks between
    json.dumps(GOOD, separators=(",", ":")),
    json.dumps(dict(reversed(GOOD.items())), separators=(",", ":")),
    json.dumps({**GOOD, "later": 1}, separators=(",", ":")),
    json.dumps({**GOOD, "step": 3.5}, separators=(",", ":")),
    json.dumps({**GOOD, "step": "3"}, separators=(",", ":")),
    json.dumps({**GOOD, "step": True}, separators=(",", ":")),
    json.dumps({**GOOD, "time": float("nan")}, separators=(",", ":")),
    json.dumps({**GOOD, "step_seconds": -1}, separators=(",", ":")),
    json.dumps({**GOOD, "loss_hex": 'a"b\\'}, separators=(",", ":")),
    json.dumps({**GOOD, "loss_hex": "\u00e9"}, separators=(",", ":"), ensure_ascii=False),
    json.dumps({**GOOD, "memory_bytes": 1.0}, separators=(",", ":")),
    json.dumps(GOOD, separators=(",", ":"))[:-5],
    json.dumps(GOOD, separators=(",", ":"))[5:],
    json.dumps(GOOD, separators=(",", ":")) * 2,
    json.dumps(GOOD, separators=(",", ":")).replace('"step":3', '"step":03'),
    json.dumps(GOOD, separators=(",", ":")).replace("0.5", ".5"),
    json.dumps(GOOD, separators=(",", ":")).replace("0.5", "1e400"),
    json.dumps({"step": 1, "epoch": 1, "time": 1.0, "eval_loss": 1.0, "eval_accuracy": None}),
    "",
    "null",
)


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_a_step_for_both_readers_or_for_none(tmp_path: Path, line: str) -> None:
    layout = RunLayout(tmp_path)
    layout.metrics.write_text(f"{line}\n{json.dumps(GOOD)}\n")
    quick = [(row.step, row.epoch, row.step_seconds) for row in read_step_times(layout)]
    assert quick == [(row.step, row.epoch, row.step_seconds) for row in read_metrics(layout)]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.metrics.write_text(json.dumps({**GOOD, "schema_version": 2, "step": None}) + "\n")
    with pytest.raises(NewerFormatError):
        read_step_times(layout)


def test_damaged_numbers_are_no_tokens(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    append_metrics(layout, ROW.model_copy(update={"step_seconds": 1e12, "tokens_per_second": 1e9}))
    append_metrics(layout, ROW.model_copy(update={"step_seconds": -2.0}))
    assert [row.tokens for row in read_step_times(layout)] == [0, 0]
    assert read_step_times(RunLayout(tmp_path / "none")) == []
