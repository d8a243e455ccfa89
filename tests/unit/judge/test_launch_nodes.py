"""Which nodes a launch gets: spares, fewer nodes, nodes to avoid; and what srun is told."""

from __future__ import annotations

import itertools
import random

import pytest
from launch_evidence import config

from hpctrain.judge.launch_nodes import (
    Allocation,
    NodePlacement,
    Placement,
    details,
    full_nodes,
    host_file_lines,
    judge_placement,
    least_nodes,
    order_by_leaf,
    place,
    place_command,
    summary,
)
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig, TopologySettings

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


# Where the nodes of a job are, the order of ranks on them, and which groups it keeps together.


def topology(*groups: tuple[str, int, int], **others: object) -> TopologySettings:
    """Groups as (axis, stride, ranks), on nodes of four GPUs in blocks."""
    listed = [{"axis": axis, "stride": stride, "ranks": ranks} for axis, stride, ranks in groups]
    values = {"plugin": "block", "gpus_per_node": 4, "groups": listed, **others}
    return TopologySettings.model_validate(values)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(count))


def alternating(count: int, leaves: int = 2) -> dict[str, str]:
    return {node: f"rack{number % leaves}" for number, node in enumerate(names(count))}


def judged(
    settings: TopologySettings, count: int, leaves: dict[str, str], spares: int = 0
) -> NodePlacement:
    return judge_placement(settings, names(count + spares), leaves, count)


def outside(placement: NodePlacement) -> list[tuple[int, int]]:
    """Of each axis the groups outside in Slurm's order and in the launch's."""
    pairs = zip(placement.slurm, placement.launch, strict=True)
    return [(own.outside, now.outside) for own, now in pairs]


def test_interleaved_racks_are_put_in_order() -> None:
    placement = judged(topology(("tp", 1, 8), ("ep", 1, 16)), 8, alternating(8))
    assert placement.nodes == ("n0", "n2", "n4", "n6", "n1", "n3", "n5", "n7")
    assert placement.reordered and outside(placement) == [(4, 0), (2, 0)]
    assert placement.per_leaf == (("rack0", 4), ("rack1", 4))
    assert (placement.slurm_borders, placement.launch_borders) == (7, 1)
    assert summary(topology(), placement) == (
        "8 nodes in 2 blocks; ranks follow them instead of the names of nodes"
    )


def test_the_order_of_slurm_stays_where_another_gains_nothing() -> None:
    rows = {node: f"rack{number // 4}" for number, node in enumerate(names(8))}
    placement = judged(topology(("ep", 1, 16)), 8, rows)
    assert placement.nodes == names(8) and not placement.reordered
    alone = judged(topology(), 8, alternating(8))
    assert alone.nodes == names(8), "no group relies on racks"
    thin = judged(topology(thin_uplinks=True), 8, alternating(8))
    assert thin.reordered, "but rings cross fewer borders"


def test_racks_without_whole_groups_are_said_with_the_price() -> None:
    """Five nodes in one rack, three in the other: one group of two nodes has to be cut."""
    leaves = {node: "rack0" if number in (0, 2, 4, 6, 7) else "rack1" for number, node in
              enumerate(names(8))}  # fmt: skip
    settings = topology(("tp", 1, 8), step_seconds=2.0, scattered_step_seconds=3.5)
    placement = judged(settings, 8, leaves)
    assert outside(placement) == [(3, 1)]
    assert placement.nodes == ("n0", "n2", "n4", "n6", "n1", "n3", "n7", "n5")
    words = summary(settings, placement)
    assert "1 of 4 groups of tp 8 leave their block" in words
    assert "a step takes up to 3.5 s instead of 2 s" in words
    assert details(settings, placement) == (
        "nodes per block: rack0: 5, rack1: 3",
        "tp 8: 3 of 4 groups outside in Slurm's order, 1 in the launch's",
        "neighbouring nodes apart: 6 in Slurm's order, 3 in the launch's",
    )
    unpriced = settings.model_copy(update={"step_seconds": None})
    assert "by the plan's model" not in summary(unpriced, placement)


