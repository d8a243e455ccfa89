"""How a rank ends that fails before its first step, and what finding that out costs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from file_system_calls import FileSystemCalls

from hpctrain.records.exit_records import read_exit_records, write_exit_record
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import ExitRecord, Outcome, TrainerExit
from hpctrain.train.entry import Ending
from hpctrain.train.rank_environment import Launch
from hpctrain.train.stop import StopSignals


def launch_of(rank: int) -> Launch:
    return Launch(rank, 512, rank % 8, f"n{rank // 8}", 1, "", node_rank=rank // 8)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.create()
    layout.supervise_config.write_text("{}")
    return layout


def fail() -> Outcome:
    raise RuntimeError("connection closed by peer")


def leave_records(run: RunLayout, nodes: int) -> None:
    for rank in range(0, 8 * nodes, 8):
        record = ExitRecord(
            epoch=1, rank=rank, node=f"n{rank}", outcome="crash", step=0, exit_code=1, time=1.0
        )
        write_exit_record(run, rank // 8, record)


def test_others_yield_with_a_rank_that_was_stopped(run: RunLayout) -> None:
    stopped = StopSignals()
    stopped.remember(signal.SIGTERM)
    assert Ending(run, launch_of(9), stopped).of(fail) == TrainerExit.YIELDED
    assert Ending(run, launch_of(17), StopSignals()).of(fail) == TrainerExit.YIELDED
    assert {one.outcome for one in read_exit_records(run, 1)} == {"yielded"}


def test_a_rank_that_fails_by_itself_has_crashed(run: RunLayout) -> None:
    leave_records(run, 3)
    assert Ending(run, launch_of(9), StopSignals()).of(fail) == TrainerExit.CRASH
    assert not run.left_startup(1).exists()


def test_a_stop_between_steps_marks_nothing(run: RunLayout) -> None:
    ending = Ending(run, launch_of(0), StopSignals())
    ending.begin()
    assert ending.of(lambda: "yielded") == TrainerExit.YIELDED
    assert not run.left_startup(1).exists()


def test_what_a_failing_rank_asks_does_not_depend_on_the_number_of_nodes(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks fail at once: reading all records on each would cost ranks x nodes."""
    calls, counts = FileSystemCalls(monkeypatch), []
    for nodes in (2, 40):
        leave_records(run, nodes)
        with calls.counted(run.directory) as found:
            assert Ending(run, launch_of(9), StopSignals()).of(fail) == TrainerExit.CRASH
        counts.append(dict(found))
    assert counts[0] == counts[1]
    assert counts[0]["open"] > 0
