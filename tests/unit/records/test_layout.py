"""The run directory: private, complete, and never one that exists."""

from __future__ import annotations

import multiprocessing
import os
import stat
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from hpctrain.records.epochs import claim_epoch, current_epoch
from hpctrain.records.layout import Place, RunLayout


def test_a_new_run_directory_is_private(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        run = RunLayout(tmp_path / "gpt-1a2b")
        run.create()
    finally:
        os.umask(before)
    directories = [run.directory, *run.directory.iterdir()]
    assert len(directories) == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}


def test_an_existing_directory_is_not_taken_over(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "gpt-1a2b")
    run.create()
    run.ledger.write_text("somebody's history")
    with pytest.raises(FileExistsError):
        run.create()
    assert run.ledger.read_text() == "somebody's history"


def test_all_paths_are_inside_and_differ() -> None:
    run = RunLayout(Path("runs/gpt-1a2b"))
    names = [name for name, kind in vars(RunLayout).items() if isinstance(kind, property | Place)]
    found = [getattr(run, name) for name in names if name != "run_id"]
    paths = [path for path in found if isinstance(path, Path)]
    assert run.run_id == "gpt-1a2b"
    assert len(paths) >= 15
    assert len(set(paths)) == len(paths)
    assert all(run.directory in path.parents for path in paths)


def test_exit_records_of_launches_and_nodes_are_apart() -> None:
    run = RunLayout(Path("run"))
    records = {run.exit_records(epoch, node) for epoch in (1, 11) for node in (1, 11)}
    assert len(records) == 4
    assert run.exit_records(1, 3) == Path("run/exits/e000001/node-000003.jsonl")


# -- Who owns a run, with processes that race for it ---------------------------------------------


FORK = multiprocessing.get_context("fork")


def claim_many(
    directory: Path, name: str, start: Barrier, result: SimpleQueue[tuple[str, list[int]]]
) -> None:
    numbers = []
    for _ in range(40):
        start.wait(300)
        numbers.append(claim_epoch(directory, name))
    result.put((name, numbers))


def test_two_processes_never_get_the_same_epoch(tmp_path: Path) -> None:
    start = FORK.Barrier(2)
    result: SimpleQueue[tuple[str, list[int]]] = FORK.SimpleQueue()
    directory = tmp_path / "epochs"
    directory.mkdir()
    racers = [FORK.Process(target=claim_many, args=(directory, n, start, result)) for n in "ab"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(600)
    assert [racer.exitcode for racer in racers] == [0, 0]
    claimed = dict(result.get() for _ in racers)
    assert sorted(claimed["a"] + claimed["b"]) == list(range(1, 81))
    assert all(numbers == sorted(numbers) for numbers in claimed.values())
    owners = {int(path.stem): path.read_text() for path in directory.glob("*.json")}
    assert owners == {number: name for name, numbers in claimed.items() for number in numbers}
    assert len(os.listdir(directory)) == 80


def test_a_directory_that_is_away_says_nothing_and_is_not_made_anew(tmp_path: Path) -> None:
    """Counting from 1 again would give the run to a launch that has no right to it."""
    with pytest.raises(FileNotFoundError):
        current_epoch(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        claim_epoch(tmp_path / "absent", "somebody")
    assert list(tmp_path.iterdir()) == []


def test_the_highest_number_owns_whatever_lies_about(tmp_path: Path) -> None:
    directory = tmp_path / "epochs"
    directory.mkdir()
    assert current_epoch(directory) == 0
    assert claim_epoch(directory, "first") == 1
    (directory / "000007.json").write_text("somebody")
    (directory / ".000099.json.node.1.2.tmp").write_text("a writer that died")
    assert current_epoch(directory) == 7
    assert claim_epoch(directory, "second") == 8
    assert (directory / "000001.json").read_text() == "first"


def test_numbers_beyond_six_digits_count_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "999999.json").touch()
    assert claim_epoch(tmp_path, "x") == 1_000_000
    assert current_epoch(tmp_path) == 1_000_000
    assert claim_epoch(tmp_path, "x") == 1_000_001