def test_spare_nodes_are_those_that_no_group_needs() -> None:
    """Two racks of 18 nodes for two groups of 16: the first 32 by name would cut one."""
    leaves = {node: f"rack{number // 18}" for number, node in enumerate(names(36))}
    placement = judged(topology(("ep", 1, 64)), 32, leaves, spares=4)
    assert set(placement.nodes) == set(names(36)) - {"n16", "n17", "n34", "n35"}
    assert outside(placement) == [(1, 0)]


def test_nodes_that_slurm_does_not_know_are_leaves_of_their_own() -> None:
    placement = judged(topology(("tp", 1, 8)), 4, {"n0": "rack0", "n3": "rack0"})
    assert placement.nodes == ("n0", "n3", "n1", "n2")
    assert outside(placement) == [(2, 1)]
    assert placement.per_leaf == (("n1", 1), ("n2", 1), ("rack0", 2))


def test_axes_of_another_size_of_launch_are_left_out() -> None:
    placement = judged(topology(("tp", 1, 8), ("pp", 8, 2), ("dp", 4, 3)), 4, alternating(4))
    assert [one.axis for one in placement.launch] == ["tp", "pp"]


@pytest.mark.parametrize("seed", range(20))
def test_no_order_is_worse_than_slurms(seed: int) -> None:
    chance = random.Random(seed)
    leaves = {node: f"rack{chance.randrange(4)}" for node in names(16)}
    settings = topology(("tp", 1, 8), ("cp", 8, 2), ("ep", 1, 32))
    order = order_by_leaf(settings, names(16), leaves)
    assert sorted(order) == sorted(names(16))
    placement = judged(settings, 16, leaves)
    assert sum(now for _, now in outside(placement)) <= sum(own for own, _ in outside(placement))


ARGV = ["srun", "--nodes=4", "--ntasks=16", "--ntasks-per-node=4", "--distribution=block:block",
        "--cpus-per-task=8", "python", "train.json"]  # fmt: skip


def test_a_launch_in_an_order_of_its_own() -> None:
    planned = LaunchShape(nodes=4, tasks=16, train_config="train.json")
    changes = {"shapes": (planned,), "topology": topology(("tp", 1, 8))}
    settings = config().model_copy(update=changes)
    allocation = Allocation(names(4), leaves=alternating(4))
    placement = place(settings, allocation)
    assert placement is not None and placement.nodes == ("n0", "n2", "n1", "n3")
    argv = place_command(ARGV, placement)
    assert "--distribution=arbitrary" in argv and "--cpu-bind=none" in argv
    refused = ("--distribution=block", "--nodelist", "--nodes")
    assert not any(word.startswith(refused) for word in argv)
    lines = host_file_lines(argv, placement)
    assert lines == [node for node in ("n0", "n2", "n1", "n3") for _ in range(4)]
    unknown = place(settings, Allocation(names(4)))
    assert unknown is not None and place_command(ARGV, unknown) == ARGV
    sorted_racks = {"n0": "a", "n1": "a", "n2": "b", "n3": "b"}
    usual = place(settings, Allocation(names(4), leaves=sorted_racks))
    assert usual is not None and place_command(ARGV, usual) == ARGV, "ranks stay bound"


def test_what_is_left_after_a_loss_is_ordered_again() -> None:
    small = LaunchShape(nodes=2, tasks=8, train_config="train-n000002.json")
    planned = LaunchShape(nodes=4, tasks=16, train_config="train.json")
    changes = {"shapes": (planned, small), "topology": topology(("tp", 1, 8))}
    settings = config().model_copy(update=changes)
    leaves = {"n0": "a", "n1": "b", "n2": "a", "n3": "b"}
    placement = place(settings, Allocation(names(4), frozenset({"n3"}), leaves=leaves))
    assert placement is not None and placement.nodes == ("n0", "n2")
