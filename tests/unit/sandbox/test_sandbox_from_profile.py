"""A sandbox in the shape of a profile."""

from __future__ import annotations

from hpctrain.sandbox.shape import FeatureShape, SandboxShape, shape_from_profile
from hpctrain.spec.loader import find_profile, load_profile


def shape(name: str) -> SandboxShape:
    return shape_from_profile(load_profile(find_profile(name)).document)


def test_the_big_machine_has_its_leaves_under_one_spine() -> None:
    profile = load_profile(find_profile("a100x64")).document
    big = shape_from_profile(profile)
    assert (big.nodes, big.gpus_per_node, big.gpu_type) == (64, 8, "a100")
    assert [p.name for p in big.partitions] == [p.name for p in profile.slurm.partitions]
    leaves, spine = big.switches[:-1], big.switches[-1]
    assert sum(len(leaf.nodes) for leaf in leaves) == 64
    assert {len(leaf.nodes) for leaf in leaves} == {profile.network.switches.nodes_per_leaf}
    assert spine.switches == tuple(leaf.name for leaf in leaves)


def test_preemption_and_grace_are_taken_over() -> None:
    small = shape("sandbox")
    train, urgent = small.partitions
    assert (train.preempt_mode, train.grace_seconds, train.default) == ("REQUEUE", 20, True)
    assert urgent.priority_tier > train.priority_tier
    assert (small.preempt_type, small.kill_wait_seconds) == ("partition_prio", 5)
    assert small.switches == ()


def test_islands_keep_their_features() -> None:
    assert shape("islands10b").features == (FeatureShape("east", 4), FeatureShape("west", 4))
    assert shape("a100x64").features == ()
