"""What stopped the first start of a profile that a newcomer wrote from a site's own page.

One test for each of thirteen such things; the rooms' own tests have the cases of each. What only a
real Slurm shows is in tests/slurm: test_first_start.py, test_sites_start.py, test_job_changes.py.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain
from foreign_clusters import Answers, config, node, partition
from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.base.disk_usage import Directory
from hpctrain.job.prepare import prepare
from hpctrain.sandbox.shape import shape_from_profile
from hpctrain.site.detected import detected_profile
from hpctrain.site.facts import LoginFacts, SiteFacts, mounts
from hpctrain.slurm.cluster_queries import ClusterQueries
from hpctrain.slurm.job_changes import job_changes, requested_job
from hpctrain.spec.loader import find_profile, load_catalogue, load_profile
from hpctrain.train.network_interface import matching_interface

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "examples" / "gpt1300m.yaml"
GOLDEN = ROOT / "tests" / "sites" / "golden"
OPTIONS = ("data.sources=[{path: /scratch/data/web}]", "resources.walltime=1:00:00")
# The interpreter of a job, which stands where the supervisor stands.
PYTHON = "#!/bin/sh\necho started by $0\n"


def profile(directory: Path, text: str, base: str = "a100x64") -> Path:
    file = directory / "own.yaml"
    file.write_text(f"extends: {base}\nname: own\n{text}")
    return file


def started(
    directory: Path, text: str, python: Path | str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script of a run in a shell, as slurmstepd does."""
    program = directory / "project" / "bin" / "python3"
    program.parent.mkdir(parents=True)
    program.write_text(PYTHON)
    program.chmod(0o755)
    place = directory / "run"
    (place / "software" / "current").mkdir(parents=True)
    given = str(program if python is None else python)
    options = ("resources.gpus=16", *OPTIONS)
    file = profile(directory, text)
    script = prepare(SPEC, str(file), options, runs=directory / "runs", python=given).script
    (place / "job.sbatch").write_text(script)
    usual = {"PATH": os.environ["PATH"], "HOME": str(directory), "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", "job.sbatch"],
        cwd=place,
        env={**usual, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_modules_without_init_find_the_module_system(tmp_path: Path) -> None:
    init = tmp_path / "lmod" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text("export MODULEPATH=/m; module() { echo module $*; }\n")
    text = "software: {modules: {load: [cuda/12]}}\n"
    done = started(tmp_path, text, MODULESHOME=str(tmp_path / "lmod"))
    assert done.returncode == 0 and "module load cuda/12\n" in done.stdout, done.stderr


def test_a_name_in_a_path_is_put_in_or_its_field_is_named(tmp_path: Path) -> None:
    text = "software: {python: $WORK/bin/python3}\nslurm: {inherit: [WORK]}\n"
    environment = {"WORK": str(tmp_path / "project")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORK", str(tmp_path / "project"))
        done = started(tmp_path, text, **environment)
    assert done.returncode == 0 and f"started by {tmp_path}/project/bin/python3" in done.stdout
    unset = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=tmp_path / "run",
        env={"PATH": os.environ["PATH"], "HOME": "/"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert unset.returncode == 78
    assert "hpctrain: software.python: WORK is not set in this job" in unset.stderr


def test_the_beginning_of_an_interface_is_no_name_for_gloo() -> None:
    script = (GOLDEN / "kempner.sbatch").read_text()
    assert "export NCCL_SOCKET_IFNAME=ib\n" in script and "GLOO_SOCKET_IFNAME=" not in script
    assert "export HPCTRAIN_INTERFACE=ib\n" in script
    assert (
        matching_interface("ib", {"eno1": "10.0.0.1", "ib1": "10.1.0.2", "ib0": "10.1.0.1"})
        == "ib0"
    )


def test_cores_and_threads_are_two_figures() -> None:
    script = (GOLDEN / "juwels-booster.sbatch").read_text()
    assert "#SBATCH --threads-per-core=1\n" in script
    assert "#SBATCH --cpus-per-task=12\n" in script, "48 cores for 4 ranks; 96 threads are not"


def test_detect_takes_no_hidden_partition_and_counts_no_slices() -> None:
    texts = {
        "config": config(),
        "node": node("g1", "gpu:a100:2,gpu:a100_3g.20gb:4", partitions="secret,gpu"),
        "partition": partition("secret", Default="YES", Hidden="YES") + partition("gpu"),
    }
    login = LoginFacts(
        host="login1",
        user="me",
        python=(3, 11, 7),
        interpreter="/sw/bin/python",
        machine="x86_64",
        groups=("users",),
        runs=Directory("/runs", free_bytes=10**15, free_inodes=10**8, inodes=10**9),
        mounts=mounts("/dev/sda1 / xfs rw 0 0\n"),
        variables={"HOME": "/home/me"},
    )
    with clock.replaced(VirtualClock(begins_at=0.0)):
        facts = ClusterQueries("me", {}, run=Answers(texts)).facts()
    text = detected_profile(SiteFacts(facts, login), load_catalogue()).text
    assert "name: gpu" in text and "name: secret" not in text
    assert "per_node: 2" in text


def test_a_failing_line_of_setup_ends_the_job_with_its_place(tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text("export A=1\nfalse\nexport B=1\n")
    done = started(tmp_path, f"software: {{setup: {setup}}}\n")
    assert done.returncode == 78 and f"{setup}:2" in done.stderr, done.stderr


def test_an_error_in_an_overlay_is_in_the_overlay(tmp_path: Path) -> None:
    file = profile(tmp_path, "nodes: {count: 2}\n", base="islands10b")
    done = hpctrain("validate", "--as", "profile", str(file))
    assert done.exit_code == 3 and f"error: {file}:3:" in done.stderr, done.stderr


def test_the_sandbox_of_a_profile_has_its_features() -> None:
    document = load_profile(find_profile("perlmutter")).document
    shape = shape_from_profile(document, 2)
    assert document.slurm.constraint is not None
    features = {one for group in shape.groups for one in group.features}
    assert {*document.slurm.constraint.split("&")} <= features


def test_what_slurm_made_of_a_job_is_compared() -> None:
    asked = requested_job("#!/bin/sh\n#SBATCH --partition=gpu\n#SBATCH --time=60\n")
    (change,) = job_changes(asked, replace(asked, partition="gpu-long"))
    assert "asked gpu, is gpu-long" in str(change)


def test_a_site_with_sticky_modules_purges_by_force(tmp_path: Path) -> None:
    assert "must module --force purge\n" in (GOLDEN / "narval.sbatch").read_text()
    assert "must module purge\n" in (GOLDEN / "snellius.sbatch").read_text()


def test_an_interpreter_for_other_processors_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "python3"
    # ELF: 64 bit, little-endian, executable, EM_AARCH64 (elf(5))
    foreign.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00" + bytes(44))
    foreign.chmod(0o755)
    file = profile(tmp_path, f"nodes: {{architecture: x86_64}}\nsoftware: {{python: {foreign}}}\n")
    settings = [word for one in ("resources.gpus=16", *OPTIONS) for word in ("--set", one)]
    done = hpctrain("validate", "-p", str(file), str(SPEC), *settings)
    assert done.exit_code == 3 and "aarch64" in done.stderr, done.transcript()


def test_the_type_in_gres_may_have_another_name_than_the_gpu() -> None:
    script = (GOLDEN / "university.sbatch").read_text()
    assert "#SBATCH --gres=gpu:nvidia_a100-sxm4-80gb:2\n" in script
    assert load_profile(ROOT / "tests/sites/university.yaml").document.gpu.type == "a100"


def test_options_by_habit_are_left_out_with_a_note_and_all_at_once(tmp_path: Path) -> None:
    text = """\
slurm:
  options:
    sbatch: {signal: "USR1@60"}
    srun: {wait: 60, kill-on-bad-exit: 1, quit-on-interrupt: true}
"""
    done = hpctrain("validate", "--as", "profile", str(profile(tmp_path, text)))
    assert done.exit_code == 0, done.stderr
    for name in ("signal", "wait", "kill-on-bad-exit", "quit-on-interrupt"):
        assert f".{name}` is left out: " in done.stderr, done.stderr
