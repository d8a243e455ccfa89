"""What the trainer leaves behind, also when it was killed in the middle of a line."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import StorageError
from hpctrain.store.layout import RunLayout
from hpctrain.store.run_records import (
    AgentRecord,
    DoneMarker,
    ExitRecord,
    Progress,
    SaveRecord,
    StepMetrics,
    append_metrics,
    append_save,
    lineage,
    read_exit_records,
    read_metrics,
    read_record,
    read_saves,
    write_agent_record,
    write_exit_record,
    write_record,
)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.create()
    return layout


def metrics(step: int, loss: float = 2.5, **changes: Any) -> StepMetrics:
    fields: dict[str, Any] = dict(
        step=step,
        epoch=1,
        time=1.5,
        loss=loss,
        loss_hex=loss.hex(),
        grad_norm=0.5,
        learning_rate=1e-4,
        step_seconds=0.25,
        tokens_per_second=1024.0,
        mfu=None,
        memory_bytes=1 << 30,
        consumed_samples=8 * step,
    )
    return StepMetrics(**{**fields, **changes})


def exit_record(rank: int, epoch: int = 1) -> ExitRecord:
    return ExitRecord(
        epoch=epoch, rank=rank, node="n1", outcome="crash", step=4, exit_code=1, time=1.0
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_becomes_null_and_keeps_its_row(
    run: RunLayout, loss: float
) -> None:
    append_metrics(run, metrics(1, loss=loss, grad_norm=loss))
    raw = json.loads(run.metrics.read_text(), parse_constant=pytest.fail)  # strict JSON
    assert (raw["loss"], raw["grad_norm"]) == (None, None)
    (row,) = read_metrics(run)
    assert (row.step, row.loss, row.loss_hex) == (1, None, loss.hex())


@pytest.mark.parametrize("loss", [0.1 + 0.2, 1 / 3, 5e-324, 11.090354919433594])
def test_the_loss_comes_back_bit_for_bit(run: RunLayout, loss: float) -> None:
    append_metrics(run, metrics(1, loss=loss))
    (row,) = read_metrics(run)
    assert row.loss == loss
    assert float.fromhex(row.loss_hex) == loss


def test_a_torn_line_costs_only_itself(run: RunLayout) -> None:
    assert read_metrics(run) == []
    append_metrics(run, metrics(1))
    append_metrics(run, metrics(2))
    run.metrics.write_bytes(run.metrics.read_bytes()[:-30])  # killed in the middle of step 2
    append_metrics(run, metrics(2, loss=3.5))
    append_metrics(run, metrics(3))
    assert [(row.step, row.loss) for row in read_metrics(run)] == [(1, 2.5), (2, 3.5), (3, 2.5)]


def test_bytes_that_are_no_text_cost_only_their_line(run: RunLayout) -> None:
    append_metrics(run, metrics(1))
    with run.metrics.open("ab") as stream:
        stream.write(b"\xff\xfe\x00garbage\n[1]\nnull\n")
    append_metrics(run, metrics(2))
    assert [row.step for row in read_metrics(run)] == [1, 2]


def test_fields_of_a_newer_version_are_ignored(run: RunLayout) -> None:
    append_metrics(run, metrics(1))
    raw = {**json.loads(run.metrics.read_text()), "from_the_future": 1}
    run.metrics.write_text(json.dumps(raw) + "\n")
    assert read_metrics(run) == [metrics(1)]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"step": 1}', b"\xff"])
def test_what_cannot_be_read_is_unknown(run: RunLayout, content: bytes | None) -> None:
    if content is not None:
        run.progress.write_bytes(content)
    assert read_record(run.progress, Progress) is None


def test_a_record_comes_back_and_is_private(run: RunLayout) -> None:
    progress = Progress(epoch=2, phase="training", step=3, target_step=9, time=1.25, loss=math.nan)
    write_record(run.progress, progress)
    assert read_record(run.progress, Progress) == progress.model_copy(update={"loss": None})
    assert read_record(run.progress, DoneMarker) is None  # of another kind
    assert stat.S_IMODE(run.progress.stat().st_mode) == 0o600


def test_exit_records_are_in_rank_order_and_of_one_launch(run: RunLayout) -> None:
    assert read_exit_records(run, 1) == []
    run.train_config.touch()
    for rank in (11, 2, 0):
        write_exit_record(run, exit_record(rank))
    write_exit_record(run, exit_record(5, epoch=2))
    run.exit_record(1, 3).write_text('{"epoch": 1, "ra')
    assert [record.rank for record in read_exit_records(run, 1)] == [0, 2, 11]
    assert [record.rank for record in read_exit_records(run, 2)] == [5]


def test_nothing_is_made_anew_where_a_run_has_vanished(run: RunLayout) -> None:
    """A ghost at its path would keep the real directory from coming back, and hold records that
    nobody reads."""
    run.train_config.touch()
    run.directory.rename(run.directory.with_name("elsewhere"))
    agent = AgentRecord(epoch=1, node="n0", time=1.0, ended=())
    progress = Progress(epoch=1, phase="training", step=3, target_step=9, time=1.0)
    for write in (
        lambda: write_exit_record(run, exit_record(0)),
        lambda: write_agent_record(run, 0, agent),
        lambda: write_record(run.progress, progress),
        lambda: run.make_directory(run.stacks / "e000001"),
    ):
        with pytest.raises(OSError, match=r"away|No such file"):
            write()
    assert not run.directory.exists()
    run.directory.mkdir()  # an empty mount point is no run directory either
    with pytest.raises(StorageError, match=r"neither supervise\.json nor train\.json"):
        write_exit_record(run, exit_record(0))
    assert list(run.directory.iterdir()) == []


def test_records_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        metrics(1).step = 2  # type: ignore[misc]


def test_saves_come_back_in_their_order(run: RunLayout) -> None:
    assert read_saves(run) == []
    saves = [
        SaveRecord(
            step=step,
            epoch=1,
            time=2.0,
            stall_seconds=0.1,
            publish_seconds=3.0,
            size_bytes=1 << 40,
        )
        for step in (2, 4)
    ]
    append_save(run, saves[0])
    with run.saves.open("ab") as stream:
        stream.write(b'{"step": 3, "epo')  # killed in the middle
    append_save(run, saves[1])
    assert read_saves(run) == saves
    assert stat.S_IMODE(run.saves.stat().st_mode) == 0o600


def test_the_lineage_of_a_run() -> None:
    """Three launches: 1 to 6, back to 2 and on to 4, back to 3 and on to 4."""
    rows = [metrics(step, epoch=1) for step in range(1, 7)]
    rows += [metrics(step, epoch=2) for step in (3, 4)]
    rows += [metrics(step, epoch=3) for step in (4, 5)]
    kept = [(row.step, row.epoch) for row in lineage(rows)]
    assert kept == [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3)]
    assert [row.step for row in lineage(rows[:8])] == [1, 2, 3, 4], "5 and 6 are discarded"
    late = [*rows[:6], rows[6], metrics(7, epoch=1)]  # an orphan of launch 1 still writes
    assert [(row.step, row.epoch) for row in lineage(late)] == [(1, 1), (2, 1), (3, 2)]
    assert lineage([]) == []
