"""What ends a run for good only where all nodes agree, and what is the fault of a few."""

from __future__ import annotations

from dataclasses import replace

import pytest
from supervise_facts import NOTHING, config, exit_record, exits

from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import (
    ActionKind,
    History,
    LaunchEvidence,
    LogFinding,
    Situation,
    Suspicion,
    UnfitNode,
)
from hpctrain.judge.policy import decide
from hpctrain.judge.rank_verdict import Extent, extent
from hpctrain.records.run_records import ExitRecord
from hpctrain.slurm.messages import read_task_failure

PAIR, FOUR = ("n0", "n1"), ("n0", "n1", "n2", "n3")
MISSING = "/data/text.bin: data file not found"
UNMOUNTED = UnfitNode("n1", "inputs: cannot read /data/text.bin: [Errno 2] No such file")


def missing(rank: int, *, node_dependent: bool = True) -> ExitRecord:
    """Rank i on node ni finds no data."""
    return exit_record(rank, "config_error", MISSING, node_dependent=node_dependent)


def crashed(rank: int, message: str = "connection lost", cause: str | None = None) -> ExitRecord:
    return exit_record(rank, "crash", message, cause=cause)


def full(rank: int, *, node_dependent: bool = True) -> ExitRecord:
    exit_ = crashed(rank, "OSError: [Errno 28] No space left on device: '/tmp/x'", "disk_full")
    return exit_.model_copy(update={"node_dependent": node_dependent})


def no_container(*ranks: int) -> tuple[LogFinding, ...]:
    line = "FATAL:   stat /data: no such file or directory"
    return tuple(
        LogFinding("container_setting", Cause.LAUNCH_FAILURE, "root", line, rank, f"n{rank}")
        for rank in ranks
    )


def launch(*ends: ExitRecord, nodes: tuple[str, ...] = PAIR, **more: object) -> LaunchEvidence:
    world_size = len(nodes)
    return replace(NOTHING, rank_exits=ends, nodes=nodes, world_size=world_size, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("affected", "evidence", "expected"),
    [
        (("n0",), launch(missing(0), nodes=("n0",)), Extent.EVERYWHERE),
        (PAIR, launch(missing(0), missing(1)), Extent.EVERYWHERE),
        (("n1",), launch(missing(1)), Extent.FEW),
        (("n1",), launch(crashed(0), missing(1)), Extent.FEW),
        (("n1",), launch(missing(1), nodes=()), Extent.EVERYWHERE),
        (("n1",), launch(crashed(0), missing(1), nodes=()), Extent.FEW),
        # more than half agree, and the rest had no time to report
        (FOUR[1:], launch(*map(missing, (1, 2, 3)), nodes=FOUR), Extent.EVERYWHERE),
        (FOUR[1:], launch(crashed(0), *map(missing, (1, 2, 3)), nodes=FOUR), Extent.MOST),
        # rank 0 reports progress, hence n0 has got further
        (FOUR[1:], launch(*map(missing, (1, 2, 3)), nodes=FOUR, last_step=0), Extent.MOST),
        (FOUR[:2], launch(missing(0), missing(1), nodes=FOUR), Extent.FEW),
    ],
)
def test_how_far_a_failure_reaches(
    affected: tuple[str, ...], evidence: LaunchEvidence, expected: Extent
) -> None:
    assert extent(affected, evidence) is expected


