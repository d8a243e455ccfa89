"""What the trainer leaves behind, also when it was killed in the middle of a line."""

from __future__ import annotations

import json
import math
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from step_rows import trained_step

from hpctrain.base.errors import StorageError
from hpctrain.records.exit_records import (
    rank_0_has_exited,
    read_agent_records,
    read_exit_records,
    write_agent_record,
    write_exit_record,
)
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    AgentRecord,
    DoneMarker,
    EvaluationMetrics,
    ExitRecord,
    Progress,
    RankEnd,
    SaveRecord,
    StepMetrics,
    append_metrics,
    append_save,
    lineage,
    read_metrics,
    read_record,
    read_saves,
    write_record,
)
from hpctrain.records.step_times import read_step_times


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.create()
    return layout


def metrics(step: int, loss: float = 2.5, **changes: Any) -> StepMetrics:
    figures = dict(time=1.5, grad_norm=0.5, learning_rate=1e-4, step_seconds=0.25)
    figures |= dict(tokens_per_second=1024.0, memory_bytes=1 << 30)
    return trained_step(step, loss, **(figures | changes))


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
        write_exit_record(run, rank // 8, exit_record(rank))
    write_exit_record(run, 0, exit_record(5, epoch=2))
    assert [record.rank for record in read_exit_records(run, 1)] == [0, 2, 11]
    names = [path.name for path in sorted(run.exits.glob("e000001/*"))]
    assert names == ["node-000000.jsonl", "node-000001.jsonl"], "as many as nodes"
    assert [record.rank for record in read_exit_records(run, 2)] == [5]


def test_a_torn_exit_record_costs_only_itself(run: RunLayout) -> None:
    """A rank that is killed while it writes, and the next rank of its node."""
    run.train_config.touch()
    write_exit_record(run, 0, exit_record(0))
    path = run.exit_records(1, 0)
    with path.open("a") as stream:
        stream.write('{"epoch": 1, "rank": 1, "no')
    write_exit_record(run, 0, exit_record(2))
    assert [record.rank for record in read_exit_records(run, 1)] == [0, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_last_record_of_a_rank_counts(run: RunLayout) -> None:
    """A write that is repeated after an error may have succeeded the first time."""
    run.train_config.touch()
    for message in ("first", "second"):
        record = exit_record(3).model_copy(update={"message": message})
        write_exit_record(run, 0, record)
    assert [record.message for record in read_exit_records(run, 1)] == ["second"]


def test_records_of_ranks_and_agents_of_a_node_share_a_file(run: RunLayout) -> None:
    run.train_config.touch()
    assert read_agent_records(run, 1) == []
    late = AgentRecord(epoch=1, node="n1", time=3.0, ended=(RankEnd(rank=9, code=-9),))
    early = AgentRecord(epoch=1, node="n0", time=2.0, ended=())
    write_agent_record(run, 1, late)
    write_exit_record(run, 1, exit_record(8))
    write_agent_record(run, 0, early)
    assert read_agent_records(run, 1) == [early, late]
    assert read_exit_records(run, 1) == [exit_record(8)]
    assert len(list(run.exits.glob("e000001/*"))) == 2


def test_ranks_of_one_node_append_at_the_same_time(run: RunLayout) -> None:
    """Processes of one host: no line is lost or mixed with another, however long it is."""
    run.train_config.touch()
    program = (
        "import sys; from pathlib import Path\n"
        "from hpctrain.records.exit_records import write_exit_record\n"
        "from hpctrain.records.layout import RunLayout\n"
        "from hpctrain.records.run_records import ExitRecord\n"
        "rank = int(sys.argv[2])\n"
        "sys.stdin.readline()\n"
        "for step in range(20):\n"
        "    record = ExitRecord(epoch=step, rank=rank, node='n0', outcome='crash', step=step,\n"
        "        exit_code=1, time=1.0, traceback=str(rank) * 9000)\n"
        "    write_exit_record(RunLayout(Path(sys.argv[1])), 0, record)\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(run.directory), str(rank)], stdin=subprocess.PIPE
        )
        for rank in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    assert [writer.wait(300) for writer in writers] == [0] * 4
    for step in range(20):
        found = read_exit_records(run, step)
        assert [(one.rank, one.traceback) for one in found] == [
            (rank, str(rank) * 9000) for rank in range(4)
        ]


def test_records_of_hpctrain_0_1_are_read(run: RunLayout) -> None:
    """One document per rank, and one per agent; one that is incomplete is left out."""
    assert not rank_0_has_exited(run, 1)
    directory = run.exits / "e000001"
    directory.mkdir(parents=True)
    for rank in (11, 0):
        write_record(run.exit_record(1, rank), exit_record(rank))
    run.exit_record(1, 3).write_text('{"epoch": 1, "ra')
    agent = AgentRecord(epoch=1, node="n0", time=1.0, ended=())
    write_record(directory / "node-000000.json", agent)
    assert [record.rank for record in read_exit_records(run, 1)] == [0, 11]
    assert read_agent_records(run, 1) == [agent]
    assert rank_0_has_exited(run, 1)


def test_whether_rank_0_has_exited(run: RunLayout) -> None:
    run.train_config.touch()
    write_exit_record(run, 0, exit_record(1))
    assert not rank_0_has_exited(run, 1)
    write_exit_record(run, 0, exit_record(0))
    assert rank_0_has_exited(run, 1)
    assert not rank_0_has_exited(run, 2)


def test_nothing_is_made_anew_where_a_run_has_vanished(run: RunLayout) -> None:
    """A ghost at its path would keep the real directory from coming back, and hold records that
    nobody reads."""
    run.train_config.touch()
    run.directory.rename(run.directory.with_name("elsewhere"))
    agent = AgentRecord(epoch=1, node="n0", time=1.0, ended=())
    progress = Progress(epoch=1, phase="training", step=3, target_step=9, time=1.0)
    for write in (
        lambda: write_exit_record(run, 0, exit_record(0)),
        lambda: write_agent_record(run, 0, agent),
        lambda: write_record(run.progress, progress),
        lambda: run.make_directory(run.stacks / "e000001"),
    ):
        with pytest.raises(OSError, match=r"away|No such file"):
            write()
    assert not run.directory.exists()
    run.directory.mkdir()  # an empty mount point is no run directory either
    with pytest.raises(StorageError, match=r"neither supervise\.json nor train\.json"):
        write_exit_record(run, 0, exit_record(0))
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


# -- what a trainer that is no engine of ours reports -------------------------------------------


def reported(step: int, time: float, epoch: int = 1, **values: Any) -> StepMetrics:
    """A row in which only what is given was reported."""
    unknown = {name: None for name in StepMetrics.model_fields if name != "schema_version"}
    row = {**unknown, "profiled": False, "step": step, "time": time, "epoch": epoch}
    return StepMetrics.model_validate({**row, **values})


def test_what_was_not_reported_stays_unknown(run: RunLayout) -> None:
    append_metrics(run, reported(10, 100.0, loss=2.5, loss_hex=(2.5).hex()))
    raw = json.loads(run.metrics.read_text())
    assert {name for name, value in raw.items() if value is not None} == {
        *("step", "epoch", "time", "loss", "loss_hex", "profiled")
    }
    (row,) = read_metrics(run)
    assert (row.exact_loss, row.step_seconds, row.learning_rate) == (2.5, None, None)
    (times,) = read_step_times(run)
    assert times == (10, 1, 100.0, None, None)
    assert reported(1, 1.0).exact_loss is None


def test_seconds_of_a_step_are_those_between_two_reports(run: RunLayout) -> None:
    """The first report of a launch has none; what the trainer reports itself stays."""
    for row in (
        reported(10, 100.0),
        reported(20, 120.0),
        reported(30, 150.0, step_seconds=2.5),
        reported(40, 200.0, epoch=2),
        reported(50, 205.0, epoch=2),
    ):
        append_metrics(run, row)
    seconds = [None, 2.0, 2.5, None, 0.5]
    assert [row.step_seconds for row in read_metrics(run)] == seconds
    assert [row.step_seconds for row in read_step_times(run)] == seconds
    assert [row.time for row in read_metrics(run)] == [100.0, 120.0, 150.0, 200.0, 205.0]


def test_rows_that_were_read_at_once_are_spread_over_the_time_before(run: RunLayout) -> None:
    """As from a file that the trainer writes beside each checkpoint."""
    for step, time in ((10, 100.0), (20, 140.0), (30, 140.0), (50, 140.0)):
        append_metrics(run, reported(step, time))
    for rows in (read_metrics(run), read_step_times(run)):
        assert [row.time for row in rows] == [100.0, 110.0, 120.0, 140.0]
        assert [row.step_seconds for row in rows] == [None, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("later", [(10, 90.0), (20, 100.0), (9, 120.0)])
def test_a_clock_that_was_set_back_says_nothing(run: RunLayout, later: tuple[int, float]) -> None:
    append_metrics(run, reported(10, 100.0))
    append_metrics(run, reported(*later))
    assert [row.step_seconds for row in read_metrics(run)] == [None, None]


def test_an_evaluation_is_no_row_of_a_step(run: RunLayout) -> None:
    append_metrics(run, reported(10, 100.0))
    append_metrics(
        run, EvaluationMetrics(step=10, epoch=1, time=101.0, eval_loss=2.0, eval_accuracy=None)
    )
    (row,) = read_metrics(run)
    assert (row.eval_loss, row.loss) == (2.0, None)
