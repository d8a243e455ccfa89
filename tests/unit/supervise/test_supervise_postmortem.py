"""What is found of a launch that has failed: logs, exit records, srun and kernels together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from supervise_facts import NOTHING
from told_stories import BEGIN, End, Story

from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.probe_results import KernelLine, NodeResult, ProbeResult
from hpctrain.records.layout import RunLayout
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.gather import Traces, find_lines, newest_logged_step

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
