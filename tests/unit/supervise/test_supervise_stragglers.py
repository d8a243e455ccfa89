"""Slow ranks: windows in a row, peers of one stage, and when to be silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_documents import train_json

from hpctrain.judge.slow_nodes import Stragglers, one_stage, slowness
from hpctrain.records.run_records import RankTimes
from hpctrain.supervise.evidence.launch_watch import read_pipeline_stages

NODES = ("n0", "n0", "n1", "n1")


class Windows:
    """Windows of four ranks, twenty steps each."""

    def __init__(self, limit_factor: float = 1.2) -> None:
        self.stragglers = Stragglers(limit_factor)
        self.last_step = 0
        self.epoch = 1
        self.nodes = NODES

    def times(self, *seconds: float) -> RankTimes:
        return RankTimes(
            epoch=self.epoch,
            first_step=self.last_step - 19,
            last_step=self.last_step,
            time=0.0,
            compute_seconds=seconds,
            nodes=self.nodes,
        )

    def pass_by(self, *seconds: float) -> list[tuple[int, str]]:
        self.last_step += 20
        found = self.stragglers.window(self.times(*seconds), one_stage)
        return [(slow.rank, slow.node) for slow in found]


def test_the_third_slow_window_is_reported_and_only_that() -> None:
    windows = Windows()
    slow = (1.0, 1.0, 1.0, 1.5)
    assert [windows.pass_by(*slow) for _ in range(5)] == [[], [], [(3, "n1")], [], []]
    current = windows.stragglers.current
    assert [(s.rank, s.node, s.factor) for s in current] == [(3, "n1", 1.5)]


def test_a_window_in_between_begins_the_count_anew() -> None:
    windows = Windows()
    for seconds in (1.5, 1.5, 1.0, 1.5, 1.5):
        assert windows.pass_by(1.0, 1.0, 1.0, seconds) == []
    assert windows.pass_by(1.0, 1.0, 1.0, 1.5) == [(3, "n1")]


def test_the_limit_itself_is_not_slow() -> None:
    windows = Windows(1.25)
    assert [windows.pass_by(1.0, 1.0, 1.0, 1.25) for _ in range(3)] == [[], [], []]


def test_one_that_recovers_is_cleared_and_not_reported_again() -> None:
    windows = Windows()
    for _ in range(3):
        windows.pass_by(1.0, 1.0, 1.0, 1.5)
    windows.pass_by(1.0, 1.0, 1.0, 1.0)
    assert windows.stragglers.current == ()
    assert [windows.pass_by(1.0, 1.0, 1.0, 1.5) for _ in range(3)] == [[], [], []]
    assert [s.rank for s in windows.stragglers.current] == [3]


def test_a_new_launch_counts_anew_and_another_node_is_another_matter() -> None:
    windows = Windows()
    for _ in range(3):
        windows.pass_by(1.0, 1.0, 1.0, 1.5)
    windows.stragglers.launched()
    assert windows.stragglers.current == ()
    windows.epoch, windows.last_step, windows.nodes = 2, 0, ("n0", "n0", "n2", "n2")
    assert [windows.pass_by(1.0, 1.0, 1.0, 1.5) for _ in range(3)] == [[], [], [(3, "n2")]]


def test_one_window_seen_again_counts_once() -> None:
    windows = Windows()
    windows.last_step = 20
    slow = windows.times(1.0, 1.0, 1.0, 1.5)
    assert [windows.stragglers.window(slow, one_stage) for _ in range(4)] == [()] * 4
    assert windows.stragglers.current == ()


def test_ranks_of_one_slow_node_are_both_named() -> None:
    windows = Windows()
    windows.nodes = ("n0", "n0", "n1", "n1")
    found = [windows.pass_by(1.0, 1.0, 1.6, 1.5) for _ in range(3)]
    assert found[-1] == [(2, "n1"), (3, "n1")]


def test_without_nodes() -> None:
    windows = Windows()
    windows.nodes = ()
    assert [windows.pass_by(1.0, 1.0, 1.0, 2.0) for _ in range(3)][-1] == [(3, "")]


@pytest.mark.parametrize(
    ("seconds", "stage_size", "expected"),
    [
        ((1.0, 2.0), 2, [1.0, 2.0]),
        ((1.0, 1.0, 1.0, 4.0), 4, [1.0, 1.0, 1.0, 4.0]),
        # The last stage has the loss: twice the work is not slow.
        ((1.0, 1.0, 2.0, 2.0), 2, [1.0, 1.0, 1.0, 1.0]),
        ((1.0, 1.0, 2.0, 3.0), 2, [1.0, 1.0, 1.0, 1.5]),
        ((1.0, 5.0), 1, [1.0, 1.0]),
        ((0.0, 0.0, 1.0), 3, [1.0, 1.0, 1.0]),
        ((), 1, []),
    ],
)
def test_slowness(seconds: tuple[float, ...], stage_size: int, expected: list[float]) -> None:
    assert slowness(seconds, lambda rank: rank // stage_size) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, [0, 0, 0, 0, 1, 1, 1, 1]),
        ("tp-cp-ep-dp-pp", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("tp-cp-ep-pp-dp", [0, 0, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_stages_of_a_layout(tmp_path: Path, order: str | None, expected: list[int]) -> None:
    """tp 2, pp 2, dp 2; see the tests of `plan.placement` for the same order of ranks."""
    sizes = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2)
    path = tmp_path / "train.json"
    path.write_text(train_json(**sizes, **({} if order is None else {"parallel_order": order})))
    stage_of = read_pipeline_stages(path)
    assert [stage_of(rank) for rank in range(8)] == expected


def test_stages_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    expected = {"tp-cp-ep-dp-pp": [0, 0, 1, 1], "tp-cp-ep-pp-dp": [0, 1, 0, 1]}
    for order, stages in expected.items():
        config = dict(pipeline_stages=[2, 1], data_parallel_size=2, parallel_order=order)
        path.write_text(train_json("deepspeed", **config))
        assert [read_pipeline_stages(path)(rank) for rank in range(4)] == stages
        path.write_text(train_json("deepspeed", **config, tensor_parallel=2))
        pairs = [stage for stage in stages for _ in range(2)]
        assert [read_pipeline_stages(path)(rank) for rank in range(8)] == pairs
    path.write_text(train_json("deepspeed", data_parallel_size=4))
    assert [read_pipeline_stages(path)(rank) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"pipeline_model_parallel_size": null}', "\x00", None]
)
def test_a_layout_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "train.json"
    if text is not None:
        path.write_text(text)
    assert [read_pipeline_stages(path)(rank) for rank in range(4)] == [0, 0, 0, 0]
