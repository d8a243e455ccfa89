"""`logs --errors` and `--tail`: what 512 ranks died of in a few lines, and only a log's end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, fabricate

from hpctrain.records.exit_records import write_exit_record
from hpctrain.records.find import RunFiles
from hpctrain.records.run_records import ExitRecord
from hpctrain.runs.log_errors import launch_errors
from hpctrain.runs.logs import LogPart, follow, texts

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size} MiB. GPU 3 has a total "
    "capacity of 79.15 GiB of which 1.2 GiB is free."
)
PEER = (
    "[rank{rank}]:[E713 12:00:0{rank}] [PG ID 0 PG GUID 0 Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={rank}, OpType=ALLREDUCE) ran for 600000 milliseconds "
    "before timing out."
)


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """64 nodes with 8 ranks each: rank 17 runs out of memory, and the others wait for it."""
    run = fabricate(tmp_path / "runs", entries=[*SUBMITTED, STARTED, LAUNCHED], steps=4)
    directory = run.layout.logs / "1.0"
    directory.mkdir()
    for node in range(64):
        lines = []
        for rank in range(8 * node, 8 * node + 8):
            text = OUT_OF_MEMORY.format(size=512) if rank == 17 else PEER.format(rank=rank)
            lines += [f"{rank}: step {step} loss 2.5\n" for step in range(3)] + [
                f"{rank}: {text}\n"
            ]
        (directory / f"step0-node{node:04d}.log").write_text("".join(lines))
    return run


def test_the_root_and_what_follows(run: RunFiles) -> None:
    found = launch_errors(run)
    assert found.epoch == 1 and not found.unread
    root, *following = found.errors
    assert (
        root.ranks == (17,) and root.line.startswith("torch.OutOfMemoryError") and not root.follows
    )
    assert all(error.follows for error in following)
    assert set().union(*(error.ranks for error in following)) == set(range(512)) - {17}
    told = hpctrain("logs", run.run_id, "--errors", "--runs", str(run.layout.directory.parent))
    assert told.exit_code == 0 and len(told.stdout.splitlines()) < 24, "512 ranks on one screen"
    assert "511 ranks (0-16,18-511)" in told.stdout and "rank 17" in told.stdout


def test_a_rank_that_only_recorded_its_end(run: RunFiles) -> None:
    for log in (run.layout.logs / "1.0").iterdir():
        log.write_text("")
    for rank in (3, 4):
        record = ExitRecord(
            epoch=1,
            rank=rank,
            node="n0",
            outcome="crash",
            step=4,
            exit_code=1,
            time=NOW,
            message=f"ValueError: expected {rank} but got 7",
        )
        write_exit_record(run.layout, 0, record)
    (error,) = launch_errors(run).errors
    assert error.ranks == (3, 4) and error.nodes == ("n0",) and "expected 3" in error.line


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
    ~~~~^^
{error}
"""


def test_a_rank_that_died_of_an_exception_and_recorded_nothing(run: RunFiles) -> None:
    """A user's own program, or one that died while it imported; torch labels its lines."""
    error = "my.ShardError: shard {rank} has no end"
    for node, log in enumerate(sorted((run.layout.logs / "1.0").iterdir())):
        text = TRACEBACK.format(error=error.format(rank=8 * node))
        lines = [f"{8 * node}: [rank{8 * node}]: {line}\n" for line in text.splitlines()]
        gone_on = [f"{8 * node + 1}: {line}\n" for line in text.splitlines()]
        gone_on += [f"{8 * node + 1}: step {step} loss 2.5\n" for step in range(50)]
        log.write_text("".join([*lines, *gone_on]) if node < 2 else "")
    well = ExitRecord(epoch=1, rank=8, node="n1", outcome="done", step=4, exit_code=0, time=NOW)
    write_exit_record(run.layout, 0, well)
    (found,) = launch_errors(run).errors
    assert found.ranks == (0,) and found.line == error.format(rank=0) and found.cause == "crash"


@pytest.mark.parametrize("end", ["done", "crash"])
def test_a_record_says_more_than_a_traceback(run: RunFiles, end: str) -> None:
    for log in (run.layout.logs / "1.0").iterdir():
        log.write_text("")
    text = TRACEBACK.format(error="my.ShardError: no end")
    (run.layout.logs / "1.0" / "step0-rank0003.log").write_text(text)
    crash = {"exit_code": 1, "message": "my.ShardError: of shard 7"} if end == "crash" else {}
    record = ExitRecord(
        **{"epoch": 1, "rank": 3, "node": "n0", "outcome": end, "step": 4, "exit_code": 0, **crash},
        time=NOW,
    )
    write_exit_record(run.layout, 0, record)
    assert [found.line for found in launch_errors(run).errors] == (
        ["my.ShardError: of shard 7"] if end == "crash" else []
    )


def test_options_that_make_no_sense(run: RunFiles) -> None:
    runs = ("--runs", str(run.layout.directory.parent))
    for wrong in (["--errors", "--rank", "0"], ["--errors", "-f"], ["--attempt", "1"]):
        assert hpctrain("logs", run.run_id, *wrong, *runs).exit_code == 2
    assert hpctrain("logs", run.run_id, "--errors", "--attempt", "2", *runs).exit_code == 2


def test_only_the_last_lines(tmp_path: Path) -> None:
    parts = []
    for number in range(3):
        path = tmp_path / f"{number}.out"
        path.write_text("".join(f"{number}-{line}\n" for line in range(4)))
        parts.append(LogPart(path))
    assert "".join(texts(parts)).count("\n") == 12
    assert "".join(texts(parts, 3)) == "2-1\n2-2\n2-3\n"
    assert "".join(texts(parts, 6)) == "1-2\n1-3\n2-0\n2-1\n2-2\n2-3\n"
    assert "".join(texts(parts, 100)).count("\n") == 12
    assert "".join(follow(lambda: parts[-1], lambda: True, 2)) == "2-2\n2-3\n"
