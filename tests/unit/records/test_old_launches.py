"""Packing what old launches have left: which files, when, and that nothing gets lost."""

from __future__ import annotations

import os
import random
import tarfile
import threading
from pathlib import Path

import pytest
from fabricated_runs import STARTED, SUBMITTED, fabricate, said

from hpctrain.records import old_launches
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.old_launches import (
    LOG_NAME,
    LabelledLines,
    exits_by_launch,
    lines_of_rank,
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


# -- Lines of ranks in the log of a node, as slurmstepd and agents write it ----------------------


# What slurmstepd 22.05.8 wrote of ranks that printed 1022 to 1025 and 2048 times the same letter.


LENGTHS = (1022, 1023, 1024, 1025, 2048)


def stepd(rank: int, line: bytes) -> bytes:
    """A line in pieces of at most 1024 bytes, of which its newline is one."""
    text = line + b"\n"
    pieces = [text[start : start + 1024] for start in range(0, len(text), 1024)]
    return b"".join(b"%d: %s\n" % (rank, piece.removesuffix(b"\n")) for piece in pieces)


def test_lines_that_slurm_has_cut_are_whole_again(tmp_path: Path) -> None:
    path = tmp_path / "step0-node0000.log"
    path.write_bytes(b"".join(stepd(rank, b"y" * n) for n in LENGTHS for rank in (3, 12)))
    assert [len(line) for line in lines_of_rank(path, 12)] == list(LENGTHS)
    assert {len(line) for line in path.read_bytes().splitlines()} > {len(b"12: ") + 1024}


def test_pieces_of_several_ranks_are_not_mixed() -> None:
    text = b"1: %s\n2: short\n1: rest\n2: last" % (b"x" * 1024)
    lines = LabelledLines()
    assert [*lines.feed(text), *lines.finish()] == [
        (2, b"short"),
        (1, b"x" * 1024 + b"rest"),
        (2, b"last"),
    ]


def test_text_arrives_in_any_portions() -> None:
    """A log is followed while it grows."""
    text = b"".join(stepd(rank, b"%d-%d" % (rank, n) * 300) for n in range(9) for rank in (0, 7))
    whole = [*LabelledLines().feed(text)]
    dice = random.Random(4)
    lines, found, start = LabelledLines(), [], 0
    while start < len(text):
        size = dice.randrange(1, 700)
        found += lines.feed(text[start : start + size])
        start += size
    assert [*found, *lines.finish()] == whole
    assert len(whole) == 18


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"12: text: more", (12, b"text: more")),
        (b"  7: right-justified", (7, b"right-justified")),
        (b"0: ", (0, b"")),
        (b"0:   indented", (0, b"  indented")),
        (b"of an agent", (None, b"of an agent")),
        (b"12:no label", (None, b"12:no label")),
        (b"2026-11-23 01:02: x", (None, b"2026-11-23 01:02: x")),
    ],
)
def test_what_a_label_is(line: bytes, found: tuple[int | None, bytes]) -> None:
    assert [*LabelledLines().feed(line + b"\n")] == [found]


def test_what_is_left_of_a_killed_rank_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"4: %s\n4: last words" % (b"x" * 1024))
    assert list(lines_of_rank(path, 4)) == [b"x" * 1024 + b"last words"]
    path.write_bytes(b"4: %s" % (b"x" * 1024))
    assert list(lines_of_rank(path, 4)) == [b"x" * 1024]


def test_names() -> None:
    for name, parts in {
        "step0-rank0003.log": ("0", "3", None),
        "step12-node0001.log": ("12", None, "1"),
    }.items():
        match = LOG_NAME.fullmatch(name)
        assert match is not None
        numbers = [value and str(int(value)) for value in match.group("step", "rank", "node")]
        assert tuple(numbers) == parts
    for name in ("step0-rank3.log.old", "slurm-4.out", "round0-rank0001.log"):
        assert LOG_NAME.fullmatch(name) is None
