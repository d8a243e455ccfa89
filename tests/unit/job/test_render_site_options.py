"""Options of Slurm that a site adds: where they stand, what is refused, and quoting once."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError
from specimen_scripts import profile_with, render, spec_with
from test_render_quoting import run_script, stub

from hpctrain.base.errors import InvalidInputError, LimitError
from hpctrain.job.prepare import prepare
from hpctrain.slurm.records import JobIdentity, JobRecord
from hpctrain.spec.loader import load_profile
from hpctrain.spec.slurm_options import SiteOptions, available_options, owned_options

ROOT = Path(__file__).resolve().parents[3]


def site(sbatch: dict[str, object] | None = None, srun: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
    return profile_with(slurm={"options": {"sbatch": sbatch or {}, "srun": srun or {}}})


def directives(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [shlex.split(line, comments=False)[1] for line in lines]


def test_options_of_sbatch_are_directives() -> None:
    options = {"licenses": "scratch:1", "wait-all-nodes": 1, "contiguous": True}
    found = directives(render(profile=site({**options, "mail-type": ["END", "FAIL"]})))
    for line in ("--licenses=scratch:1", "--wait-all-nodes=1", "--contiguous", "--mail-type=FAIL"):
        assert line in found
    hostile = directives(render(profile=site({"wckey": 'two "words" #'})))
    assert '--wckey=two "words" #' in hostile


def test_options_of_srun_reach_it_with_values_of_the_job(tmp_path: Path) -> None:
    options = {"cpu-bind": "mask_cpu:0xfe,0xfe00", "network": "it's $$5 $HOME", "mpi": "pmix"}
    seen = run_script(tmp_path, render(profile=site(srun=options), python=stub(tmp_path)))
    assert "--cpu-bind=mask_cpu:0xfe,0xfe00" in seen["argv"]
    assert "--network=it's $5 /home-of-nobody" in seen["argv"]
    assert "--mpi=pmix" in seen["argv"] and "--mpi=none" not in seen["argv"]


def test_the_spec_adds_nodes_licenses_and_features() -> None:
    profile = profile_with(
        slurm={
            "constraint": "a100",
            "options": {"sbatch": {"exclude": "n9", "licenses": "scratch:1"}},
        }
    )
    wanted = {"constraint": "hbm", "exclude": "n[1-2]", "nodelist": "n3", "licenses": "matlab:1"}
    found = directives(render(spec_with(resources=wanted), profile))
    for line in ("--constraint=a100&hbm", "--exclude=n9,n[1-2]", "--nodelist=n3"):
        assert line in found
    assert "--licenses=scratch:1,matlab:1" in found
    assert "--gpu-bind=map_gpu:0,1" in render(spec_with(resources={"gpu_bind": "map_gpu:0,1"}))


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("sbatch", {"job-name": "x"}, "hpctrain sets this itself"),
        ("sbatch", {"export": "ALL"}, "hpctrain sets this itself"),
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
        SiteOptions.model_validate({command: options})


def test_a_wrong_option_is_reported_at_its_place_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    text = "extends: a100x64\nname: own\nslurm:\n  options:\n    sbatch:\n      licences: x\n"
    file.write_text(f"{text}      export: ALL\n")
    with pytest.raises(InvalidInputError) as caught:
        load_profile(file)
    problem = caught.value.problems[0]
    assert (problem.line, "did you mean `licenses`?" in (problem.hint or "")) == (6, True)


def test_options_of_plugins_are_named_by_the_site() -> None:
    options = {"plugins": ["auto-resume"], "srun": {"auto-resume": 1}}
    assert "--auto-resume=1" in render(profile=profile_with(slurm={"options": options}))


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
    assert "--comment" not in render(profile=profile_with(slurm={"comment": False}))
    run = JobIdentity("x-0", "hpctrain:x-0", frozenset({"/runs/x-0"}))
    assert run.finds(JobRecord(1, name="x-0", work_directory="/runs/x-0"))
    assert run.finds(JobRecord(1, name="x-0", comment="by the site", work_directory="/runs/x-0"))
    assert not run.finds(JobRecord(1, name="x-0", work_directory="/other/x-0"))
    assert not run.finds(JobRecord(1, name="x-0"))


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
