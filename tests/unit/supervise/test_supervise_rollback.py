"""Which samples are left out after going back."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_rows import trained_step
from trainer_documents import train_json

from hpctrain.base.errors import StorageError
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import SkipList, append_metrics, read_record
from hpctrain.supervise.act.execute import skip_batches

BATCH = 8


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    layout.train_config.write_text(train_json(global_batch_size=BATCH))
    for step in range(1, 40):
        add_row(layout, step, step * BATCH)
    return layout


def add_row(run: RunLayout, step: int, consumed: int) -> None:
    append_metrics(run, trained_step(step, consumed_samples=consumed))


def skips(run: RunLayout) -> list[tuple[int, int]]:
    found = read_record(run.skips, SkipList)
    return [(one.from_samples, one.to_samples) for one in found.skips] if found else []


@pytest.mark.parametrize(
    ("step", "count", "expected"),
    [
        (33, 1, (32 * BATCH, 33 * BATCH)),
        (33, 3, (30 * BATCH, 33 * BATCH)),
        (1, 1, (0, BATCH)),
        (2, 5, (0, 5 * BATCH)),
    ],
)
def test_the_batches_up_to_the_anomaly(
    run: RunLayout, step: int, count: int, expected: tuple[int, int]
) -> None:
    skipped = skip_batches(run, step, count, "loss is NaN")
    assert skipped is not None and skipped.reason == "loss is NaN"
    assert skips(run) == [expected]


def test_skips_add_up_and_the_newest_row_counts(run: RunLayout) -> None:
    skip_batches(run, 33, 1, "first")
    for step in (30, 31, 32):  # the same steps again, after going back
        add_row(run, step, step * BATCH + BATCH)
    skip_batches(run, 33, 1, "second")
    assert skips(run) == [(32 * BATCH, 33 * BATCH), (33 * BATCH, 34 * BATCH)]


@pytest.mark.parametrize("damage", ["no row", "no train.json", "bad train.json", "zero"])
def test_without_knowing_which_samples_nothing_is_left_out(run: RunLayout, damage: str) -> None:
    if damage == "no train.json":
        run.train_config.unlink()
    if damage == "bad train.json":
        run.train_config.write_text("{}")
    step = 99 if damage == "no row" else 33
    assert skip_batches(run, step, 0 if damage == "zero" else 1, "x") is None
    assert skips(run) == []


@pytest.mark.parametrize("content", ["", "[1]", '{"schema_version": 99, "skips": []}'])
def test_a_list_that_cannot_be_read_is_never_overwritten(run: RunLayout, content: str) -> None:
    run.skips.write_text(content)
    with pytest.raises(StorageError, match=r"skips\.json"):
        skip_batches(run, 33, 1, "loss is NaN")
    assert run.skips.read_text() == content
