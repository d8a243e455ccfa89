"""Answers of nodes: reading lines among others, and comparing nodes with each other."""

from __future__ import annotations

import json

import pytest

from hpctrain.judge.preflight_format import MARK
from hpctrain.judge.probe_results import NodeProblem, NodeResult, NodeResults, ProbeResult

T = 1_800_000_000.0


def line(node: str, kind: str, **fields: object) -> str:
    return MARK + json.dumps({"node": node, "kind": kind, **fields}) + "\n"


def heard(*lines: str) -> NodeResults:
    answers = NodeResults()
    for one in lines:
        answers.add_line(one, T)
    return answers


def node(name: str, *problems: NodeProblem, **fields: object) -> NodeResult:
    return NodeResult(name, ended=True, problems=problems, **fields)  # type: ignore[arg-type]


def result(*answers: NodeResult, lost: tuple[str, ...] = ()) -> ProbeResult:
    asked = (*(one.node for one in answers), *lost)
    return ProbeResult(asked, answers, lost, tuple("no answer" for _ in lost))


MOUNT = NodeProblem("run directory", "cannot write")
PORT = NodeProblem("fabric", "mlx5_0/1 not active")
GPU = NodeProblem("GPUs", "7 of 8", hard=True)


def test_a_whole_answer() -> None:
    answers = heard(
        "Welcome to n1\n",
        line("n1", "begin", clock=T - 2, step="3"),
        line("n1", "problem", check="GPUs", text="7 of 8", hard=True, gpu=None),
        line("n1", "kernel", at=5.0, text="NVRM: Xid"),
        line("n1", "kernel", at=None, text="nfs"),
        line("n1", "fact", name="gpus", value=["GPU-1"]),
        line("n1", "fact", name="ports", value=["mlx5_0/1"]),
        line("n1", "fact", name="kernel_log", value="dmesg"),
        line("n1", "fact", name="something new", value=3),
        line("n1", "end", seconds=0.1),
    )
    (one,) = answers.compared()
    assert (one.step_id, one.skew_seconds, one.ended) == ("3", -2, True)
    assert one.problems == (GPU,)
    assert [(k.node, k.text, k.at) for k in one.kernel] == [
        ("n1", "NVRM: Xid", 5.0),
        ("n1", "nfs", None),
    ]
    assert (one.gpus, one.ports, one.kernel_log) == (("GPU-1",), ("mlx5_0/1",), "dmesg")


@pytest.mark.parametrize(
    "text",
    ["", "n1 up", MARK, MARK + "{", MARK + "[1]", MARK + '{"kind": "end"}', MARK + '{"node": 3}'],
)
def test_other_lines_are_nobodys_answer(text: str) -> None:
    assert heard(text).found == {}


def test_a_line_behind_the_banner_of_a_site_is_heard() -> None:
    assert heard("n1: " + line("n1", "end")).ended == {"n1"}


def test_begun_is_not_ended() -> None:
    answers = heard(line("n1", "begin"), line("n2", "begin"), line("n2", "end"))
    assert (answers.begun, answers.ended) == ({"n1", "n2"}, {"n2"})
    first, second = answers.compared()
    assert (first.problems[0].check, first.problems[0].blocks) == ("checks", True)
    assert second.problems == ()


def test_a_second_asking_starts_anew() -> None:
    answers = heard(
        line("n1", "begin"), line("n1", "problem", check="x", text="y"), line("n1", "begin")
    )
    assert answers.found["n1"].problems == ()


@pytest.mark.parametrize(("clock", "wrong"), [(T, 0), (T - 59, 0), (T + 61, 1), (T - 61, 1)])
def test_clocks(clock: float, wrong: int) -> None:
    (one,) = heard(line("n1", "begin", clock=clock), line("n1", "end")).compared()
    assert len(one.problems) == wrong
    assert not any(problem.blocks for problem in one.problems)


