"""Which nodes a launch gets: spares, fewer nodes, nodes to avoid; and what srun is told."""

from __future__ import annotations

import itertools

import pytest
from supervise_facts import config

from hpctrain.judge.launch_nodes import (
    Allocation,
    Placement,
    full_nodes,
    least_nodes,
    place,
    place_command,
)
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig

FIVE = Allocation(("n0", "n1", "n2", "n3", "n4"))


def shape(nodes: int) -> LaunchShape:
    name = "train.json" if nodes == 4 else f"train-n{nodes:06d}.json"
    return LaunchShape(nodes=nodes, tasks=8 * nodes, train_config=name)


def settings(*sizes: int, spares: int = 0) -> SuperviseConfig:
    shapes = tuple(shape(size) for size in sizes)
    return config().model_copy(update={"shapes": shapes, "spare_nodes": spares})


def nodes_of(settings: SuperviseConfig, allocation: Allocation) -> str:
    placement = place(settings, allocation)
    if placement is None:
        return "none"
    return ",".join(placement.nodes) or "all"


@pytest.mark.parametrize(
    ("sizes", "lost", "avoided", "expected"),
    [
        ((4,), "", "", "n0,n1,n2,n3"),
        ((5,), "", "", "all"),
        ((4,), "n1", "", "n0,n2,n3,n4"),
        ((4,), "n0 n1", "", "none"),
        ((4, 3, 2), "n0 n1", "", "n2,n3,n4"),
        ((4, 2), "n0 n1", "", "n2,n3"),
        ((4, 3, 2), "n0 n1 n2 n3", "", "none"),
        # a node to avoid is the spare; where there is no spare it is used all the same
        ((4,), "", "n2", "n0,n1,n3,n4"),
        ((4,), "n0", "n2", "n1,n2,n3,n4"),
        ((5, 4), "", "n2", "all"),
        ((4, 3), "n0", "n2 n3", "n1,n2,n3,n4"),
        ((4, 3), "n0 n1", "n2", "n2,n3,n4"),
    ],
)
def test_the_nodes_of_the_next_launch(
    sizes: tuple[int, ...], lost: str, avoided: str, expected: str
) -> None:
    allocation = FIVE.without(lost.split()).avoiding(avoided.split())
    assert nodes_of(settings(*sizes), allocation) == expected


def test_without_shapes_the_spares_are_left_out() -> None:
    assert nodes_of(settings(), FIVE) == "all"
    assert nodes_of(settings(spares=1), FIVE) == "n0,n1,n2,n3"
    assert nodes_of(settings(spares=1), FIVE.without(["n3"])) == "n0,n1,n2,n4"
    assert nodes_of(settings(spares=1), FIVE.without(["n3", "n4"])) == "none"
    assert full_nodes(settings(spares=9), FIVE) == 1


def test_sizes() -> None:
    assert (full_nodes(settings(4, 3, 2), FIVE), least_nodes(settings(4, 3, 2), FIVE)) == (4, 2)
    assert (full_nodes(settings(spares=1), FIVE), least_nodes(settings(spares=1), FIVE)) == (4, 4)


def test_a_node_that_answers_again_is_used_again() -> None:
    allocation = FIVE.without(["n0", "n1"])
    assert allocation.healthy == ("n2", "n3", "n4")
    assert allocation.with_lost(["n1"]).healthy == ("n0", "n2", "n3", "n4")


def test_no_placement_uses_a_lost_node_or_the_wrong_number() -> None:
    for lost, avoided in itertools.product(itertools.combinations(FIVE.nodes, 2), repeat=2):
        allocation = FIVE.without(lost).avoiding(avoided)
        placement = place(settings(4, 3, 2, 1), allocation)
        assert placement is not None and placement.shape is not None
        assert len(placement.nodes) == placement.shape.nodes == 3
        assert not set(placement.nodes) & set(lost)
        assert list(placement.nodes) == sorted(placement.nodes)


SRUN = ("srun", "--nodes=4", "--ntasks=32", "--cpus-per-task=4", "python", "-m", "t", "train.json")


def test_what_srun_is_told() -> None:
    assert place_command(SRUN, Placement(shape(4), ())) == list(SRUN)
    spare = place_command(SRUN, Placement(shape(4), ("n0", "n2", "n3", "n4")))
    assert spare == ["srun", "--nodelist=n0,n2,n3,n4", *SRUN[1:]]
    fewer = place_command(SRUN, Placement(shape(2), ("n0", "n3")))
    assert fewer[:4] == ["srun", "--nodelist=n0,n3", "--nodes=2", "--ntasks=16"]
    assert fewer[-1] == "train-n000002.json"
    assert place_command(SRUN, Placement(None, ())) == list(SRUN)
    agents = ["--nnodes=4", "--nproc-per-node=8"]
    fewer = place_command([*SRUN[:-1], *agents, SRUN[-1]], Placement(shape(2), ("n0", "n3")))
    assert fewer[:4] == ["srun", "--nodelist=n0,n3", "--nodes=2", "--ntasks=2"]
    assert fewer[-3:] == ["--nnodes=2", "--nproc-per-node=8", "train-n000002.json"]
    beside = place_command(SRUN, Placement(shape(4), ("n0", "n1", "n2", "n4"), overlap=True))
    assert beside[:3] == ["srun", "--nodelist=n0,n1,n2,n4", "--overlap"]
