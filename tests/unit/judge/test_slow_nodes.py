"""Nodes that are compared with each other: answers of probes, and checks before training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from launch_evidence import NOTHING, config, exit_record
from trainer_documents import train_json

from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import (
    ActionKind,
    History,
    Situation,
    Suspicion,
    UnfitNode,
)
from hpctrain.judge.launch_nodes import Allocation, Placement, place
from hpctrain.judge.policy import budget_of, decide
from hpctrain.judge.preflight_format import MARK
from hpctrain.judge.probe_results import NodeProblem, NodeResult, NodeResults, ProbeResult
from hpctrain.judge.slow_nodes import (
    Stragglers,
    certain_nodes,
    launches_ended,
    one_stage,
    replaceable_nodes,
    slow_nodes_of,
    slowness,
    summary,
)
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import RankTimes
from hpctrain.records.speed_checks import SlowPart, SpeedCheck
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig
from hpctrain.supervise.evidence.launch_watch import read_pipeline_stages

NODES = ("n0", "n1")
SIZES = tuple(LaunchShape(nodes=n, tasks=n, train_config=f"train-{n}.json") for n in (2, 1))


def settings(mode: str = "exclude", **changes: object) -> SuperviseConfig:
    update = {"speed_check": mode, "cluster_nodes": 40, **changes}
    return config().model_copy(update=update)


def ended_by_speed(count: int) -> list[Event]:
    return [Event(event=EventKind.SPEED_CHECKED, time=1.0, action="leave")] * count


@pytest.mark.parametrize(
    ("given", "spares", "ended", "expected"),
    [
        (settings("off"), 1, 0, None),
        (settings("report"), 1, 0, 0),
        (settings(), 1, 0, 4),
        (settings(continuation="chain"), 3, 0, 3),
        (settings(continuation="chain"), 0, 0, 0),
        (settings(), 0, 0, 4),
        (settings(), 0, 1, 0),
        (settings(), 3, 1, 3),
        (settings(), 3, 2, 0),
        (settings(cluster_nodes=3), 1, 0, 1),
        (settings(cluster_nodes=2), 0, 0, 0),
        (settings(shapes=SIZES), 0, 0, 0),
        (settings(shapes=SIZES), 2, 0, 2),
    ],
)
def test_how_many_nodes_a_launch_may_give_up(
    given: SuperviseConfig, spares: int, ended: int, expected: int | None
) -> None:
    placement = Placement(None, NODES, spares=spares)
    assert replaceable_nodes(given, placement, NODES, (), ended_by_speed(ended)) == expected


def test_nodes_are_measured_once_in_an_attempt() -> None:
    placement = Placement(None, NODES)
    for checked, expected in ((NODES, None), ((*NODES, "n2"), None), (("n0", "n2"), 0), ((), 0)):
        assert replaceable_nodes(settings("report"), placement, NODES, checked, ()) == expected


def test_a_checkpoint_or_a_person_ends_the_count() -> None:
    ended = ended_by_speed(2)
    assert launches_ended(ended) == 2
    progress = Event(event=EventKind.LAUNCH_ENDED, time=2.0, resume_step=10, checkpoint_step=20)
    resumed = Event(event=EventKind.CONTROL, time=2.0, action="resume")
    reported = Event(event=EventKind.SPEED_CHECKED, time=2.0, action="report")
    stuck = progress.model_copy(update={"checkpoint_step": 10})
    counts = [launches_ended([*ended, one]) for one in (progress, resumed, reported, stuck)]
    assert counts == [0, 0, 2, 2]


def test_no_run_is_stopped_because_of_slow_nodes() -> None:
    """The launches that slow nodes may end do not use up the budget of node failures."""
    budget = budget_of(Cause.NODE_FAILURE, settings())
    most = next(n for n in range(9) if not replaceable_nodes(
        settings(), Placement(None, NODES, spares=9), NODES, (), ended_by_speed(n)
    ))  # fmt: skip
    assert budget is not None and most <= budget


def test_the_spares_of_a_placement_are_wanted_and_not_needed() -> None:
    sized = settings(shapes=SIZES[:1], spare_nodes=2)
    job = Allocation(("n0", "n1", "n2", "n3"))
    for allocation, spares in (
        (job, 2),
        (job.without(["n0"]), 1),
        (job.avoiding(["n0", "n3"]), 0),
        (job.without(["n0"]).avoiding(["n1", "n2"]), 0),
    ):
        placement = place(sized, allocation)
        assert placement is not None and placement.spares == spares, allocation


CHECK = SpeedCheck(
    epoch=3,
    time=1.0,
    seconds=7.0,
    nodes=("n0", "n1"),
    accelerator="cuda",
    precision="bf16",
    product_mnk=(8192, 8192, 8192),
    product_flops_per_second=(600e12, 300e12),
    slow=(
        SlowPart(part="gpu", message="rank 1 on n1: slow", nodes=("n1",), certain=True),
        SlowPart(part="link", message="n1: slow, too", nodes=("n1",), certain=True),
        SlowPart(part="link", message="between nodes", nodes=("n0", "n1")),
    ),
    leaves=True,
)


def test_which_nodes_ended_a_launch() -> None:
    slow = (UnfitNode("n1", "rank 1 on n1: slow"),)
    assert certain_nodes(CHECK) == slow_nodes_of(CHECK) == slow
    assert slow_nodes_of(CHECK.model_copy(update={"leaves": False})) == slow_nodes_of(None) == ()


def test_a_check_in_one_line() -> None:
    assert summary(CHECK) == (
        "2 ranks checked in 7 s, median of matrix products 450 TFLOP/s, 3 parts are slow"
    )
    fast = CHECK.model_copy(update={"slow": ()})
    assert summary(fast).endswith("nothing is slow")


ENDED = tuple(
    exit_record(rank, "crash", "slow: rank 1 on n1", cause="node_failure", time=5.0)
    for rank in range(2)
)


def test_slow_nodes_fail_like_lost_ones() -> None:
    evidence = replace(
        NOTHING, rank_exits=ENDED, slow_nodes=slow_nodes_of(CHECK), nodes=NODES, world_size=2
    )
    verdict = classify(evidence)
    assert (verdict.cause, verdict.nodes) == (Cause.NODE_FAILURE, ("n1",))
    assert verdict.reason == "slow before training: rank 1 on n1: slow"
    assert verdict.suspicion is Suspicion.SLOW and verdict.unfit_nodes == ("n1",)
    swapped = decide(
        verdict,
        History(1, 0, by_cause=(("node_failure", 1),)),
        Situation(allocated_nodes=3, healthy_nodes=2, needed_nodes=2, least_nodes=2, unfit=("n1",)),
        settings(),
    )
    assert (swapped.kind, swapped.exclude) == (ActionKind.RELAUNCH, ("n1",))
    assert "with a spare node" in swapped.reason
    requeued = decide(
        verdict,
        History(1, 0, by_cause=(("node_failure", 1),)),
        Situation(allocated_nodes=2, healthy_nodes=1, needed_nodes=2, least_nodes=2, unfit=("n1",)),
        settings(),
    )
    assert (requeued.kind, requeued.exclude) == (ActionKind.REQUEUE, ("n1",))


def test_without_the_record_no_node_is_blamed() -> None:
    verdict = classify(replace(NOTHING, rank_exits=ENDED, nodes=NODES, world_size=2))
    assert (verdict.cause, verdict.nodes) == (Cause.NODE_FAILURE, ())
    assert verdict.suspicion is Suspicion.NONE


def test_a_node_that_is_lost_meanwhile_comes_first() -> None:
    evidence = replace(
        NOTHING, rank_exits=ENDED, slow_nodes=slow_nodes_of(CHECK), lost_nodes=("n0",)
    )
    assert classify(evidence).nodes == ("n0",)


# -- Slow ranks: windows in a row, peers of one stage, and when to be silent --------------------


OF_RANKS = ("n0", "n0", "n1", "n1")


class Windows:
    """Windows of four ranks, twenty steps each."""

    def __init__(self, limit_factor: float = 1.2) -> None:
        self.stragglers = Stragglers(limit_factor)
        self.last_step = 0
        self.epoch = 1
        self.nodes = OF_RANKS

    def times(self, *seconds: float) -> RankTimes:
        return RankTimes(
            epoch=self.epoch,
            first_step=self.last_step - 19,
            last_step=self.last_step,
            time=0.0,
            compute_seconds=seconds,
            nodes=self.nodes,
        )

    def pass_by(self, *seconds: float) -> list[tuple[int, str]]:
        self.last_step += 20
        found = self.stragglers.window(self.times(*seconds), one_stage)
        return [(slow.rank, slow.node) for slow in found]


def test_the_third_slow_window_is_reported_and_only_that() -> None:
    windows = Windows()
    slow = (1.0, 1.0, 1.0, 1.5)
    assert [windows.pass_by(*slow) for _ in range(5)] == [[], [], [(3, "n1")], [], []]
    current = windows.stragglers.current
    assert [(s.rank, s.node, s.factor) for s in current] == [(3, "n1", 1.5)]


def test_a_window_in_between_begins_the_count_anew() -> None:
    windows = Windows()
    for seconds in (1.5, 1.5, 1.0, 1.5, 1.5):
        assert windows.pass_by(1.0, 1.0, 1.0, seconds) == []
    assert windows.pass_by(1.0, 1.0, 1.0, 1.5) == [(3, "n1")]


def test_the_limit_itself_is_not_slow() -> None:
    windows = Windows(1.25)
    assert [windows.pass_by(1.0, 1.0, 1.0, 1.25) for _ in range(3)] == [[], [], []]


def test_one_that_recovers_is_cleared_and_not_reported_again() -> None:
    windows = Windows()
    for _ in range(3):
        windows.pass_by(1.0, 1.0, 1.0, 1.5)
    windows.pass_by(1.0, 1.0, 1.0, 1.0)
    assert windows.stragglers.current == ()
    assert [windows.pass_by(1.0, 1.0, 1.0, 1.5) for _ in range(3)] == [[], [], []]
    assert [s.rank for s in windows.stragglers.current] == [3]


def test_a_new_launch_counts_anew_and_another_node_is_another_matter() -> None:
    windows = Windows()
    for _ in range(3):
        windows.pass_by(1.0, 1.0, 1.0, 1.5)
    windows.stragglers.launched()
    assert windows.stragglers.current == ()
    windows.epoch, windows.last_step, windows.nodes = 2, 0, ("n0", "n0", "n2", "n2")
    assert [windows.pass_by(1.0, 1.0, 1.0, 1.5) for _ in range(3)] == [[], [], [(3, "n2")]]


def test_one_window_seen_again_counts_once() -> None:
    windows = Windows()
    windows.last_step = 20
    slow = windows.times(1.0, 1.0, 1.0, 1.5)
    assert [windows.stragglers.window(slow, one_stage) for _ in range(4)] == [()] * 4
    assert windows.stragglers.current == ()


def test_ranks_of_one_slow_node_are_both_named() -> None:
    windows = Windows()
    windows.nodes = ("n0", "n0", "n1", "n1")
    found = [windows.pass_by(1.0, 1.0, 1.6, 1.5) for _ in range(3)]
    assert found[-1] == [(2, "n1"), (3, "n1")]


def test_without_nodes() -> None:
    windows = Windows()
    windows.nodes = ()
    assert [windows.pass_by(1.0, 1.0, 1.0, 2.0) for _ in range(3)][-1] == [(3, "")]


@pytest.mark.parametrize(
    ("seconds", "stage_size", "expected"),
    [
        ((1.0, 2.0), 2, [1.0, 2.0]),
        ((1.0, 1.0, 1.0, 4.0), 4, [1.0, 1.0, 1.0, 4.0]),
        # The last stage has the loss: twice the work is not slow.
        ((1.0, 1.0, 2.0, 2.0), 2, [1.0, 1.0, 1.0, 1.0]),
        ((1.0, 1.0, 2.0, 3.0), 2, [1.0, 1.0, 1.0, 1.5]),
        ((1.0, 5.0), 1, [1.0, 1.0]),
        ((0.0, 0.0, 1.0), 3, [1.0, 1.0, 1.0]),
        ((), 1, []),
    ],
)
def test_slowness(seconds: tuple[float, ...], stage_size: int, expected: list[float]) -> None:
    assert slowness(seconds, lambda rank: rank // stage_size) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, [0, 0, 0, 0, 1, 1, 1, 1]),
        ("tp-cp-ep-dp-pp", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("tp-cp-ep-pp-dp", [0, 0, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_stages_of_a_layout(tmp_path: Path, order: str | None, expected: list[int]) -> None:
    """tp 2, pp 2, dp 2; see the tests of `plan.placement` for the same order of ranks."""
    sizes = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2)
    path = tmp_path / "train.json"
    path.write_text(train_json(**sizes, **({} if order is None else {"parallel_order": order})))
    stage_of = read_pipeline_stages(path)
    assert [stage_of(rank) for rank in range(8)] == expected


def test_stages_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    expected = {"tp-cp-ep-dp-pp": [0, 0, 1, 1], "tp-cp-ep-pp-dp": [0, 1, 0, 1]}
    for order, stages in expected.items():
        config = dict(pipeline_stages=[2, 1], data_parallel_size=2, parallel_order=order)
        path.write_text(train_json("deepspeed", **config))
        assert [read_pipeline_stages(path)(rank) for rank in range(4)] == stages
        path.write_text(train_json("deepspeed", **config, tensor_parallel=2))
        pairs = [stage for stage in stages for _ in range(2)]
        assert [read_pipeline_stages(path)(rank) for rank in range(8)] == pairs
    path.write_text(train_json("deepspeed", data_parallel_size=4))
    assert [read_pipeline_stages(path)(rank) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"pipeline_model_parallel_size": null}', "\x00", None]
)
def test_a_layout_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "train.json"
    if text is not None:
        path.write_text(text)
    assert [read_pipeline_stages(path)(rank) for rank in range(4)] == [0, 0, 0, 0]


# -- Answers of nodes: reading lines among others, and comparing nodes with each other ---------


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