def ports(*active: list[str] | None) -> list[tuple[str, ...]]:
    lines = []
    for number, names in enumerate(active):
        if names is not None:
            lines.append(line(f"n{number}", "fact", name="ports", value=names))
        lines.append(line(f"n{number}", "end"))
    return [tuple(map(str, one.problems)) for one in heard(*lines).compared()]


def test_a_port_that_is_active_elsewhere_is_missed() -> None:
    a, b = "mlx5_0/1", "mlx5_1/1"
    told = ports([a, b], [a], [a, b])
    assert told == [(), (f"fabric: {b} not active, unlike on the other nodes",), ()]


def test_a_port_that_few_nodes_use_is_not_missed() -> None:
    assert ports(["a"], [], []) == [(), (), ()]
    assert ports(["a"], []) == [(), ()], "two nodes: one word against another"
    assert ports(["a"], ["a"], None) == [(), (), ()], "a node without a fabric"


# -- who is usable ---------------------------------------------------------------------------


def test_healthy_broken_doubtful_and_lost() -> None:
    told = result(node("n0"), node("n1", MOUNT), node("n2", PORT), node("n3", GPU), lost=("n4",))
    assert told.usable == ("n0", "n2")
    assert told.doubtful == ("n2",)
    assert told.unfit == ("n1", "n3", "n4")
    assert [one.node for one in told.broken] == ["n1", "n2", "n3"]
    assert told.shared == ()
    assert told.problem_lines() == (
        "n4: no answer",
        "n1: run directory: cannot write",
        "n2: fabric: mlx5_0/1 not active",
        "n3: GPUs: 7 of 8",
    )


def test_what_most_nodes_share_is_no_nodes_fault() -> None:
    told = result(*(node(f"n{number}", MOUNT) for number in range(3)), node("n3", GPU))
    assert told.usable == ("n0", "n1", "n2")
    assert told.unfit == ("n3",)
    assert told.shared == ("run directory: cannot write",)
    assert told.problem_lines()[-1] == "on most nodes: run directory: cannot write"


def test_broken_hardware_is_the_nodes_own_also_on_most_nodes() -> None:
    told = result(node("n0", GPU), node("n1", GPU), node("n2"))
    assert told.unfit == ("n0", "n1")


def test_a_node_keeps_its_own_problem_beside_a_shared_one() -> None:
    told = result(node("n0", MOUNT), node("n1", MOUNT, PORT), node("n2", MOUNT), node("n3"))
    assert [(one.node, one.problems) for one in told.broken] == [("n1", (PORT,))]
    assert told.doubtful == ("n1",)


def test_the_only_node_of_a_job_may_be_broken() -> None:
    assert result(node("n0", MOUNT)).unfit == ("n0",)


def test_in_trouble_nobody_is_unfit() -> None:
    told = ProbeResult(("n0", "n1"), trouble="no controller")
    assert (told.unfit, told.lost) == ((), ())
    assert told.problem_lines() == ("nodes could not be probed: no controller",)


def test_homes_of_gpus() -> None:
    told = result(node("n0", gpus=("A", "B")), node("n1", gpus=("C",)), node("n2"))
    assert told.homes == {"A": "n0", "B": "n0", "C": "n1"}


def test_what_the_run_reads_is_indispensable_on_one_node_and_common_on_most() -> None:
    lacking = NodeProblem("inputs", "cannot read /data/text.bin")
    told = result(node("n0"), node("n1", PORT, lacking))
    assert [(one.node, one.problem) for one in told.unfit_with_reason] == [
        ("n1", "inputs: cannot read /data/text.bin")
    ]
    assert (told.unfit, told.shared_blocking) == (("n1",), ())
    told = result(node("n0", lacking, PORT), node("n1", PORT, lacking))
    assert (told.unfit, told.unfit_with_reason) == ((), ())
    assert told.shared_blocking == ("inputs: cannot read /data/text.bin",)
