"""Files that are whole or absent, with real processes and real system calls."""

from __future__ import annotations

import multiprocessing
import os
import stat
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from hpctrain.base.durable import append_line, create_exclusive, replace_text

# A barrier that one process never reaches breaks after its time-out, so no test can hang.
FORK = multiprocessing.get_context("fork")


def replace_many(path: Path, letter: str, rounds: int, start: Barrier) -> None:
    start.wait(300)
    for _ in range(rounds):
        replace_text(path, letter * 100_000, durable=False)


def test_a_reader_sees_one_whole_content_while_two_processes_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "a" * 100_000)
    start = FORK.Barrier(3)
    writers = [
        FORK.Process(target=replace_many, args=(path, letter, 150, start)) for letter in "ab"
    ]
    for writer in writers:
        writer.start()
    start.wait(300)
    seen = {path.read_text()}
    while any(writer.is_alive() for writer in writers):
        seen.add(path.read_text())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {"a" * 100_000, "b" * 100_000}
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_failed_replacement_keeps_the_old_content_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "taken"
    directory.mkdir()
    with pytest.raises(OSError):
        replace_text(directory, "a directory cannot be replaced by a file")
    assert os.listdir(tmp_path) == ["taken"]
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "absent" / "file", "text")
    path = tmp_path / "file"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\ud800")
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_mode_bits_are_those_asked_for(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o022)
    try:
        replace_text(tmp_path / "replaced", "x", mode=mode)
        append_line(tmp_path / "appended", "x", mode=mode)
        create_exclusive(tmp_path / "created", "x", mode=mode)
    finally:
        os.umask(before)
    for name in ("replaced", "appended", "created"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode, name


def test_replacing_a_private_file_does_not_open_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    replace_text(path, "old", mode=0o644)
    replace_text(path, "new", mode=0o600)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_a_torn_last_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_line(path, '{"event": 1}')
    with path.open("a") as stream:
        stream.write('{"event": 2, "te')  # the writer died here
    append_line(path, '{"event": 3}')
    append_line(path, '{"event": 4}')
    assert path.read_text().splitlines() == [
        '{"event": 1}', '{"event": 2, "te', '{"event": 3}', '{"event": 4}'
    ]  # fmt: skip


def append_many(path: Path, name: int, start: Barrier) -> None:
    start.wait(300)
    for number in range(300):
        append_line(path, f"{name}:{number}:" + "x" * 200, durable=False)


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start = FORK.Barrier(2)
    writers = [FORK.Process(target=append_many, args=(path, name, start)) for name in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(600)
    assert [writer.exitcode for writer in writers] == [0, 0]
    lines = path.read_text().splitlines()
    expected = {f"{name}:{number}:" + "x" * 200 for name in range(2) for number in range(300)}
    assert set(filter(None, lines)) == expected
    assert len([line for line in lines if line]) == 600


def create_many(directory: Path, name: str, start: Barrier) -> None:
    for number in range(60):
        start.wait(300)
        created = create_exclusive(directory / f"{number}", f"{name} won {number}")
        if created:
            (directory / f"{number}.{name}").touch()


def test_of_two_processes_exactly_one_creates_the_file(tmp_path: Path) -> None:
    start = FORK.Barrier(2)
    racers = [FORK.Process(target=create_many, args=(tmp_path, name, start)) for name in "ab"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(600)
    assert [racer.exitcode for racer in racers] == [0, 0]
    for number in range(60):
        winners = [name for name in "ab" if (tmp_path / f"{number}.{name}").exists()]
        assert len(winners) == 1, number
        assert (tmp_path / str(number)).read_text() == f"{winners[0]} won {number}"
    assert len(os.listdir(tmp_path)) == 120  # no temporary files


def test_exclusive_creation_never_changes_what_is_there(tmp_path: Path) -> None:
    assert create_exclusive(tmp_path / "epoch", "first")
    assert not create_exclusive(tmp_path / "epoch", "second")
    assert (tmp_path / "epoch").read_text() == "first"
    assert os.listdir(tmp_path) == ["epoch"]
