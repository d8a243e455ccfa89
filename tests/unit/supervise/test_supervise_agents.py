"""What srun says of agents, and what these say of their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from supervise_facts import NOTHING, exit_record

from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import LogFinding
from hpctrain.judge.root_causes import failures_below_agents
from hpctrain.records.run_records import AgentRecord, ExitRecord, RankEnd
from hpctrain.slurm.messages import TaskFailure, read_task_failure

T = 1_000_000.0


def told(node: str, at: float, *ends: tuple[int, int]) -> AgentRecord:
    ended = tuple(RankEnd(rank=rank, code=code) for rank, code in ends)
    return AgentRecord(epoch=1, node=node, time=at, ended=ended)


def srun(node: str, task: int, what: str, at: float) -> TaskFailure:
    failure = read_task_failure(f"srun: error: {node}: task {task}: {what}")
    assert failure is not None
    return replace(failure, at=at)


CODE_1 = "Exited with exit code 1"
CASES = {
    "a rank was killed, its agent left with 137, the supervisor ended the other": (
        [told("n1", T, (9, -9))],
        [srun("n1", 1, "Exited with exit code 137", T + 1), srun("n0", 0, "Killed", T + 9)],
        [("n1", "9", "Killed"), ("n0", "agent", "Killed")],
    ),
    "a rank crashed and another node followed": (
        [told("n0", T, (3, 1)), told("n1", T + 0.5, (8, 1), (9, -6))],
        [srun("n0", 0, CODE_1, T + 1), srun("n1", 1, CODE_1, T + 1.5)],
        [("n0", "3", CODE_1), ("n1", "8", CODE_1), ("n1", "9", "Aborted")],
    ),
    "an agent was killed, and srun says so after the ranks of another node": (
        [told("n0", T, (0, 1))],
        [srun("n1", 1, "Killed", T + 1)],
        [("n1", "agent", "Killed"), ("n0", "0", CODE_1)],
    ),
    "an agent could not start its ranks": (
        [],
        [srun("n1", 1, CODE_1, T)],
        [("n1", "agent", CODE_1)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_failures_have_the_numbers_of_ranks(case: str) -> None:
    records, said, expected = CASES[case]
    found = failures_below_agents(records, said)
    assert [(one.node, one.tasks, one.what) for one in found] == expected


def test_the_verdict_names_the_rank_or_the_agent() -> None:
    for case, reason, rank in (
        (
            "a rank was killed, its agent left with 137, the supervisor ended the other",
            "rank 9 on n1 was ended by a signal: Killed",
            9,
        ),
        (
            "an agent was killed, and srun says so after the ranks of another node",
            "the agent on n1 was ended by a signal: Killed",
            None,
        ),
    ):
        records, said, _ = CASES[case]
        failures = failures_below_agents(records, said)
        verdict = classify(replace(NOTHING, task_failures=failures))
        assert (verdict.cause, verdict.reason, verdict.rank) == (Cause.CRASH, reason, rank)
        assert verdict.nodes == ("n1",)


PEER_GONE = "Connection closed by a remote worker"
OWN_ERROR = "the loss is a list"


def left(rank: int, node: str, words: str) -> ExitRecord:
    return exit_record(rank, "crash", words, node=node, time=T)


def echo(rank: int) -> LogFinding:
    return LogFinding("peer_gone", Cause.CRASH, "cascade", f"RuntimeError: {PEER_GONE}", rank=rank)


@pytest.mark.parametrize(
    ("words", "ended", "later", "rank"),
    [
        (PEER_GONE, [(0, 1), (1, -9)], (2, 1), 1),  # both were gone when the agent looked
        (PEER_GONE, [(0, 1)], (1, -9), 1),  # the agent of the killed rank looked later
        (PEER_GONE, [(0, 1)], (1, -6), 0),  # a watchdog that gives up kills nobody else
        (OWN_ERROR, [(0, 1), (1, -11)], (2, 1), 0),  # ranks may fall over what a crash leaves
    ],
)
def test_a_kill_that_is_told_late_goes_before_what_follows_from_it(
    words: str, ended: list[tuple[int, int]], later: tuple[int, int], rank: int
) -> None:
    failures = failures_below_agents([told("n0", T, *ended), told("n1", T + 0.5, later)], ())
    exits = (left(0, "n0", words),)
    facts = replace(NOTHING, task_failures=failures, rank_exits=exits, findings=(echo(0),))
    verdict = classify(facts)
    assert (verdict.cause, verdict.rank) == (Cause.CRASH, rank)
