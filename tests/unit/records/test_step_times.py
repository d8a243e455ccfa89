"""The quick reader of step times reads what the reader of all metrics reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from old_runs import NOVEMBER_2026, unpack

from hpctrain.base.formats import NewerFormatError
from hpctrain.records import step_times
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import StepMetrics, append_metrics, read_metrics
from hpctrain.records.step_times import StepTime, read_step_times

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
