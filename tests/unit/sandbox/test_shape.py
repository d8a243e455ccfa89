"""Shapes that make no sense are refused with the name of what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.sandbox.shape import (
    PartitionShape,
    SandboxShape,
    SiteShape,
    SwitchShape,
    default_shape,
    shape_from_profile,
)
from hpctrain.spec.loader import find_profile, load_profile

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
        ({"groups": (default_shape(nodes=3).usual_nodes,)}, "must be those of all its nodes"),
        (
            {"threads_per_core": 3},
            "8 CPUs of a node do not divide into 1 sockets of cores with 3 threads",
        ),
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


# -- A sandbox in the shape of a profile --------------------------------------------------------


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
    islands = shape("islands10b").groups
    assert [(group.nodes, group.features) for group in islands] == [(4, ("east",)), (4, ("west",))]
    assert shape("a100x64").groups == ()


def edited(
    base: str, changes: dict[str, Any], place: Path, nodes: int | None = None
) -> SandboxShape:
    """The shape of a profile that extends another one."""
    file = place / "own.yaml"
    file.write_text(json.dumps({"extends": base, "name": "own", **changes}))
    return shape_from_profile(load_profile(file).document, nodes)


def test_a_cut_has_some_nodes_of_each_island_and_leaf() -> None:
    islands = shape_from_profile(load_profile(find_profile("islands10b")).document, 3)
    assert [(group.nodes, group.features) for group in islands.groups] == [
        (2, ("east",)),
        (1, ("west",)),
    ]
    big = shape_from_profile(load_profile(find_profile("a100x64")).document, 2)
    assert (big.nodes, [leaf.nodes for leaf in big.switches[:-1]]) == (2, [("gpu0", "gpu1")])


def test_partitions_with_nodes_of_their_own_have_them(tmp_path: Path) -> None:
    own = {
        "name": "h100",
        "constraint": "ndr&[a*2|b*3]",
        "nodes": {"count": 3, "cpus": 112, "threads_per_core": 2, "prefix": "h"},
        "gpu": {"type": "h100", "gres": "H100", "per_node": 4, "memory": "80GiB"},
    }
    some = {"name": "few", "nodes": {"count": 1}}
    changes = {"nodes": {"count": 2}, "slurm": {"partitions": [own, some]}}
    found = edited("sandbox", changes, tmp_path)
    assert found.node_names == ("n0", "n1", "h2", "h3", "h4")
    assert found.node_range == "n[0-1],h[2-4]"
    nodes = {partition.name: partition.nodes for partition in found.partitions}
    assert nodes == {"train": "n[0-1]", "urgent": "n[0-1]", "h100": "h[2-4]", "few": "n0"}
    usual, other = found.node_groups
    assert (usual.cpus, usual.gpu_type, usual.gpus, usual.features) == (8, "a100", 2, ())
    assert (other.cpus, other.threads_per_core, other.memory_mib) == (112, 2, 16000)
    assert (other.gpu_type, other.gpus, other.features) == ("H100", 4, ("ndr", "a", "b"))
    assert edited("sandbox", changes, tmp_path, nodes=1).node_names == ("n0", "h1")


def test_what_every_job_of_a_site_asks_for_is_there(tmp_path: Path) -> None:
    found = edited(
        "sandbox",
        {
            "filesystems": [{"name": "project", "path": "/project", "kind": "lustre",
                             "write_bandwidth": "1GB/s", "read_bandwidth": "1GB/s"}],
            "limits": {"accounts": ["lab"], "qos": ["normal"]},
            "slurm": {
                "account": "lab", "qos": "gpu", "reservation": "maint", "inherit": ["WORK"],
                "constraint": "a100&fast", "data_partition": "cpu",
                "options": {"sbatch": {"licenses": "scratch,ansys:2@server"}},
                "partitions": [{"name": "urgent", "qos": "now", "account": "boss"}],
            },
            "software": {"modules": {"load": ["GCC"]},
                         "container": {"launcher": "apptainer", "image": "/i.sif"}},
        },
        tmp_path,
    )  # fmt: skip
    assert [(group.nodes, group.features) for group in found.groups] == [(4, ("a100", "fast"))]
    assert [partition.name for partition in found.partitions] == ["train", "urgent", "cpu"]
    assert found.licenses == ("scratch:1000", "ansys:1000")
    assert (found.accounts, found.qos) == (("lab", "boss"), ("gpu", "now", "normal"))
    assert found.reserved_as == "maint"
    assert found.site == SiteShape(("GCC",), ("apptainer",), ("WORK",), ("local", "project"))