@pytest.mark.parametrize(
    ("name", "evidence", "cause", "nodes"),
    [
        ("on one node", launch(missing(1)), Cause.NODE_FAILURE, ("n1",)),
        ("others crash", launch(crashed(0), missing(1)), Cause.NODE_FAILURE, ("n1",)),
        ("on all nodes", launch(missing(0), missing(1)), Cause.CONFIG_ERROR, ()),
        ("nobody to compare with", launch(missing(0), nodes=("n0",)), Cause.CONFIG_ERROR, ()),
        (
            "a setting, checked by rank 0 alone",
            launch(missing(0, node_dependent=False), crashed(1)),
            Cause.CONFIG_ERROR,
            (),
        ),
        (
            "a setting besides",
            launch(missing(0, node_dependent=False), missing(1)),
            Cause.CONFIG_ERROR,
            (),
        ),
        (
            "most nodes, not all",
            launch(crashed(0), *map(missing, (1, 2, 3)), nodes=FOUR),
            Cause.STORAGE,
            (),
        ),
        # rank 0 has looked and told the others
        (
            "all say it, the probe finds one node",
            launch(missing(0), missing(1), unfit_nodes=(UNMOUNTED,)),
            Cause.NODE_FAILURE,
            ("n1",),
        ),
        # only rank 0 looks, and the file is nowhere
        (
            "one says it, the probe finds it on no node",
            launch(missing(0), common_problems=("inputs: cannot read x",)),
            Cause.CONFIG_ERROR,
            (),
        ),
        (
            "a spare is unfit",
            launch(missing(0), missing(1), unfit_nodes=(UnfitNode("n9", "inputs: x"),)),
            Cause.CONFIG_ERROR,
            (),
        ),
        (
            "no container on one node",
            launch(crashed(0), findings=no_container(1)),
            Cause.NODE_FAILURE,
            ("n1",),
        ),
        (
            "no container on most nodes",
            launch(crashed(0), nodes=FOUR, findings=no_container(1, 2, 3)),
            Cause.STORAGE,
            (),
        ),
        ("no container at all", launch(findings=no_container(0, 1)), Cause.CONFIG_ERROR, ()),
        (
            "a rank that prints such a line and trains",
            launch(crashed(0), crashed(1), findings=no_container(0, 1)),
            Cause.LAUNCH_FAILURE,
            PAIR,
        ),
        ("a disk of one node", launch(full(1), crashed(0)), Cause.NODE_FAILURE, ("n1",)),
        ("disks of all nodes", launch(full(0), full(1)), Cause.DISK_FULL, ()),
        (
            "the disk of the checkpoints",
            launch(full(1, node_dependent=False), crashed(0)),
            Cause.DISK_FULL,
            (),
        ),
        (
            "nobody says anything, and a node is unfit",
            launch(unfit_nodes=(UNMOUNTED,)),
            Cause.NODE_FAILURE,
            ("n1",),
        ),
    ],
)
def test_the_cause(
    name: str, evidence: LaunchEvidence, cause: Cause, nodes: tuple[str, ...]
) -> None:
    verdict = classify(evidence)
    assert (verdict.cause, verdict.nodes) == (cause, nodes), name
    if cause is Cause.NODE_FAILURE:
        assert verdict.suspicion is Suspicion.UNFIT and verdict.unfit_nodes == nodes
        assert verdict.reason.startswith("on n1 alone: "), verdict.reason
    else:
        assert not verdict.unfit_nodes


@pytest.mark.parametrize(
    ("lines", "cause", "nodes"),
    [
        (["n1: task 1: Exited with exit code 78"], Cause.NODE_FAILURE, ("n1",)),
        (["n0: task 0: Exited with exit code 78"] * 2, Cause.NODE_FAILURE, ("n0",)),
        (["n[0-1]: tasks 0-1: Exited with exit code 78"], Cause.CONFIG_ERROR, ()),
        (
            [f"n{n}: task {n}: Exited with exit code 78" for n in (1, 0)],
            Cause.CONFIG_ERROR,
            (),
        ),
    ],
)
def test_a_trainer_that_can_leave_its_code_only(
    lines: list[str], cause: Cause, nodes: tuple[str, ...]
) -> None:
    """The run directory is away on its node, so there is no record."""
    failures = tuple(filter(None, (read_task_failure(f"srun: error: {line}") for line in lines)))
    verdict = classify(launch(task_failures=failures))
    assert (verdict.cause, verdict.nodes) == (cause, nodes)


def test_one_node_is_no_reason_to_stop_and_all_nodes_are() -> None:
    history = History(1, 0, (("node_failure", 1), ("config_error", 1)))
    for evidence, kind in (
        (launch(missing(1)), ActionKind.RELAUNCH),
        (launch(missing(0), missing(1)), ActionKind.STOP),
    ):
        assert decide(classify(evidence), history, Situation(), config()).kind is kind


@pytest.mark.parametrize(
    ("evidence", "suspicion"),
    [
        # what people and programs do
        (launch(crashed(1, "AttributeError: x"), crashed(0)), Suspicion.NONE),
        (launch(crashed(1, "ValueError: bad batch")), Suspicion.NONE),
        *(
            (launch(task_failures=(read_task_failure(f"srun: error: n1: task 1: {what}"),)), how)
            for what, how in (
                ("Killed", Suspicion.OUTSIDE),
                ("Terminated", Suspicion.OUTSIDE),
                ("Interrupt", Suspicion.OUTSIDE),
                ("Segmentation fault (core dumped)", Suspicion.CAUSE),
                ("Bus error", Suspicion.CAUSE),
                ("Aborted (core dumped)", Suspicion.CAUSE),
            )
        ),
        # a rank leaves without a record, the other one only echoes
        *(
            (
                launch(
                    *exits("crash gone"),
                    task_failures=(
                        read_task_failure(f"srun: error: n1: task 1: Exited with exit code {code}"),
                    ),
                    findings=(LogFinding("peer", Cause.CRASH, "cascade", "crash gone", 0), *said),
                ),
                how,
            )
            for code, said, how in (
                (3, (), Suspicion.CAUSE),
                (137, (), Suspicion.OUTSIDE),
                (143, (), Suspicion.OUTSIDE),
                (139, (), Suspicion.CAUSE),
                (1, (LogFinding("x", Cause.CRASH, "root", "KeyError: 'a'", 1),), Suspicion.NONE),
            )
        ),
    ],
)
def test_what_a_crash_says_against_its_node(evidence: LaunchEvidence, suspicion: Suspicion) -> None:
    verdict = classify(evidence)
    assert (verdict.cause, verdict.nodes) == (Cause.CRASH, ("n1",)), verdict
    assert verdict.suspicion is suspicion, verdict
