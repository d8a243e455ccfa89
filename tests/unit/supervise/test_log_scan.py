"""Reading the logs of a launch: which files, which lines, when written, and for how long."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from launch_evidence import BEGIN, NOTHING, SCANNER, End, Story

from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.probe_results import KernelLine, NodeResult, ProbeResult
from hpctrain.records.layout import RunLayout
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.gather import Traces, find_lines, newest_logged_step
from hpctrain.supervise.evidence.log_scan import (
    UNREAD,
    LaunchRanks,
    ScanLimits,
    line_time,
    newest_step,
    read_signatures,
)

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
STALE = "OSError: [Errno 116] Stale file handle"
TIMEOUT = (
    "[rank{rank}]:[E1121 05:33:37.5 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE)"
)
# 2026-11-21 05:33:37 here, wherever the test runs
AT = time.mktime((2026, 11, 21, 5, 33, 37, 0, 0, -1))
NEAR = AT + 1000


def log(directory: Path, step: int, rank: int, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"step{step}-rank{rank:04d}.log"
    path.write_text(text)
    return path


# -- files -----------------------------------------------------------------------------------


def test_only_the_logs_of_the_newest_step_are_read(tmp_path: Path) -> None:
    log(tmp_path, 2, 0, f"{STALE}\n")
    log(tmp_path, 10, 0, f"{OOM}\n")
    log(tmp_path, 10, 12345, f"{OOM}\n")
    (tmp_path / "step11-rank0000.log.old").write_text(STALE)
    (tmp_path / "notes.txt").write_text(STALE)
    assert newest_step(tmp_path) == 10
    found = SCANNER.logs(tmp_path, 2)
    assert {(one.signature, one.rank) for one in found} == {
        ("gpu_out_of_memory", 0),
        ("gpu_out_of_memory", 12345),
    }


def test_the_log_of_an_agent_belongs_to_no_rank(tmp_path: Path) -> None:
    """It says why ranks did not start, and then it is the only one of its step."""
    log(tmp_path, 0, 0, f"{STALE}\n")
    words = "DistNetworkError: The server socket has failed to bind to [::]:2 (errno: 98 - Address"
    (tmp_path / "step1-node0000.log").write_text(f"torch.distributed.{words} already in use).\n")
    assert newest_step(tmp_path) == 1
    (found,) = SCANNER.logs(tmp_path, 0)
    assert (found.cause, found.rank, found.node) == (Cause.PORT, None, None)


def test_labels_in_the_log_of_a_node_name_the_ranks(tmp_path: Path) -> None:
    """What srun writes with --label: each line has its rank, which has its node and its end."""
    (tmp_path / "step0-node0001.log").write_text(
        f"9: started\n12: {OOM}\n 9: {TIMEOUT.format(rank=9)}\n12: again: {OOM}\n9: {STALE}\n"
        "an agent without a label\n"
    )
    ranks = LaunchRanks({9: "n1", 12: "n1"}, {12: AT - 5})
    found = SCANNER.logs(tmp_path, -1, ranks)
    assert [(one.signature, one.rank, one.node) for one in found] == [
        ("gpu_out_of_memory", 12, "n1"),
        ("nccl_timeout", 9, "n1"),
    ], "a rank says a thing once, and nothing after its teardown; ranks do not mix"
    assert found[0].line == OOM, "the evidence is what the rank wrote"
    assert found[0].order == pytest.approx(AT - 5, abs=0.1)


def test_a_line_that_slurm_has_cut_is_evidence_as_a_whole(tmp_path: Path) -> None:
    """slurmstepd cuts after 1024 bytes, here within the words that a signature looks for."""
    words = TIMEOUT.format(rank=3)
    line = "x" * (1024 - words.index("operation timeout")) + words
    pieces = (line[:1024], line[1024:])
    log = "3: {}\n4: between\n3: {}\n".format(*pieces)
    (tmp_path / "step0-node0000.log").write_text(log)
    assert SCANNER.lines(pieces, "rank") == (), "neither half says it"
    assert [(one.signature, one.rank) for one in SCANNER.logs(tmp_path, -1)] == [
        ("nccl_timeout", 3)
    ]


def test_the_node_whose_rank_ended_first_is_read_first(tmp_path: Path) -> None:
    for node in range(4):
        (tmp_path / f"step0-node{node:04d}.log").write_text(f"{node * 2}: {OOM}\n")
    nodes = {rank: f"n{rank // 2}" for rank in range(8)}
    ranks = LaunchRanks(nodes, {7: AT, 2: AT + 2, 3: AT + 1})
    assert ranks.ended_at_by_node() == {3: AT, 1: AT + 1}
    (tmp_path / "step0-node0002.log").unlink()
    os.mkfifo(tmp_path / "step0-node0002.log")  # the one reader does not come past it
    limits = ScanLimits(readers=1, seconds=1.0)
    found = {one.rank for one in SCANNER.logs(tmp_path, -1, ranks, limits)}
    assert found == {6, 2, 0, None}, "of node 2 nothing is known, and its name is after node 0"


def test_a_launch_that_has_left_no_logs_has_none(tmp_path: Path) -> None:
    log(tmp_path, 2, 0, f"{STALE}\n")
    assert SCANNER.logs(tmp_path, 2) == ()
    assert SCANNER.logs(tmp_path / "none", -1) == ()
    assert newest_step(tmp_path / "none") == -1


def test_only_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    log(tmp_path, 0, 0, f"{STALE}\n" + "x" * 9000 + f"\n{OOM}\n")
    limits = ScanLimits(tail_bytes=8192)
    assert [one.signature for one in SCANNER.logs(tmp_path, -1, None, limits)] == [
        "gpu_out_of_memory"
    ]
    log(tmp_path, 0, 0, f"{STALE}\n{OOM}\n" + "x" * 8100)  # the tail begins within a line
    assert [one.signature for one in SCANNER.logs(tmp_path, -1, None, limits)] == [
        "gpu_out_of_memory"
    ]
    assert ScanLimits().tail(4096) == 16 * 1024
    assert ScanLimits().tail(10**6) == 4096
    assert ScanLimits().tail(8) == 64 * 1024
    assert ScanLimits().tail(8, of_node=True) == 8 * ScanLimits().tail(8), "of eight ranks"
    assert ScanLimits().tail(2048, of_node=True) == 32 * 1024


def test_bytes_that_are_no_text_and_colours_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "step0-rank0000.log"
    path.write_bytes(
        b"\xff\xfe\x00\n\x1b[31mtorch.OutOfMemoryError\x1b[0m: \x1b[1mCUDA out\x1b[m"
        b" of memory\n\x1b]0;title\x07"
    )
    [found] = SCANNER.logs(tmp_path, -1)
    assert found.line == "torch.OutOfMemoryError: CUDA out of memory"


def test_every_rank_says_a_thing_once_and_in_its_order(tmp_path: Path) -> None:
    log(tmp_path, 0, 3, f"{STALE}\n{OOM}\n{STALE}\n" * 50)
    found = SCANNER.logs(tmp_path, -1, LaunchRanks({3: "n1"}, {3: AT}))
    assert [one.signature for one in found] == ["storage_error", "gpu_out_of_memory"]
    assert all((one.rank, one.node) == (3, "n1") for one in found)
    assert found[0].order < found[1].order < AT + 1


def test_what_follows_a_teardown_is_left_out(tmp_path: Path) -> None:
    log(tmp_path, 0, 1, f"{OOM}\n{TIMEOUT.format(rank=1)}\n{STALE}\n")
    found = SCANNER.logs(tmp_path, -1)
    assert {one.signature for one in found} == {"gpu_out_of_memory", "nccl_timeout"}
    # srun speaks for all tasks: the end of one is not the end of its words
    lines = ["slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 ***",
             "srun: error: n1: task 3: Out Of Memory"]  # fmt: skip
    assert [one.signature for one in SCANNER.lines(lines, "srun")] == [
        "slurm_step_cancelled",
        "task_out_of_memory",
    ]


# -- limits ----------------------------------------------------------------------------------


def test_a_file_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    """Opening a FIFO that nobody writes to waits for ever, as a dead NFS server makes one wait."""
    for rank in range(2, 12):
        log(tmp_path, 0, rank, f"{OOM}\n")
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"step0-rank{rank:04d}.log")
    began = time.monotonic()
    found = SCANNER.logs(tmp_path, -1, None, ScanLimits(seconds=1.0))
    assert time.monotonic() - began < 60
    assert {one.rank for one in found if one.signature != UNREAD} == set(range(2, 12))
    [unread] = [one for one in found if one.signature == UNREAD]
    assert unread.role == "advice" and unread.cause is Cause.UNKNOWN
    assert unread.line == "2 of 12 logs could not be read within 1 s"


def test_a_directory_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    [unread] = SCANNER.logs(tmp_path / "logs", -1, None, ScanLimits(seconds=1.0))
    assert unread.line == "the logs could not be read within 1 s"


def test_a_file_that_is_gone_counts_as_not_read(tmp_path: Path) -> None:
    log(tmp_path, 0, 0, f"{OOM}\n")
    (tmp_path / "step0-rank0001.log").symlink_to(tmp_path / "gone")
    found = SCANNER.logs(tmp_path, -1)
    assert [one.signature for one in found] == ["gpu_out_of_memory", UNREAD]


def test_the_rank_that_ended_first_is_read_first(tmp_path: Path) -> None:
    """With one reader that is stopped by a FIFO, only what comes before it is read."""
    for rank in (0, 1, 2):
        log(tmp_path, 0, rank, f"{OOM}\n")
    os.mkfifo(tmp_path / "step0-rank0003.log")
    ranks = LaunchRanks(ended_at={2: AT, 3: AT + 1, 1: AT + 2})
    found = SCANNER.logs(tmp_path, -1, ranks, ScanLimits(seconds=0.5, readers=1))
    assert [one.rank for one in found] == [2, None]


def test_thousands_of_logs_are_read_in_seconds(tmp_path: Path) -> None:
    healthy = "event=step step=12/5000 loss=2.7\n" * 100
    for rank in range(1024):
        last = f"{OOM}\n" if rank == 700 else ""
        log(tmp_path, 0, rank, f"{healthy}{last}{TIMEOUT.format(rank=rank)}\n")
    began = time.process_time()
    found = SCANNER.logs(tmp_path, -1)
    assert time.process_time() - began < 10
    assert [one.rank for one in found if one.role == "root"] == [700]
    assert len(found) == 1025


# -- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("[rank3]:[E1121 05:33:37.250000000 ProcessGroupNCCL.cpp:607] x", 0.25),
        ("[E1121 05:33:37.5 ProcessGroupNCCL.cpp:607] x", 0.5),
        ("2026-11-21 05:33:37,125 ERROR x", 0.125),
        ("slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-11-21T05:33:37 ***", 0),
        ("[Sat Nov 21 05:33:37 2026] NVRM: Xid (PCI:0000:cb:00): 79", 0),
        ("Nov 21 05:33:37 node17 kernel: NVRM: Xid", 0),
    ],
)
def test_the_time_of_a_line(line: str, seconds: float) -> None:
    assert line_time(line, NEAR) == pytest.approx(AT + seconds)


def test_a_month_of_one_digit() -> None:
    line = "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] x"
    expected = time.mktime((2026, 3, 21, 2, 7, 8, 0, 0, -1)) + 0.41464078
    assert line_time(line, NEAR) == pytest.approx(expected)


def test_the_turn_of_the_year() -> None:
    new_year = time.mktime((2027, 1, 1, 0, 0, 30, 0, 0, -1))
    line = "[E1231 23:59:50.0 socket.cpp:1] x"
    assert line_time(line, new_year) == pytest.approx(new_year - 40)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ValueError: x",
        "[E1399 05:33:37.1 a] x",
        "[E0021 05:33:37.1 a]",
        "y" * 200 + "2026-11-21 05:33:37",
    ],
)
def test_a_line_without_a_time(line: str) -> None:
    assert line_time(line, NEAR) is None


def test_a_line_without_a_time_was_written_before_the_next_one_with_one(tmp_path: Path) -> None:
    log(tmp_path, 0, 1, f"{OOM}\n{TIMEOUT.format(rank=1)}\n")
    oom, timeout = SCANNER.logs(tmp_path, -1, LaunchRanks(ended_at={1: AT + 600}))
    assert oom.order == pytest.approx(AT + 0.5, abs=1e-3)
    assert oom.order < timeout.order
    [alone] = SCANNER.lines([OOM], "rank", rank=1, at=AT + 600)
    assert alone.order == pytest.approx(AT + 600, abs=1e-3)


def test_findings_are_in_the_order_of_time(tmp_path: Path) -> None:
    log(tmp_path, 0, 0, f"2026-11-21 05:33:39,0 {STALE}\n")
    log(tmp_path, 0, 1, f"2026-11-21 05:33:38,0 {STALE}\n")
    found = SCANNER.logs(tmp_path, -1, LaunchRanks(ended_at={0: AT}), ScanLimits(readers=1))
    assert [one.rank for one in found] == [1, 0]


def test_the_time_of_the_file_stands_in_for_that_of_the_rank(tmp_path: Path) -> None:
    path = log(tmp_path, 0, 1, f"{OOM}\n")
    os.utime(path, (AT, AT))
    [found] = SCANNER.logs(tmp_path, -1)
    assert found.order == pytest.approx(AT, abs=1e-3)


# -- other sources ---------------------------------------------------------------------------


def test_a_line_of_srun_names_its_node() -> None:
    [found] = SCANNER.lines(["srun: error: Node failure on n17"], "srun", at=AT)
    assert (found.node, found.cause) == ("n17", Cause.NODE_FAILURE)


def test_a_kernel_speaks_for_its_node_and_says_a_thing_as_often_as_it_happens() -> None:
    lines = [f"NVRM: Xid (PCI:0000:c{n}:00): 79, GPU has fallen off the bus." for n in (1, 2)]
    found = SCANNER.lines([*lines, "NVRM: Xid (PCI:0000:c1:00): 63, x"], "kernel", node="n3", at=AT)
    assert [(one.node, one.signature, one.hard) for one in found] == [("n3", "xid_79", True)] * 2


def test_words_of_a_message_over_several_lines_stay_together() -> None:
    [found] = SCANNER.lines(["RuntimeError: a\nCUDA out of memory\nb"], "rank", rank=0)
    assert found.line == "RuntimeError: a CUDA out of memory b"


def test_signatures_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    path = tmp_path / "signatures.json"
    assert read_signatures(path) is None
    path.write_text("{")
    assert read_signatures(path) is None
    path.write_text(load_signatures().to_json())
    assert read_signatures(path) == load_signatures()


# -- What is found of a launch that has failed: logs, exit records, srun and kernels together ---


RESET = "DistNetworkError: Connection reset by peer"
OFF_BUS = "NVRM: Xid (PCI:0000:cb:00): 79, pid=1, name=python3, GPU has fallen off the bus."


@pytest.fixture
def context(tmp_path: Path) -> AttemptContext:
    run = RunLayout(tmp_path / "run")
    run.create()
    run.signatures.write_text(load_signatures().to_json())
    run.attempt_logs(5, 1).mkdir()
    attempt = SimpleNamespace(job_id=5, restart_count=1)
    return cast(AttemptContext, SimpleNamespace(run_layout=run, attempt=attempt))


def write_log(context: AttemptContext, step: int, rank: int, text: str) -> None:
    directory = context.run_layout.attempt_logs(5, 1)
    (directory / f"step{step}-rank{rank:04d}.log").write_text(text)


def test_a_launch_is_explained_by_the_kernel_of_one_node(context: AttemptContext) -> None:
    write_log(context, 0, 0, "OSError: [Errno 5] of the launch before\n")
    before = newest_logged_step(context)
    write_log(context, 4, 3, "[rank3]: NCCL WARN remote process exited\n")
    evidence = Story([End(0, RESET), End(1, RESET)], world_size=8).evidence(findings=())
    answer = NodeResult("n1", kernel=(KernelLine("n1", OFF_BUS, BEGIN + 90),))
    traces = Traces(BEGIN, before, ("n0", "n1", "n2", "n3"))
    found = find_lines(context, evidence, traces, ProbeResult(results=(answer,)))
    assert {(one.signature, one.rank, one.node) for one in found} == {
        ("peer_lost", 0, "n0"),
        ("peer_lost", 1, "n0"),
        ("peer_lost", 3, "n1"),
        ("xid_79", None, "n1"),
    }
    verdict = classify(Story([End(0, RESET), End(1, RESET)]).evidence(findings=found))
    assert (verdict.cause, verdict.nodes, verdict.hard) == (Cause.GPU_ERROR, ("n1",), True)


def test_a_rank_without_a_record_gets_its_node_from_the_order_of_nodes(
    context: AttemptContext,
) -> None:
    write_log(context, 0, 5, "torch.OutOfMemoryError: CUDA out of memory.\n")
    evidence = Story(world_size=8).evidence()
    [found] = find_lines(context, evidence, Traces(BEGIN, -1, ("a", "b", "c", "d")))
    assert (found.rank, found.node) == (5, "c")
    [uneven] = find_lines(context, evidence, Traces(BEGIN, -1, ("a", "b", "c")))
    assert uneven.node is None


def test_a_run_that_was_submitted_without_signatures_has_no_findings(
    context: AttemptContext,
) -> None:
    write_log(context, 0, 0, "torch.OutOfMemoryError: CUDA out of memory.\n")
    context.run_layout.signatures.unlink()
    assert find_lines(context, NOTHING, Traces(BEGIN)) == ()


def test_an_attempt_without_logs_has_no_step(context: AttemptContext) -> None:
    assert newest_logged_step(context) == -1
    context.run_layout.attempt_logs(5, 1).rmdir()
    assert newest_logged_step(context) == -1
