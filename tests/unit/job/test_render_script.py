"""What a script asks Slurm for, and the order of its parts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned_job import planned_job
from specimen_scripts import (
    PROFILE,
    PYTHON,
    ROOT,
    SPEC,
    directives,
    profile_with,
    render,
    spec_with,
)

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.render.environment import submit_variables
from hpctrain.job.render.script import logs_by
from hpctrain.plan.planner import make_plan
from hpctrain.sandbox.shape import shape_from_profile
from hpctrain.spec.catalogue import find_gpu
from hpctrain.spec.loader import find_profile, load_catalogue, load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import FabricVariable
from hpctrain.spec.run import RunSpec

A100 = load_profile(find_profile("a100x64")).document
GPT175B = load_run_spec(ROOT / "examples/gpt175b.yaml").document


SCRIPTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (given, due)
    for name, given, due in yaml.safe_load(Path(__file__).with_name("scripts.yaml").read_text())
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str) -> None:
    given, due = SCRIPTS[name]
    spec, profile = spec_with(**given.get("spec", {})), profile_with(**given.get("profile", {}))
    if "refused" in due:
        with pytest.raises(InvalidInputError, match=re.escape(due["refused"])):
            render(spec, profile)
        return
    script = render(spec, profile)
    found, command = directives(script), script[script.index("\nexec ") :]
    assert set(due.get("sbatch", ())) <= set(found)
    assert not [line for line in found if line.startswith(tuple(due.get("none", ())))]
    assert set(due.get("srun", ())) <= set(command.split())
    assert all(text in script for text in due.get("text", ()))
    assert not [text for text in due.get("lacks", ()) if text in script]
    assert all(script.count(text) == 1 for text in due.get("once", ()))


@pytest.mark.parametrize(
    ("request_style", "expected"),
    [
        ("gres", "--gres=gpu:2"),
        ("gres-typed", "--gres=gpu:a100:2"),
        ("gpus-per-node", "--gpus-per-node=2"),
        ("gpus-per-node-typed", "--gpus-per-node=a100:2"),
        ("gpus-per-task", "--gpus-per-task=1"),
        ("none", None),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(request_style: str, expected: str | None) -> None:
    found = directives(render(profile=profile_with(slurm={"gpu_request": request_style})))
    assert [line for line in found if "gpu" in line] == ([expected] if expected else [])


def test_a_type_has_the_name_that_slurm_gives_it() -> None:
    for style, line in (
        ("gres-typed", "--gres=gpu:a100_3g.20gb:2"),
        ("gpus-per-node-typed", "--gpus-per-node=a100_3g.20gb:2"),
    ):
        site = profile_with(gpu={"gres": "a100_3g.20gb"}, slurm={"gpu_request": style})
        assert line in directives(render(profile=site))
        assert shape_from_profile(site).gpu_type == "a100_3g.20gb"
        assert make_plan(SPEC, site).memory == make_plan(SPEC, PROFILE).memory


@pytest.mark.parametrize(
    ("continuation", "expected"), [("requeue", "--requeue"), ("none", "--no-requeue")]
)
def test_continuation(continuation: str, expected: str) -> None:
    profile = PROFILE.model_copy(update={"continuation": continuation})
    assert expected in directives(render(profile=profile))


def test_only_named_variables_leave_the_submitting_shell() -> None:
    spec = spec_with(environment={"inherit": ["WANDB_API_KEY"]})
    script = render(spec)
    assert "--export" not in "".join(directives(script)), "Slurm would run a login shell"
    named = submit_variables(planned_job(spec, PROFILE))
    assert named == ("HOME", "LANG", "PATH", "USER", "WANDB_API_KEY")
    assert "only HOME, LANG, PATH, USER, WANDB_API_KEY." in script.replace("\n# ", " ")
    everything = profile_with(slurm={"export": "all"})
    assert submit_variables(planned_job(spec, everything)) is None
    assert "--export" not in "".join(directives(render(spec, everything)))


def test_a_site_names_variables_of_a_login_that_its_jobs_need() -> None:
    site = profile_with(slurm={"inherit": ["SCRATCH"]})
    spec = spec_with(environment={"inherit": ["WANDB_API_KEY", "SCRATCH"]})
    assert submit_variables(planned_job(spec, site)) == (
        *("HOME", "LANG", "PATH", "USER"),
        *("SCRATCH", "WANDB_API_KEY"),
    )
    container = {"launcher": "pyxis", "image": "$SCRATCH/pt.sqsh"}
    script = render(
        SPEC, profile_with(slurm={"inherit": ["SCRATCH"]}, software={"container": container})
    )
    (passed,) = [line for line in script.splitlines() if "--container-env=" in line]
    assert "SCRATCH" in passed.partition("=")[2].split(" ")[0].split(",")
    with pytest.raises(InvalidInputError, match="inherit nothing at"):
        render(SPEC, profile_with(slurm={"inherit": ["SCRATCH"], "export": "none"}))


WHOLE, HALF = spec_with(), spec_with(resources={"gpus": 1}, parallel={"tp": 1, "pp": 1})


@pytest.mark.parametrize(
    ("slurm", "whole", "part"),
    [
        ({"memory": "auto"}, "--mem=0", "--mem=7680M"),
        ({"memory": "share"}, "--mem=15360M", "--mem=7680M"),
        ({"memory": "none"}, None, None),
        ({"memory": "auto", "memory_per_gpu": "3GiB"}, *["--mem-per-gpu=3072M"] * 2),
    ],
)
def test_a_part_of_a_node_never_takes_all_its_memory(
    slurm: dict[str, object], whole: str | None, part: str | None
) -> None:
    profile = profile_with(nodes={"memory": "15GiB"}, slurm=slurm)
    for spec, expected in ((WHOLE, whole), (HALF, part)):
        found = [line for line in directives(render(spec, profile)) if line.startswith("--mem")]
        assert found == ([expected] if expected else [])


SHARDED = spec_with(engine={"name": "fsdp"}, parallel={"tp": 1, "pp": 1}, resources={"gpus": 4})


def test_a_variable_of_one_engine_is_not_in_scripts_of_others() -> None:
    own = FabricVariable(name="OWN", value="1", reason="for one engine", engines=("megatron",))
    profile = profile_with().model_copy(update={"environment": (*A100.environment, own)})
    assert "export OWN=1" in render(profile=profile)
    assert "export OWN=1" not in render(SHARDED, profile)
    assert "export NCCL_DEBUG=WARN" in render(SHARDED, profile)


@pytest.mark.parametrize(
    ("gpu", "engine", "model_parallel", "connections"),
    [
        ("a100", "megatron", True, "1"),
        ("h100", "megatron", False, "8"),
        ("b200", "megatron", True, "32"),
        ("gb200", "megatron-lm", False, "32"),
        ("h100", "fsdp", False, None),
    ],
)
def test_the_catalogue_sets_what_a_generation_wants(
    gpu: str, engine: str, model_parallel: bool, connections: str | None
) -> None:
    catalogue = load_catalogue()
    found = catalogue.variables_for(find_gpu(catalogue, gpu), engine, model_parallel=model_parallel)
    values = {variable.name: variable.value for variable in found}
    assert len(values) == len(found), "each variable once"
    assert values.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    assert values["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert ("NVTE_FWD_LAYERNORM_SM_MARGIN" in values) == (engine != "fsdp" and gpu != "a100")


def test_profile_and_spec_win_over_the_catalogue() -> None:
    catalogue = load_catalogue()
    wanted = catalogue.variables_for(find_gpu(catalogue, "h100"), "megatron", model_parallel=True)
    script = render(gpu_variables=wanted)
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    site = FabricVariable(name="CUDA_DEVICE_MAX_CONNECTIONS", value="4", reason="of the site")
    profile = PROFILE.model_copy(update={"environment": (site,)})
    script = render(profile=profile, gpu_variables=wanted)
    assert script.count("export CUDA_DEVICE_MAX_CONNECTIONS=") == 1
    assert "# of the site\nexport CUDA_DEVICE_MAX_CONNECTIONS=4" in script
    own = spec_with(environment={"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}})
    script = render(own, profile, gpu_variables=wanted)
    assert script.count("export CUDA_DEVICE_MAX_CONNECTIONS=") == 1
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=2" in script


def exports(script: str) -> list[str]:
    names = r"\w+_SOCKET_IFNAME|HPCTRAIN_INTERFACE"
    return re.findall(rf"^export ((?:{names})=.*)$", script, re.MULTILINE)


def test_the_interface_between_nodes() -> None:
    network = PROFILE.network.model_copy(update={"interface": "ib"})
    plain = PROFILE.model_copy(update={"environment": (), "network": network})
    both = ["NCCL_SOCKET_IFNAME=ib", "HPCTRAIN_INTERFACE=ib"]
    assert exports(render(profile=plain)) == both
    own = spec_with(environment={"variables": {"GLOO_SOCKET_IFNAME": "lo"}})
    assert exports(render(own, plain)) == [both[0], "GLOO_SOCKET_IFNAME=lo"]
    alone = spec_with(resources={"gpus": 2}, parallel={"tp": 2, "pp": 1})
    assert exports(render(alone, plain)) == [], "one node has no traffic between nodes"
    none = profile_with(network={"interface": None}).model_copy(update={"environment": ()})
    assert exports(render(profile=none)) == []


def test_a_variable_of_the_site_comes_before_the_interface() -> None:
    assert exports(render()) == ["GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo"]
    listed = FabricVariable(name="NCCL_SOCKET_IFNAME", value="^docker0", reason="no bridge")
    site = PROFILE.model_copy(update={"environment": (listed,)})
    assert exports(render(profile=site)) == [
        "NCCL_SOCKET_IFNAME='^docker0'",
        "HPCTRAIN_INTERFACE=lo",
    ]


def test_a_container_gets_the_interface() -> None:
    container = {"launcher": "pyxis", "image": "image.sqsh"}
    script = render(profile=profile_with(software={"container": container}))
    (names,) = re.findall(r"--container-env=(\S+)", script)
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= set(names.split(","))


def test_order_of_the_parts() -> None:
    profile = profile_with(software={"modules": {"load": ["cuda/12.4"]}})
    script = render(profile=profile)
    marks = ["#SBATCH", "trap '' USR1", "module load", "set -euo pipefail", "export ", "exec "]
    assert [script.index(mark) for mark in marks] == sorted(script.index(mark) for mark in marks)


def test_a_container_gets_every_variable_that_a_rank_reads() -> None:
    """pyxis keeps the image's own value of a variable that is not listed."""
    container = {"launcher": "pyxis", "image": "image.sqsh"}
    script = render(profile=profile_with(software={"container": container}))
    (names,) = re.findall(r"--container-env=(\S+)", script)
    source = (ROOT / "hpctrain/train/rank_environment.py").read_text()
    read = set(re.findall(r'"(HPCTRAIN_[A-Z_]+)"', source))
    assert "HPCTRAIN_SPEED_CHECK" in read and read <= set(names.split(","))


# -- One task per GPU, or one agent per node: what sbatch and srun are told, and what is said ---


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
