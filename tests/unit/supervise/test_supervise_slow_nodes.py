"""What a check before training may cost a run, and what it says against nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from supervise_facts import NOTHING, config, exit_record

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
from hpctrain.judge.slow_nodes import (
    certain_nodes,
    launches_ended,
    replaceable_nodes,
    slow_nodes_of,
    summary,
)
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.speed_checks import SlowPart, SpeedCheck
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig

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
