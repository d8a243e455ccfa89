"""Packing what old launches have left: which files, when, and that nothing gets lost."""

from __future__ import annotations

import os
import tarfile
import threading
from pathlib import Path

import pytest
from fabricated_runs import STARTED, SUBMITTED, fabricate, said

from hpctrain.records import old_launches
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.old_launches import (
    exits_by_launch,
    log_archives,
    logs_by_launch,
    pack_old_launches,
    start_packing,
)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """Eight launches of two nodes each, in three attempts of two jobs."""
    second = said(EventKind.ATTEMPT_STARTED, job_id=9, restart_count=0, nodes="n[0-1]")
    layout = fabricate(tmp_path, entries=[*SUBMITTED, second, STARTED]).layout
    launches = [("9.0", 0), ("9.0", 2), ("1.0", 0), ("1.0", 1), ("1.0", 10), ("1.1", 0)]
    launches += [("1.1", 1), ("1.2", 0)]
    for epoch, (attempt, step) in enumerate(launches, start=1):
        logs = layout.logs / attempt
        logs.mkdir(exist_ok=True)
        exits = layout.exits_of(epoch)
        exits.mkdir()
        for node in (0, 1):
            text = f"{attempt} {step} {node}\n"
            (logs / f"step{step}-node{node:04d}.log").write_text(text)
            (exits / f"node-{node:06d}.jsonl").write_text(text)
    (layout.logs / "slurm-1.out").write_text("of the job\n")
    return layout


def contents(run: RunLayout) -> dict[str, str]:
    """Everything in logs and exits but archives."""
    paths = [path for part in (run.logs, run.exits) for path in part.rglob("*") if path.is_file()]
    loose = [path for path in paths if "archive-e" not in path.name]
    return {str(path.relative_to(run.directory)): path.read_text() for path in loose}


def test_launches_in_their_order(run: RunLayout) -> None:
    """Jobs by their start, which is not the order of their ids; steps by number."""
    names = [(launch[0].parent.name, launch[0].name) for launch in logs_by_launch(run)]
    assert [f"{attempt} {name.partition('-')[0]}" for attempt, name in names] == [
        *("9.0 step0", "9.0 step2", "1.0 step0", "1.0 step1"),
        *("1.0 step10", "1.1 step0", "1.1 step1", "1.2 step0"),
    ]
    assert [launch[0].parent.name for launch in exits_by_launch(run)][::7] == ["e000001", "e000008"]


def test_nothing_is_packed_before_twice_as_many_are_there(run: RunLayout) -> None:
    before = contents(run)
    assert pack_old_launches(run, 4, 9) is None
    assert pack_old_launches(run, 0, 9) is None, "a run of an earlier version keeps everything"
    assert contents(run) == before and log_archives(run) == []


def test_old_launches_become_one_file_that_brings_them_back(run: RunLayout) -> None:
    before = contents(run)
    packed = pack_old_launches(run, 3, 9)
    assert packed is not None and packed.archive == run.log_archive(9)
    assert packed.files == 2 * 5 * 2, "logs and exit records of five launches on two nodes"
    after = contents(run)
    assert len(after) == 2 * 3 * 2 + 1
    assert {name.split("/")[1] for name in after if name.startswith("exits")} == {
        *("e000006", "e000007", "e000008")
    }
    assert after["logs/slurm-1.out"] == "of the job\n"
    kept = [path.name for path in run.exits.iterdir()]
    assert len(kept) == 3, "no empty directories stay"
    assert (run.logs / "9.0").is_dir(), "but those of attempts, which are counted"
    with tarfile.open(packed.archive) as tar:
        tar.extractall(run.directory)
    assert contents(run) == before
    assert os.stat(packed.archive).st_mode & 0o077 == 0, "private like the run"


def test_a_log_that_grows_meanwhile_stays(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that does not end: what it writes after its log was packed must not be lost."""
    log = run.logs / "9.0" / "step0-node0000.log"
    real = old_launches.fsync_file

    def while_packing(path: Path) -> None:
        with log.open("a") as stream:
            stream.write("last words\n")
        real(path)

    monkeypatch.setattr(old_launches, "fsync_file", while_packing)
    assert pack_old_launches(run, 3, 9) is not None
    assert log.read_text().endswith("last words\n")
    assert not log.with_name("step0-node0001.log").exists()


def test_a_crash_while_packing_loses_nothing(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(run)

    def crash(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(old_launches, "fsync_file", crash)
        reports: list[str] = []
        start_packing(run, 3, 9, reports.append).join(60)
        assert reports == ["old logs could not be packed: [Errno 5] Input/output error"]
    assert contents(run) == before
    unfinished = run.logs / ".archive-e000009.tar.gz.tmp"
    assert unfinished.exists() and log_archives(run) == []
    reports.clear()
    start_packing(run, 3, 10, reports.append).join(60)
    assert reports == [
        "packed 20 logs and exit records of old launches into logs/archive-e000010.tar.gz"
    ]
    assert not unfinished.exists(), "the next launch removes it"


def test_only_one_thread_packs(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large logs may take longer than a launch."""
    go_on = threading.Event()
    monkeypatch.setattr(old_launches, "pack_old_launches", lambda *values: go_on.wait(60) and None)
    first = start_packing(run, 3, 9, print)
    assert start_packing(run, 3, 10, print) is first
    go_on.set()
    first.join(60)
    assert start_packing(run, 3, 11, print) is not first


def test_links_are_neither_packed_nor_followed(run: RunLayout, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step0-node0000.log").write_text("somebody's\n")
    (run.logs / "2.0").symlink_to(outside)
    (run.logs / "9.0" / "step1-node0000.log").symlink_to(outside / "step0-node0000.log")
    assert pack_old_launches(run, 3, 9) is not None
    assert (outside / "step0-node0000.log").read_text() == "somebody's\n"
    assert (run.logs / "9.0" / "step1-node0000.log").is_symlink()
