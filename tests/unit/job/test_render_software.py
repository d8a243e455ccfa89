"""Modules, setup, limits and the prologue of tasks: run by bash, as a job would."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from planned_job import planned_job
from pydantic import ValidationError
from specimen_scripts import PROFILE, SPEC, profile_with, render
from test_render_quoting import run_script, stub

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.prepare import prepare
from hpctrain.job.render.environment import SetupFile
from hpctrain.job.render.script import ScriptFacts, build_script, render_script
from hpctrain.job.render.shell_files import prologue_text
from hpctrain.job.run_directory import write_run_directory
from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.job_end import why_ended
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import FabricVariable

ROOT = Path(__file__).resolve().parents[3]


def with_variables(*variables: dict[str, object]) -> ClusterProfile:
    reason = {"reason": "of the site"}
    values = {
        **PROFILE.model_dump(mode="json"),
        "environment": [{**v, **reason} for v in variables],
    }
    return ClusterProfile.model_validate(values)


def outcome(directory: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (directory / "job.sbatch").write_text(script)
    usual = {"PATH": os.environ["PATH"], "HOME": str(directory), "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", "job.sbatch"],
        cwd=directory,
        env={**usual, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_module_that_does_not_load_ends_the_job_with_its_name(tmp_path: Path) -> None:
    profile = profile_with(software={"modules": {"load": ["cuda/12.4"]}})
    script = render(profile=profile, python=stub(tmp_path))
    (tmp_path / "modules.sh").write_text("module() { return 1; }; export -f module; ")
    ended = outcome(tmp_path, script, BASH_ENV=str(tmp_path / "modules.sh"))
    assert ended.returncode == 78
    assert "`module load cuda/12.4` failed on " in ended.stderr
    assert not (tmp_path / "seen.json").exists(), "nothing is trained with other software"


def test_the_end_for_want_of_software_is_said() -> None:
    job = JobRecord(7, state=JobState.FAILED, exit_code=78)
    judged = why_ended(job, begun=False)
    assert judged is not None and "a module, a limit or a file of the site" in judged[1]
    other = why_ended(JobRecord(7, state=JobState.FAILED, exit_code=1), begun=False)
    assert other is not None and "a module" not in other[1]


def test_directories_of_modules_come_before_what_is_loaded() -> None:
    modules = {"use": ["$HOME/modules"], "load": ["b", "a"]}
    script = render(profile=profile_with(software={"modules": modules}))
    lines = [line for line in script.splitlines() if "module use" in line or "module load" in line]
    used = 'must module use "${HOME:?}/modules"'
    assert lines == [used, "must module load b", "must module load a"]
    assert script.index("\nneeds software.modules.use HOME\n") < script.index(used)


def test_limits_of_processes() -> None:

    ulimits = {"core": "unlimited", "memlock": "unlimited", "nofile": 65536}
    script = render(profile=profile_with(software={"ulimits": ulimits}))
    found = [line.split()[1:3] for line in script.splitlines() if line.startswith("ulimit")]
    assert found == [["-c", "unlimited"], ["-l", "unlimited"], ["-n", "65536"]]


def test_a_limit_that_cannot_be_had_ends_the_job(tmp_path: Path) -> None:
    profile = profile_with(software={"ulimits": {"nofile": 2**30}})
    ended = outcome(tmp_path, render(profile=profile, python=stub(tmp_path)))
    assert ended.returncode == 78 and "open files" in ended.stderr


def test_values_before_those_of_the_job_and_variables_that_go(tmp_path: Path) -> None:
    profile = with_variables(
        {"name": "PATH", "value": "/of the/site $$1", "prepend": True},
        {"name": "ABSENT", "value": "/a", "prepend": True},
        {"name": "SLURM_CPU_BIND", "value": "none"},
    )
    software = profile.software.model_copy(update={"unset": ("HOME",)})
    profile = profile.model_copy(update={"software": software})
    seen = run_script(tmp_path, render(profile=profile, python=stub(tmp_path)))["environment"]
    assert seen["PATH"] == f"/of the/site $1:{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert (seen["ABSENT"], seen["SLURM_CPU_BIND"]) == ("/a", "none")
    assert "HOME" not in seen


def test_each_task_runs_the_prologue_and_becomes_the_trainer(tmp_path: Path) -> None:
    rails = {"name": "RAIL", "per_local_rank": ["mlx5_0:1", "it's $HOME"]}
    profile = with_variables(rails, {"name": "PLAIN", "value": "1"})
    scratch = tmp_path / "scratch of $SLURM_JOB_ID"
    software = profile.software.model_copy(update={"scratch": str(scratch)})
    profile = profile.model_copy(update={"software": software})
    text = prologue_text(planned_job(SPEC, profile))
    assert text is not None
    seen = run_script(tmp_path, render(profile=profile, python=stub(tmp_path)))
    assert seen["argv"][-6:-3] == ["bash", "prologue.sh", stub(tmp_path)]
    assert "RAIL" not in seen["environment"], "the batch shell is no rank"
    assert seen["environment"]["TMPDIR"].startswith(str(tmp_path / "scratch of "))
    (tmp_path / "prologue.sh").write_text(text)
    values = {}
    for rank in (0, 1):
        environment = {**seen["environment"], "SLURM_LOCALID": str(rank)}
        shown = subprocess.run(
            ["bash", "prologue.sh", "bash", "-c", 'echo "$$ $RAIL"; ls -d "$TRITON_CACHE_DIR"'],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        values[rank] = shown.splitlines()[0].partition(" ")[2]
        assert shown.splitlines()[1].endswith("/triton")
    assert values == {0: "mlx5_0:1", 1: "it's /home-of-nobody"}
    stranger = {**seen["environment"], "SLURM_LOCALID": "2"}
    done = subprocess.run(["bash", "prologue.sh", "true"], cwd=tmp_path, env=stranger, check=False)
    assert done.returncode == 78


def test_commands_of_each_task_run_in_its_shell_as_they_are_written(tmp_path: Path) -> None:
    settings = tmp_path / "it's $(touch pwned).sh"
    settings.write_text("export FROM_FILE=$1\n")
    commands = [
        ["source", str(settings).replace("$", "$$"), "rail$SLURM_LOCALID"],
        ["export", "OWN=$$(touch pwned) `touch pwned`; x"],
        ["ulimit", "-n", "256"],
    ]
    profile = profile_with(software={"commands": {"task": commands}})
    text = prologue_text(planned_job(SPEC, profile))
    assert text is not None
    (tmp_path / "prologue.sh").write_text(text)
    show = 'echo "$FROM_FILE|$OWN|$(ulimit -n)"'
    task = {"PATH": os.environ["PATH"], "SLURM_LOCALID": "1"}
    words = ["bash", "prologue.sh", "bash", "-c", show]
    done = subprocess.run(words, cwd=tmp_path, env=task, capture_output=True, text=True)
    assert done.stdout == "rail1|$(touch pwned) `touch pwned`; x|256\n", done.stderr
    assert not list(tmp_path.glob("pwned"))


def test_a_command_of_a_task_that_fails_ends_it_with_its_name(tmp_path: Path) -> None:
    profile = profile_with(software={"commands": {"task": [["cat", "/no/such file"]]}})
    text = prologue_text(planned_job(SPEC, profile))
    assert text is not None
    (tmp_path / "prologue.sh").write_text(text)
    words = ["bash", "prologue.sh", "echo", "trained"]
    task = {"PATH": os.environ["PATH"], "SLURMD_NODENAME": "n7"}
    done = subprocess.run(words, cwd=tmp_path, env=task, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (78, "")
    line = "hpctrain: software.commands.task: `cat /no/such file` on n7: exit code 1\n"
    assert done.stderr.endswith(line)
    finding = load_signatures().matcher("rank").match(line)
    assert finding is not None and finding.signature == "site_command"


def test_no_prologue_where_nothing_wants_one() -> None:
    assert prologue_text(planned_job(SPEC, PROFILE)) is None
    assert "prologue.sh" not in render()


def test_values_of_ranks_that_do_not_fit() -> None:
    one = with_variables({"name": "RAIL", "per_local_rank": ["a"]})
    with pytest.raises(InvalidInputError, match="1 values for the 2 tasks"):
        render(profile=one)
    two = with_variables({"name": "RAIL", "per_local_rank": ["a", "b"]})
    with pytest.raises(InvalidInputError, match="use launcher srun"):
        render(SPEC.model_copy(update={"launcher": "torchrun"}), two)
    for values in ({}, {"value": "1", "per_local_rank": ["a"]}):
        with pytest.raises(ValidationError, match="exactly one"):
            FabricVariable.model_validate({"name": "RAIL", "reason": "of the site", **values})


def test_a_setup_file_is_read_and_a_change_is_said(tmp_path: Path) -> None:
    setup = tmp_path / "it's a setup.sh"
    setup.write_text("export OF_THE_SETUP=$UNSET_HERE-yes\n")
    facts = ScriptFacts(
        *("r-0", "hpctrain:r-0", "a" * 64, "b" * 64, stub(tmp_path)),
        setup=SetupFile(str(setup), hashlib.sha256(setup.read_bytes()).hexdigest()),
    )
    script = render_script(build_script(planned_job(SPEC, PROFILE), facts))
    seen = run_script(tmp_path, script)
    assert seen["environment"]["OF_THE_SETUP"] == "-yes"
    assert "has changed" not in outcome(tmp_path, script).stderr
    setup.write_text("export OF_THE_SETUP=other\n")
    assert "software.setup has changed" in outcome(tmp_path, script).stderr
    setup.unlink()
    assert outcome(tmp_path, script).returncode == 78


def test_setup_and_prologue_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec, own = ROOT / "examples/gpt-tiny.yaml", tmp_path / "own.yaml"
    own.write_text(
        f"extends: sandbox\nname: own\nsoftware: {{setup: {tmp_path}/s.sh, scratch: /tmp/$USER}}\n"
    )
    with pytest.raises(InvalidInputError, match="No such file") as caught:
        prepare(spec, str(own), runs=tmp_path)
    assert caught.value.problems[0].line == 3
    (tmp_path / "s.sh").write_text("true\n")
    prepared = prepare(spec, str(own), runs=tmp_path)
    digest = hashlib.sha256(b"true\n").hexdigest()
    assert f"# Setup     {tmp_path}/s.sh {digest}\n" in prepared.script
    layout = write_run_directory(prepared, tmp_path)
    assert [layout.prologue.read_text()] == [one.text for one in prepared.shells]
    shown = hashlib.sha256(layout.prologue.read_bytes()).hexdigest()[:12]
    assert f"prologue.sh {shown}" in prepared.script
