"""Shapes that make no sense are refused with the name of what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.sandbox.shape import FeatureShape, PartitionShape, SwitchShape, default_shape

TRAIN = PartitionShape("train", default=True)
LEAF = SwitchShape("leaf", nodes=("n0", "n1", "n2", "n3"))


def test_names_of_nodes() -> None:
    assert default_shape(nodes=3).node_names == ("n0", "n1", "n2")
    assert default_shape(nodes=3).node_range == "n[0-2]"
    assert default_shape(nodes=1).node_range == "n0"
    assert replace(default_shape(nodes=2), node_prefix="gpu").node_range == "gpu[0-1]"


def test_urgent_outranks_train_by_default() -> None:
    train, urgent = default_shape(grace_seconds=7).partitions
    assert (train.name, train.preempt_mode, train.grace_seconds) == ("train", "REQUEUE", 7)
    assert train.default
    assert (urgent.name, urgent.preempt_mode) == ("urgent", "OFF")
    assert urgent.priority_tier > train.priority_tier


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes": 0}, "1 to 1024 nodes, not 0"),
        ({"nodes": 1025}, "not 1025"),
        ({"gpus_per_node": -1}, "negative"),
        ({"cpus_per_node": 0}, "CPU"),
        ({"preempt_type": "none", "user_signal_on_preempt": True}, "without preemption"),
        ({"partitions": (TRAIN, TRAIN)}, "partition train occurs twice"),
        ({"partitions": (PartitionShape("a"),)}, "exactly one"),
        ({"partitions": (TRAIN, PartitionShape("b", default=True))}, "exactly one"),
        ({"cluster_name": "Two Words"}, "not a name of a cluster"),
        ({"features": (FeatureShape("east", 3),)}, "must be those of all its nodes"),
        ({"switches": (LEAF, LEAF)}, "switch leaf occurs twice"),
        ({"switches": (SwitchShape("leaf"),)}, "either nodes or switches"),
        ({"switches": (replace(LEAF, nodes=("n0", "n7")),)}, "unknown n7"),
        ({"switches": (replace(LEAF, nodes=("n0", "n1")),)}, "no switch leads to n2, n3"),
        ({"switches": (LEAF, SwitchShape("other", nodes=("n0",)))}, "two switches: n0"),
        ({"switches": (LEAF, SwitchShape("spine", switches=("leaf9",)))}, "unknown leaf9"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        replace(default_shape(nodes=4), **change)


def test_a_tree_of_leaves_and_spines_is_accepted() -> None:
    leaves = (SwitchShape("l0", nodes=("n0", "n1")), SwitchShape("l1", nodes=("n2", "n3")))
    spine = SwitchShape("spine", switches=("l0", "l1"))
    assert replace(default_shape(nodes=4), switches=(*leaves, spine)).switches[-1] == spine
