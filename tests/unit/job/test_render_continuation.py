"""The modes of going on, spare nodes and ranges of nodes: what is asked for, said and refused."""

from __future__ import annotations

import pytest
from specimen_scripts import PROFILE, profile_with, render, spec_with

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.render.job_options import continuation_line, continuation_problems
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile, PreemptionProfile
from hpctrain.spec.run import RunSpec

DIRECTIVE = "#SBATCH "


def directives(script: str) -> list[str]:
    lines = script.splitlines()
    return [line.removeprefix(DIRECTIVE) for line in lines if line.startswith(DIRECTIVE)]


def site(mode: str, **more: object) -> ClusterProfile:
    return PROFILE.model_copy(update={"continuation": mode, "continuation_jobs": 5, **more})


MODES = {
    "requeue": ({"--requeue", "--output=logs/slurm-%j.out"}, "Slurm restarts the same job"),
    "chain": ({"--no-requeue", "--output=logs/slurm-%j.out"}, "each job submits the next one"),
    "singleton": (
        {"--no-requeue", "--dependency=singleton", "--job-name=gpt-tiny-0000"},
        "5 jobs of one name",
    ),
    "array": (
        {"--no-requeue", "--array=1-5%1", "--output=logs/slurm-%A_%a.out"},
        "an array of 5 jobs",
    ),
    "none": ({"--no-requeue", "--output=logs/slurm-%j.out"}, "`hpctrain resume` goes on"),
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_asks_for_what_it_needs_and_for_nothing_else(mode: str) -> None:
    expected, words = MODES[mode]
    script = render(profile=site(mode))
    found = set(directives(script))
    assert expected <= found
    special = ("--requeue", "--no-requeue", "--dependency", "--array")
    assert {line for line in found if line.startswith(special)} == {
        line for line in expected if line.startswith(special)
    }
    comments = " ".join(line.removeprefix("# ") for line in script.splitlines())
    assert f"Continuation {mode}, from profile sandbox" in comments and words in comments
    told = script[script.index("# Continuation") : script.index("\nexec ")]
    assert max(map(len, told.splitlines())) <= 100


def partition(mode: str, grace: float) -> PartitionProfile:
    preemption = PreemptionProfile.model_validate({"mode": mode, "grace": f"{grace}s"})
    return PROFILE.slurm.partitions[0].model_copy(update={"preemption": preemption})


def test_the_line_says_mode_meaning_and_source() -> None:
    a100 = load_profile(find_profile("a100x64")).document
    line = continuation_line(a100, a100.slurm.partitions[0])
    assert line == "requeue: Slurm restarts the same job; profile a100x64"


@pytest.mark.parametrize(
    ("mode", "preemption", "grace", "refused"),
    [
        ("requeue", "cancel", 0, True),
        ("requeue", "cancel", 60, False),
        ("requeue", "requeue", 0, False),
        ("requeue", "off", 0, False),
        ("chain", "cancel", 0, False),
        ("none", "cancel", 0, False),
    ],
)
def test_requeue_where_slurm_cancels(mode: str, preemption: str, grace: int, refused: bool) -> None:
    place = partition(preemption, grace)
    assert bool(continuation_problems(site(mode), place)) is refused
    in_grace = "within the grace of 60 s" in continuation_line(site(mode), place)
    assert in_grace is (mode == "requeue" and preemption == "cancel" and grace == 60)


def test_submit_refuses_what_slurm_would_never_do() -> None:
    partitions = [{"name": "train", "default": True, "preemption": {"mode": "cancel"}}]
    profile = profile_with(slurm={"partitions": partitions})
    with pytest.raises(InvalidInputError, match="use chain, singleton or array"):
        render(profile=profile)


# -- spare nodes and fewer nodes --------------------------------------------------------------


def elastic(**resources: object) -> RunSpec:
    """Two nodes of two GPUs."""
    layout: dict[str, object] = {"tp": 1, "pp": 2}
    return spec_with(resources={"gpus": 4, **resources}, parallel=layout)


def test_without_spare_nodes_everything_is_exact() -> None:
    found = directives(render(elastic()))
    assert {"--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4"} <= set(found)
    assert "--no-kill" not in found


def test_spare_nodes_are_allocated_and_srun_keeps_its_number() -> None:
    script = render(elastic(spare_nodes=1))
    found = directives(script)
    assert {"--nodes=3", "--ntasks-per-node=2", "--no-kill"} <= set(found)
    assert "--nodes=2 \\" in script and "--ntasks=4 \\" in script


@pytest.mark.parametrize(("spare", "most"), [(0, 2), (1, 3)])
def test_a_range_of_nodes_tells_sbatch_no_tasks(spare: int, most: int) -> None:
    script = render(elastic(min_nodes=1, spare_nodes=spare))
    found = directives(script)
    assert {f"--nodes=1-{most}", "--cpus-per-task=8", "--no-kill"} <= set(found)
    assert not [line for line in found if line.startswith("--ntasks")]
    srun = script[script.index("exec ") :]
    assert "--ntasks-per-node=2" in srun and "--cpus-per-task=4" in srun


def test_min_nodes_equal_to_all_nodes_is_no_range() -> None:
    found = directives(render(elastic(min_nodes=2)))
    assert "--nodes=2" in found and "--no-kill" not in found


def test_gpus_per_task_need_a_number_of_tasks() -> None:
    profile = profile_with(slurm={"gpu_request": "gpus-per-task"})
    assert "--gpus-per-task=1" in directives(render(elastic(), profile))
    found = directives(render(elastic(min_nodes=1), profile))
    assert "--gpus-per-node=2" in found
    assert not [line for line in found if line.startswith("--gpus-per-task")]


def test_leaves_are_enough_for_the_spare_nodes() -> None:
    switches = {"plugin": "tree", "nodes_per_leaf": 2}
    network = {"network": {"switches": switches}, "nodes": {"count": 8}}
    profile = profile_with(**network)  # type: ignore[arg-type]
    leaves = [
        [line for line in directives(render(spec, profile)) if line.startswith("--switches")]
        for spec in (elastic(), elastic(spare_nodes=1))
    ]
    assert leaves == [["--switches=1@00:05:00"], ["--switches=2@00:05:00"]]


def test_spare_nodes_where_slurm_counts_the_nodes_of_each_island() -> None:
    islands = [
        {"nodes": 1, "uplink": "100Gb/s", "feature": "east"},
        {"nodes": 1, "uplink": "100Gb/s", "feature": "west"},
        {"nodes": 2, "uplink": "100Gb/s", "feature": "south"},
    ]
    network = {"nic_bandwidth": "100Gb/s", "islands": islands}
    profile = profile_with(network=network)
    spec = spec_with(resources={"gpus": 6}, parallel={"tp": 1, "pp": 1}, batch={"global": 24})
    assert any("*" in line for line in directives(render(spec, profile)))
    spare = spec_with(
        resources={"gpus": 6, "spare_nodes": 1}, parallel={"tp": 1, "pp": 1}, batch={"global": 24}
    )
    with pytest.raises(InvalidInputError, match="plan the run on one island"):
        render(spare, profile)
