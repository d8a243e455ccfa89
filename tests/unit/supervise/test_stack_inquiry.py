"""Stacks of real processes, and the files that they are in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from virtual_clock import VirtualClock

import hpctrain
from hpctrain.judge.odd_stacks import (
    NO_STACK,
    odd_ranks,
)
from hpctrain.records.layout import RunLayout
from hpctrain.supervise.evidence import stack_inquiry

Rank = subprocess.Popen[str]
Start = Callable[..., Rank]
EPOCH = 7


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    layout.train_config.touch()
    return layout


@pytest.fixture
def start(run: RunLayout) -> Iterator[Start]:
    started: list[Rank] = []
    program = str(Path(__file__).with_name("acting_rank.py"))

    def one(rank: int, place: str) -> Rank:
        argv = [sys.executable, program, str(run.directory), str(EPOCH), str(rank), f"n{rank}"]
        started.append(subprocess.Popen([*argv, place], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


def ready(*ranks: Rank) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"


def ask(
    run: RunLayout, ranks: list[Rank], timeout_seconds: float = 300.0, stopped: int | None = None
) -> stack_inquiry.StackDumps:
    before = stack_inquiry.sizes(run, EPOCH)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGQUIT)
    awaited = {rank: size for rank, size in before.items() if rank != stopped}
    stack_inquiry.wait_for_dumps(run, EPOCH, awaited, timeout_seconds)
    return stack_inquiry.read_dumps(run, EPOCH, before)


def test_real_ranks(run: RunLayout, start: Start) -> None:
    ranks = [start(r, p) for r, p in enumerate(["all_reduce", "load_batch", "all_reduce", "recv"])]
    ready(*ranks)
    os.kill(ranks[2].pid, signal.SIGSTOP)
    given = ask(run, ranks, stopped=2)
    assert given.complete
    assert given.nodes == {0: "n0", 1: "n1", 2: "n2", 3: "n3"}
    assert set(given.packages.values()) == {os.path.dirname(hpctrain.__file__)}
    found = odd_ranks(given.texts, given.nodes, 4, given.packages)
    assert [(o.rank, o.node) for o in found] == [(1, "n1"), (2, "n2")]
    assert found[0].where.startswith("load_batch (supervise/acting_rank.py:")
    assert " < one_step (supervise/acting_rank.py:" in found[0].where
    assert found[1].where == NO_STACK


def test_waiting_ends_when_all_have_written(run: RunLayout, start: Start) -> None:
    ranks = [start(rank, "recv") for rank in range(2)]
    ready(*ranks)
    started = time.monotonic()
    assert all(ask(run, ranks, timeout_seconds=600.0).texts.values())
    assert time.monotonic() - started < 300


def test_waiting_ends_when_the_time_is_up(run: RunLayout, virtual_clock: VirtualClock) -> None:
    write(run, 0, "header\n")
    assert ask(run, [], timeout_seconds=20.0).texts == {0: ""}
    assert 20 <= virtual_clock.passed_seconds < 21


def test_waiting_goes_on_while_something_is_written(
    run: RunLayout, virtual_clock: VirtualClock
) -> None:
    path = write(run, 0, "header\n")

    def line() -> None:
        with path.open("a") as stream:
            stream.write("  File\n")

    for number in range(30):
        virtual_clock.at(0.05 * number, line)
    before = stack_inquiry.sizes(run, EPOCH)
    stack_inquiry.wait_for_dumps(run, EPOCH, before, 10.0)
    assert virtual_clock.passed_seconds < 5.0, "and ends soon after"
    assert stack_inquiry.read_dumps(run, EPOCH, before).texts[0].count("File") == 30


def test_a_second_dump_is_read_without_the_first(run: RunLayout, start: Start) -> None:
    ranks = [start(0, "recv")]
    ready(*ranks)
    first = ask(run, ranks).texts[0]
    second = ask(run, ranks).texts[0]
    assert first.count("Current thread") == second.count("Current thread") == 1
    assert "recv" in second


# -- files -----------------------------------------------------------------------------------


def write(run: RunLayout, rank: int, text: str, epoch: int = EPOCH) -> Path:
    path = run.stack_dump(epoch, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_no_files(run: RunLayout) -> None:
    assert stack_inquiry.sizes(run, EPOCH) == {}
    assert stack_inquiry.read_dumps(run, EPOCH, {}) == stack_inquiry.StackDumps(
        {}, {}, complete=True
    )


def test_other_files_are_kept_and_not_read(run: RunLayout) -> None:
    path = write(run, 3, "rank=3 node=n1 pid=4 epoch=7\nstack")
    (path.parent / "nccl-rank-3").write_bytes(b"\x80")
    (path.parent / "rank-000004.txt.tmp").write_text("x")
    given = stack_inquiry.read_dumps(run, EPOCH, {})
    assert set(given.texts) == {3}
    assert given.nodes == {3: "n1"}
    assert (path.parent / "nccl-rank-3").exists()


def test_a_file_that_cannot_be_read_is_not_a_silent_rank(run: RunLayout) -> None:
    write(run, 0, "rank=0 node=n0 pid=4 epoch=7\n")
    run.stack_dump(EPOCH, 1).mkdir()
    given = stack_inquiry.read_dumps(run, EPOCH, {0: 29})
    assert (given.texts, given.complete) == ({0: ""}, False)


def test_reading_is_bounded_in_size_and_time(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_inquiry, "_LONGEST_DUMP_BYTES", 1000)
    for rank in range(3):
        write(run, rank, "no header" + "x" * 5000)
    given = stack_inquiry.read_dumps(run, EPOCH, {})
    assert [len(text) for text in given.texts.values()] == [1000] * 3
    assert given.nodes == {}
    monkeypatch.setattr(stack_inquiry, "_READING_DUMPS_SECONDS", 0.0)
    given = stack_inquiry.read_dumps(run, EPOCH, {})
    assert (set(given.texts), given.complete) == ({0}, False)


def test_stacks_of_the_last_epochs_are_kept(run: RunLayout) -> None:
    for epoch in range(1, 8):
        write(run, 0, "x", epoch)
    (run.stacks / "notes").mkdir()
    stack_inquiry.forget_old_dumps(run, 7)
    assert sorted(p.name for p in run.stacks.iterdir()) == [
        *("e000004", "e000005", "e000006", "e000007", "notes")
    ]


def test_the_directory_of_the_package_is_recorded(run: RunLayout) -> None:
    first = "rank=3 node=n1 pid=4 epoch=7"
    write(run, 0, f"{first}\nstack")
    write(run, 1, f"{first} package=/ann/a b/hpctrain\nstack")
    given = stack_inquiry.read_dumps(run, EPOCH, {})
    assert given.packages == {1: "/ann/a b/hpctrain"}
    assert given.nodes == {0: "n1", 1: "n1"}
