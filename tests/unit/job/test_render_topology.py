"""Which nodes the script asks for: islands by feature, few leaves, whole blocks."""

from __future__ import annotations

from typing import Any

import pytest
from planned_job import planned_job
from specimen_scripts import SPEC, render, spec_with

from hpctrain.job.render.topology import topology_options
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

HALLS = load_profile(find_profile("islands10b")).document
A100 = load_profile(find_profile("a100x64")).document
RACK = load_profile(find_profile("gb200nvl72")).document


def network(profile: ClusterProfile, nodes: int | None = None, **changes: Any) -> ClusterProfile:
    """The profile with another network and perhaps another number of nodes."""
    values = profile.model_dump(mode="json", by_alias=True)
    values["network"] |= changes
    values["nodes"]["count"] = nodes or values["nodes"]["count"]
    return ClusterProfile.model_validate(values)


def islands(*nodes: int, **changes: Any) -> ClusterProfile:
    """Halls of so many nodes, called hall0, hall1 and so on."""
    listed = [
        {"nodes": count, "uplink": "100Gb/s", "feature": f"hall{number}", **changes}
        for number, count in enumerate(nodes)
    ]
    return network(HALLS, sum(nodes), islands=listed)


def run(nodes: int, per_node: int = 8, **parallel: Any) -> RunSpec:
    """The tiny example on so many nodes."""
    gpus = nodes * per_node
    parallel = parallel or {"tp": 1, "pp": 1}
    return spec_with(resources={"gpus": gpus}, parallel=parallel, batch={"global": gpus * 4})


def options(profile: ClusterProfile, spec: RunSpec) -> dict[str, str]:
    found = topology_options(planned_job(spec, profile))
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("nodes", "constraint"),
    [
        (1, None),  # any node will do
        (2, "[east|west]"),
        (4, "[east|west]"),
        (5, "[east*4&west*1]"),
        (6, "[east*3&west*3]"),
        (8, None),  # all nodes, whatever one asks for
    ],
)
def test_halls_by_feature(nodes: int, constraint: str | None) -> None:
    found = options(HALLS, run(nodes))
    assert found == ({"constraint": constraint} if constraint else {})


def test_only_halls_that_are_large_enough() -> None:
    assert options(islands(2, 6, 4), run(3)) == {"constraint": "[hall1|hall2]"}
    assert options(islands(2, 6, 4), run(5)) == {"constraint": "hall1"}
    assert options(islands(2, 6, 4), run(8)) == {"constraint": "[hall1*4&hall2*4]"}


def test_the_features_of_the_site_stay() -> None:
    values = HALLS.model_dump(mode="json", by_alias=True)
    values["slurm"]["constraint"] = "ib"
    profile = ClusterProfile.model_validate(values)
    assert options(profile, run(1)) == {"constraint": "ib"}
    assert options(profile, run(6)) == {"constraint": "ib&[east*3&west*3]"}


def test_islands_without_features_are_left_to_slurm() -> None:
    assert options(islands(4, 4, feature=None), run(6)) == {}


@pytest.mark.parametrize(
    ("nodes", "switches"),
    [(1, None), (2, "1@00:05:00"), (16, "1@00:05:00"), (17, "2@00:05:00"), (48, "3@00:05:00"),
     (49, None), (64, None)],
)  # fmt: skip
def test_few_leaves_of_a_tree(nodes: int, switches: str | None) -> None:
    """a100x64: four leaves of sixteen nodes."""
    found = options(A100, run(nodes))
    assert found == ({"switches": switches} if switches else {})


def test_a_site_says_whether_and_how_long_to_wait_for_leaves() -> None:
    tree = {"plugin": "tree", "nodes_per_leaf": 16}
    patient = network(A100, switches={**tree, "wait": "2h"})
    assert options(patient, run(2)) == {"switches": "1@02:00:00"}
    off = network(A100, switches={**tree, "request": False})
    assert options(off, run(2)) == {}


def test_leaves_are_counted_in_each_island() -> None:
    """Six and six nodes on leaves of four are two leaves each, not three together."""
    profile = islands(8, 8, 8)
    tree = profile.network.model_dump(mode="json") | {
        "switches": {"plugin": "tree", "nodes_per_leaf": 4}
    }
    found = options(network(profile, 24, **tree), run(12))
    assert found == {"constraint": "[hall0*6&hall1*6]", "switches": "4@00:05:00"}


def test_blocks() -> None:
    """The plan has chosen the segment: tests/unit/plan/test_plan_placement.py."""
    racks = network(RACK, 72)  # four racks of 18 nodes with 4 GPUs, 16 of which are counted on
    wide = with_heads(run(32, 4, tp=8, pp=1))
    assert options(racks, wide) == {"segment": "16"}
    assert "#SBATCH --segment=16\n" in render(wide, racks)
    off = {"plugin": "block", "nodes_per_leaf": 18, "request": False}
    assert options(network(racks, switches=off), wide) == {}


def with_heads(spec: RunSpec) -> RunSpec:
    values = spec.model_dump(mode="json", by_alias=True)
    values["model"] |= {"heads": 8, "kv_heads": None}
    return RunSpec.model_validate(values)


def test_leaves_of_a_tree_are_counted_with_their_usable_nodes() -> None:
    tree = {"plugin": "tree", "nodes_per_leaf": 16, "usable_per_leaf": 14}
    site = network(A100, switches=tree)
    assert options(site, run(14)) == {"switches": "1@00:05:00"}
    assert options(site, run(16)) == {"switches": "2@00:05:00"}


def test_the_script_says_where_the_job_goes() -> None:
    script = render(run(6), HALLS)
    assert '#SBATCH --constraint="[east*3&west*3]"' in script
    assert "· nodes of islands 3 + 3\n" in script
    assert "nodes of islands" not in render(run(4), HALLS)
    assert "#SBATCH --switches=1@00:05:00" in render(run(2), A100)


def test_the_script_names_an_unusual_order() -> None:
    both = {"tp": 1, "pp": 2}
    usual = render(run(2, **both), A100)
    assert "order" not in next(line for line in usual.splitlines() if "Layout" in line)
    near = {**both, "order": "tp-cp-ep-pp-dp"}
    (line,) = [text for text in render(run(2, **near), A100).splitlines() if "Layout" in text]
    assert line.endswith("· order tp-cp-ep-pp-dp")


def test_the_trainer_is_told_the_order() -> None:
    from hpctrain.engines.megatron import megatron_config

    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        spec = run(2, tp=1, pp=2, order=order)
        job = planned_job(spec, A100)
        assert job.plan.layout.order == order
        assert megatron_config(job).parallel_order == order
    assert make_plan(SPEC, A100).layout.order == "tp-cp-ep-dp-pp"
