"""Options of Slurm that a site adds: where they stand, what is refused, and quoting once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from planned_job import planned_job
from pydantic import ValidationError
from specimen_scripts import PROFILE, SPEC, directives, profile_with, render, spec_with
from test_render_quoting import run_script, stub

from hpctrain.base.errors import InvalidInputError, LimitError
from hpctrain.job.prepare import prepare
from hpctrain.job.render.job_options import (
    continuation_line,
    continuation_problems,
    topology_options,
)
from hpctrain.plan.planner import make_plan
from hpctrain.slurm.records import JobIdentity, JobRecord
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile, profile_remarks
from hpctrain.spec.profile.slurm import PartitionProfile, PreemptionProfile
from hpctrain.spec.profile.software import FabricVariable
from hpctrain.spec.run import RunSpec
from hpctrain.spec.slurm_options import available_options, owned_options

ROOT = Path(__file__).resolve().parents[3]


def site(sbatch: dict[str, object] | None = None, srun: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
    return profile_with(slurm={"options": {"sbatch": sbatch or {}, "srun": srun or {}}})


def test_options_of_srun_reach_it_with_values_of_the_job(tmp_path: Path) -> None:
    options = {"cpu-bind": "mask_cpu:0xfe,0xfe00", "network": "it's $$5 $HOME", "mpi": "pmix"}
    seen = run_script(tmp_path, render(profile=site(srun=options), python=stub(tmp_path)))
    assert "--cpu-bind=mask_cpu:0xfe,0xfe00" in seen["argv"]
    assert "--network=it's $5 /home-of-nobody" in seen["argv"]
    assert "--mpi=pmix" in seen["argv"] and "--mpi=none" not in seen["argv"]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("sbatch", {"partition": "x"}, "hpctrain sets this itself"),
        ("sbatch", {"export": "ALL"}, "hpctrain sets this itself"),
        ("sbatch", {"account": "other"}, "hpctrain sets this itself"),
        ("sbatch", {"exclusive": "user"}, "hpctrain sets this itself"),
        ("srun", {"distribution": "cyclic"}, "hpctrain sets this itself"),
        ("sbatch", {"no-requeue": True}, "`continuation` is requeue"),
        ("srun", {"container-image": "x"}, "hpctrain sets this itself"),
        ("srun", {"nodelist": "n1"}, "hpctrain sets this itself"),
        ("sbatch", {"cpu-bind": "none"}, "has no such option"),
        ("sbatch", {"licences": "x"}, "has no such option"),
        ("srun", {"auto-resume": 1}, "has no such option"),
        ("sbatch", {"contiguous": False}, "false is no value"),
        ("sbatch", {"mail-user": "$USER"}, "expands no variables"),
        ("srun", {"network": "$(id)"}, "only variables are expanded"),
    ],
)
def test_what_a_site_may_not_add(command: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        profile_with(slurm={"options": {command: options}})


def test_a_wrong_option_is_reported_at_its_place_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    text = "extends: a100x64\nname: own\nslurm:\n  options:\n    sbatch:\n      licences: x\n"
    file.write_text(f"{text}      export: ALL\n")
    with pytest.raises(InvalidInputError) as caught:
        load_profile(file)
    problem = caught.value.problems[0]
    assert (problem.line, "did you mean `licenses`?" in (problem.hint or "")) == (6, True)


# By habit in scripts that people have: hpctrain sets each of them itself, and none is worth a stop.
HABITS: dict[str, dict[str, object]] = {
    "sbatch": {
        "signal": "B:USR1@120", "output": "%x-%j.out", "open-mode": "append", "job-name": "train",
        "requeue": True, "exclusive": True, "nodes": 4, "ntasks-per-node": 4, "chdir": "/work",
    },
    "srun": {
        "wait": 60, "kill-on-bad-exit": 1, "quit-on-interrupt": True, "label": True,
        "unbuffered": True, "error": "x.err", "overlap": True, "exclusive": True,
        "distribution": "block:block", "export": "ALL",
    },
}  # fmt: skip


def test_what_hpctrain_sets_itself_is_left_out_and_said() -> None:
    profile = profile_with(slurm={"exclusive": True, "options": HABITS})
    assert render(profile=profile) == render(profile=profile_with(slurm={"exclusive": True}))
    remarks = dict(profile_remarks(profile))
    paths = [f"slurm.options.{command}.{name}" for command in HABITS for name in HABITS[command]]
    assert list(remarks) == paths
    assert "`slurm.options.srun.wait` is left out: the supervisor ends" in remarks[paths[-10]]
    warnings = make_plan(SPEC, profile).warnings
    assert [f"{remark}." for remark in remarks.values()] == list(warnings[-len(remarks) :])


def test_validate_passes_and_says_each_at_its_line(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    options = "  options:\n    sbatch: {signal: USR1@60}\n    srun: {wait: 60}\n"
    file.write_text(f"extends: sandbox\nname: own\nslurm:\n{options}")
    told = hpctrain("validate", str(file))
    assert told.exit_code == 0, told.transcript()
    lines = [line for line in told.stderr.splitlines() if line.startswith("warning: ")]
    assert [line.split(": ")[1] for line in lines] == [f"{file}:5:22", f"{file}:6:18"]


def test_all_options_that_are_refused_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    options = "    sbatch:\n      gres: gpu:4\n      array: 1-2\n    srun:\n      licences: x\n"
    file.write_text(f"extends: sandbox\nname: own\nslurm:\n  options:\n{options}")
    with pytest.raises(InvalidInputError) as caught:
        load_profile(file)
    assert [problem.line for problem in caught.value.problems] == [6, 7, 9]


@pytest.mark.parametrize(
    ("slurm", "environment", "job", "step"),
    [
        ({}, [], 4, 4),
        ({"sbatch": {"threads-per-core": 1}}, [], 2, 2),
        ({"sbatch": {"hint": "nomultithread"}}, [], 2, 2),
        ({"sbatch": {"hint": "multithread"}}, [], 4, 4),
        ({"srun": {"threads-per-core": "1"}}, [], 4, 2),
        ({"srun": {"threads-per-core": 2}}, [], 4, 4),
        ({}, [{"name": "SLURM_HINT", "value": "nomultithread", "reason": "one thread"}], 4, 2),
    ],
)
def test_cores_are_asked_for_where_one_thread_of_each_is_left(
    slurm: dict[str, object], environment: list[dict[str, str]], job: int, step: int
) -> None:
    """8 CPUs of 4 cores for 2 GPUs; what Slurm makes of it: tests/slurm/test_threads_per_core."""
    profile = profile_with(nodes={"threads_per_core": 2}, slurm={"options": slurm})
    variables = [FabricVariable.model_validate(one) for one in environment]
    profile = profile.model_copy(update={"environment": tuple(variables)})
    script = render(profile=profile)
    assert f"--cpus-per-task={job}" in directives(script)
    assert f"--cpus-per-task={step} " in script[script.index("\n  srun ") :]
    assert not profile_remarks(profile)


def test_cpus_that_may_be_threads_are_remarked_on() -> None:
    options = {"options": {"srun": {"threads-per-core": 1}}}
    ((path, remark),) = profile_remarks(profile_with(slurm=options))
    assert path == "slurm.options.srun.threads-per-core"
    assert "the 8 of `nodes.cpus` are taken as cores" in remark
    with pytest.raises(ValidationError, match="8 CPUs are no whole cores of 3 threads"):
        profile_with(nodes={"threads_per_core": 3})
    cores = profile_with(nodes={"threads_per_core": 2}, slurm=options)
    with pytest.raises(LimitError, match="at most 2 per GPU"):
        make_plan(spec_with(resources={"cpus_per_gpu": 3}), cores)


def test_options_that_a_version_lacks_are_refused() -> None:
    newer = {"options": {"sbatch": {"oom-kill-step": 1}}}
    profile_with(slurm={"version": "24.11", **newer})
    with pytest.raises(ValidationError, match=r"22\.05 does not have sbatch --oom-kill-step"):
        profile_with(slurm={"version": "22.05", **newer})


@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_no_option_is_both_free_and_owned(command: str) -> None:
    assert not set(available_options(command)) & set(owned_options(command))
    script = render()
    own = directives(script)
    if command == "srun":
        own = re.findall(r"--\S+", script[script.index("\n  srun ") :])
        own.remove("--mpi=none")
    names = {line.removeprefix("--").partition("=")[0] for line in own}
    assert names <= set(owned_options(command))


def test_jobs_without_a_comment_are_found_by_name_and_directory() -> None:
    run = JobIdentity("x-0", "hpctrain:x-0", frozenset({"/runs/x-0"}))
    assert run.finds(JobRecord(1, name="x-0", work_directory="/runs/x-0"))
    assert run.finds(JobRecord(1, name="x-0", comment="by the site", work_directory="/runs/x-0"))
    assert not run.finds(JobRecord(1, name="x-0", work_directory="/other/x-0"))
    assert not run.finds(JobRecord(1, name="x-0"))


def test_a_comment_of_the_site_has_one_line() -> None:
    with pytest.raises(ValidationError, match="pattern"):
        profile_with(slurm={"comment": "two\nlines"})


def test_directives_that_a_site_puts_first_or_leaves_out() -> None:
    plain = directives(render())
    ours = {"first": ["partition", "licenses", "nodes"], "omit": ["cpus-per-task"]}
    options = {"sbatch": {"licenses": "scratch:1"}}
    found = directives(render(profile=profile_with(slurm={"directives": ours, "options": options})))
    assert found[:3] == ["--partition=train", "--licenses=scratch:1", "--nodes=2"]
    assert set(plain) - set(found) == {"--cpus-per-task=4"}
    assert [line for line in found[3:] if line in plain] == [
        line for line in plain if line in found[3:]
    ]


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        ({"omit": ["signal"]}, "--signal cannot be left out"),
        ({"omit": ["no-requeue"]}, "--no-requeue cannot be left out"),
        ({"omit": ["open-mode"]}, "cannot be left out with `continuation: requeue`"),
        ({"first": ["partitoin"]}, "no option --partitoin"),
    ],
)
def test_directives_that_hpctrain_relies_on_stay(
    directives: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        profile_with(slurm={"directives": directives})


def test_logs_of_jobs_that_are_not_requeued_need_no_mode() -> None:
    values = PROFILE.model_dump(mode="json", by_alias=True) | {"continuation": "chain"}
    values["slurm"]["directives"] = {"omit": ["open-mode"]}
    assert "--open-mode" not in render(profile=ClusterProfile.model_validate(values))


@pytest.mark.parametrize(
    ("way", "memory", "words"),
    [
        ("gres-typed", "share", ["--gres=gpu:a100:2", "--mem=16000M"]),
        ("gpus-per-task", "none", ["--gpus-per-task=1"]),
        ("none", "auto", ["--mem=0"]),
    ],
)
def test_steps_ask_for_what_the_job_has_where_the_site_wants_it(
    way: str, memory: str, words: list[str]
) -> None:
    slurm = {"gpu_request": way, "memory": memory}
    plain = render(profile=profile_with(slurm=slurm))
    asked = render(profile=profile_with(slurm={**slurm, "srun_resources": True}))
    new = [line for line in asked.splitlines() if line not in plain.splitlines()]
    assert len(new) <= 2 and all(word in asked[asked.index("\n  srun ") :] for word in words)
    step = plain[plain.index("\n  srun ") :]
    assert not any(word in step for word in words)


def test_a_reservation_that_ends_before_the_walltime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for end, refused in (("2020-01-01T00:00:00+00:00", True), ("2120-01-01T00:00:00+00:00", False)):
        slurm = f"slurm: {{reservation: maint, reservation_end: '{end}'}}\n"
        (tmp_path / "own.yaml").write_text(f"extends: sandbox\nname: own\n{slurm}")
        inputs = (ROOT / "examples/gpt-tiny.yaml", str(tmp_path / "own.yaml"))
        if refused:
            with pytest.raises(LimitError, match="reservation maint"):
                prepare(*inputs, runs=tmp_path)
        else:
            assert "--reservation=maint" in prepare(*inputs, runs=tmp_path).script


# -- Which nodes the script asks for: islands by feature, few leaves, whole blocks --------------


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
    """The plan has chosen the segment: tests/unit/plan/test_plan_nvlink_domain.py."""
    racks = network(RACK, 72)  # four racks of 18 nodes with 4 GPUs, 16 of which are counted on
    spec = run(32, 4, tp=8, pp=1)
    values = spec.model_dump(mode="json", by_alias=True)
    values["model"] |= {"heads": 8, "kv_heads": None}
    wide = RunSpec.model_validate(values)
    assert options(racks, wide) == {"segment": "16"}
    assert "#SBATCH --segment=16\n" in render(wide, racks)
    off = {"plugin": "block", "nodes_per_leaf": 18, "request": False}
    assert options(network(racks, switches=off), wide) == {}


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


# -- The modes of going on, spare nodes and ranges of nodes: what is asked for, said and refuse


def going_on(mode: str, **more: object) -> ClusterProfile:
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
    script = render(profile=going_on(mode))
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
    assert bool(continuation_problems(going_on(mode), place)) is refused
    in_grace = "within the grace of 60 s" in continuation_line(going_on(mode), place)
    assert in_grace is (mode == "requeue" and preemption == "cancel" and grace == 60)


# -- spare nodes and fewer nodes --------------------------------------------------------------


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
