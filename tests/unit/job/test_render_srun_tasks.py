"""One task per GPU, or one agent per node: what sbatch and srun are told, and what is said."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planned_job import planned_job
from specimen_scripts import PROFILE, PYTHON, SPEC, profile_with, render, spec_with

from hpctrain.job.render.script import logs_by
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

TP2 = {"tp": 2, "pp": 1}
FIXED = {"gpus": 4}
RANGE = {"gpus": 4, "min_nodes": 1}
LONG = {"per": "ntasks-per-node", "cpus": "cpus-per-task"}


def told(resources: dict[str, object], launcher: str) -> RunSpec:
    spec = spec_with(resources={"cpus_per_gpu": 3, **resources}, parallel=TP2)
    return RunSpec.model_validate(
        {**spec.model_dump(mode="json", by_alias=True), "launcher": launcher}
    )


def options(script: str) -> tuple[set[str], set[str]]:
    """Options about nodes, tasks and CPUs: of sbatch, and of srun."""
    wanted = re.compile(r"--(?:nodes|ntasks[a-z-]*|cpus-per-task)=(?:\S+)")
    head, _, command = script.partition("  srun \\\n")
    return set(wanted.findall(head)), set(wanted.findall(command))


@pytest.mark.parametrize(
    ("launcher", "resources", "of_sbatch", "of_srun"),
    [
        ("srun", FIXED, "nodes=2 ntasks-per-node=2 cpus=3", "nodes=2 ntasks=4 per=2 cpus=3"),
        ("srun", RANGE, "nodes=1-2 cpus=6", "nodes=2 ntasks=4 per=2 cpus=3"),
        ("torchrun", FIXED, "nodes=2 ntasks-per-node=1 cpus=6", "nodes=2 ntasks=2 per=1 cpus=6"),
        ("torchrun", RANGE, "nodes=1-2 cpus=6", "nodes=2 ntasks=2 per=1 cpus=6"),
    ],
)
def test_tasks(launcher: str, resources: dict[str, object], of_sbatch: str, of_srun: str) -> None:
    expected = tuple(
        {f"--{LONG.get(name, name)}={value}" for name, value in map(pair, words.split())}
        for words in (of_sbatch, of_srun)
    )
    assert options(render(told(resources, launcher))) == expected


def comments(script: str) -> str:
    """The text of the comments, whatever their line breaks."""
    return " ".join(line[2:] for line in script.splitlines() if line.startswith("# "))


def pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def test_the_command_and_the_logs_of_agents() -> None:
    script = render(told(RANGE, "torchrun"))
    words = script.split("--output=")[-1]
    assert words.startswith('"$HPCTRAIN_LOGS/step%s-node%4t.log" \\\n')
    command = f"  {PYTHON} -m hpctrain.train.agent --nnodes=2 --nproc-per-node=2 train.json\n"
    assert words.endswith(command)
    assert "A launch has 1 to 2 nodes" in comments(script) and "no torchrun" not in script
    assert "A launch has" not in comments(render(told(FIXED, "torchrun")))


def test_below_srun_nobody_speaks_of_agents() -> None:
    script = render(told(RANGE, "srun"))
    assert "# One task per GPU, no torchrun." in script
    assert "step%s-rank%4t.log" in script
    assert "agent" not in script and "--nnodes" not in script


def test_a_spare_node_is_no_part_of_the_range() -> None:
    script = render(told({**RANGE, "spare_nodes": 1}, "torchrun"))
    assert "#SBATCH --nodes=1-3\n" in script
    assert "A launch has 1 to 2 nodes" in comments(script) and "--nnodes=2 " in script


def test_gpus_of_an_agent_are_those_of_its_node() -> None:
    profile = profile_with(slurm={"gpu_request": "gpus-per-task"})
    assert "#SBATCH --gpus-per-task=1\n" in render(told(FIXED, "srun"), profile)
    script = render(told(FIXED, "torchrun"), profile)
    assert "#SBATCH --gpus-per-node=2\n" in script and "gpus-per-task" not in script


@pytest.mark.parametrize("launcher", ["pyxis", "apptainer"])
def test_agents_run_in_the_container(launcher: str) -> None:
    container = {"launcher": launcher, "image": "/images/train.sqsh", "python": "python3.11"}
    values = PROFILE.model_dump(mode="json", by_alias=True)
    values["software"] = {"container": container}
    script = render(told(FIXED, "torchrun"), ClusterProfile.model_validate(values))
    assert "python3.11 -m hpctrain.train.agent --nnodes=2 " in script


@pytest.mark.parametrize(
    ("launcher", "files", "output", "label", "agent_words"),
    [
        ("srun", "auto", "step%s-rank%4t.log", False, ""),
        ("srun", "rank", "step%s-rank%4t.log", False, ""),
        ("srun", "node", "step%s-node%4n.log", True, ""),
        ("torchrun", "auto", "step%s-node%4t.log", False, ""),
        ("torchrun", "node", "step%s-node%4n.log", False, " --logs=node"),
    ],
)
def test_logs_by_rank_or_by_node(
    launcher: str, files: str, output: str, label: bool, agent_words: str
) -> None:
    spec = told(FIXED, launcher)
    values = spec.model_dump(mode="json", by_alias=True)
    values["logging"]["files"] = files
    script = render(RunSpec.model_validate(values))
    assert f'--output="$HPCTRAIN_LOGS/{output}" \\\n' in script
    assert ("    --label \\\n" in script) is label
    assert (f"--nproc-per-node=2{agent_words} train.json" in script) is (launcher == "torchrun")
    by_node = files == "node"
    assert ("each line of a rank begins with its number" in comments(script)) is by_node


@pytest.mark.parametrize(("ranks", "kind"), [(64, "rank"), (65, "node"), (16384, "node")])
def test_above_64_ranks_each_node_has_a_log(ranks: int, kind: str) -> None:
    job = planned_job(SPEC, PROFILE)
    layout = job.plan.layout.model_copy(update={"dp": 1, "tp": ranks, "pp": 1, "cp": 1})
    assert layout.world_size == ranks
    plan = job.plan.model_copy(update={"layout": layout})
    assert logs_by(replace(job, plan=plan)) == kind
