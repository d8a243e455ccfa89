"""The sandbox detected into a profile that trains, checked, and judged by `doctor`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain
from rehearsal import SPEC, STAND_IN_STEP_SECONDS, Stage, own_sandbox, patient_client

from hpctrain.job.prepare import prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import find_run
from hpctrain.records.run_records import read_metrics
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.sandbox.faults import set_option
from hpctrain.sandbox.processes import await_condition
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import SandboxShape, default_shape
from hpctrain.spec.loader import load_profile
from tests.rig.stand_in.interpreter import write_stand_in_interpreter

PATIENCE_SECONDS = 300.0
PROFILE = "detected.yaml"


@pytest.fixture
def here(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with a shell whose Slurm is the sandbox."""
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def detect(*options: str) -> str:
    done = hpctrain("profile", "detect", *options)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def sentences(*options: str) -> str:
    """What `doctor` says, in one line."""
    done = hpctrain("doctor", *options)
    assert done.exit_code == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.stand_in
def test_a_detected_sandbox_trains(here: Path, stage: Stage) -> None:
    """Detect with a look at a node, check, submit a run with it, and wait for its end."""
    detect("--in-job", "-o", PROFILE)
    assert not list(here.glob("hpctrain-survey-*")), "the output of the job is removed"
    profile = load_profile(here / PROFILE).document
    assert (profile.nodes.count, profile.nodes.cpus, profile.gpu.per_node) == (4, 8, 2)
    assert profile.gpu.emulated and profile.network.interface == "lo"
    modes = {one.name: one.preemption.mode for one in profile.slurm.partitions}
    assert modes == {"train": "requeue", "urgent": "off", "brief": "requeue", "sudden": "requeue"}
    text = (here / PROFILE).read_text()
    assert re.search(r"emulated: true  # from: job on n\d: neither a GPU device", text)
    checked = hpctrain("profile", "check", PROFILE)
    assert checked.exit_code == 0 and not checked.stdout, checked.stdout
    spec = here / "spec.yaml"
    spec.write_text(SPEC)
    python = sys.executable
    if stage.stand_in:
        python = str(write_stand_in_interpreter(here / "python", STAND_IN_STEP_SECONDS))
    prepared = prepare(spec, PROFILE, ["budget.steps=4"], runs=here / "runs", python=python)
    slurm = patient_client(os.environ)
    submitted = submit(prepared, here / "runs", slurm)
    run = find_run(here / "runs", submitted.run_id)
    over = await_condition(lambda: statuses([run], slurm)[0].state.over, PATIENCE_SECONDS)
    assert over and statuses([run], slurm)[0].state is RunState.DONE
    assert [row.step for row in read_metrics(run.layout)] == [1, 2, 3, 4]


def test_what_is_not_true_of_the_cluster_is_named(here: Path) -> None:
    text = detect()
    changes = {
        "nodes.count": ("count: 4", "count: 5"),
        "gpu.per_node": ("per_node: 2", "per_node: 4"),
        "slurm.kill_wait": ("kill_wait: 10s", "kill_wait: 30s"),
        "slurm.partitions[0].preemption.grace": ("grace: 20s", "grace: 2min"),
        "slurm.partitions[1].name": ("- name: urgent", "- name: soon"),
    }
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new, 1)
    (here / PROFILE).write_text(text)
    done = hpctrain("profile", "check", PROFILE, "--json")
    assert done.exit_code == 3
    found = json.loads(done.stdout)["differences"]
    assert {one["field"] for one in found if one["severity"] != "harmless"} == set(changes)
    words = " ".join(hpctrain("profile", "check", PROFILE).stdout.split())
    assert re.search(rf"refused: {PROFILE}:\d+: `nodes.count` is 5 in the profile and 4 on", words)


def test_a_hidden_partition_is_left_out(here: Path, sandbox: Sandbox) -> None:
    """Slurm's default one is hidden: `scontrol show` and `sinfo` without -a do not list it."""
    sandbox.command("scontrol", "update", "PartitionName=train", "Hidden=YES")
    try:
        done = hpctrain("profile", "detect", "-o", PROFILE)
    finally:
        sandbox.command("scontrol", "update", "PartitionName=train", "Hidden=NO")
    assert "partition `train` is left out: it is hidden" in " ".join(done.stderr.split())
    profile = load_profile(here / PROFILE).document
    names = {one.name: one.default for one in profile.slurm.partitions}
    assert "train" not in names and sum(names.values()) == 1


@contextmanager
def own_client(shape: SandboxShape, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A sandbox of its own, which commands ask in place of the shared one."""
    with own_sandbox(shape) as box, monkeypatch.context() as patch:
        for name, value in box.environment().items():
            patch.setenv(name, value)
        yield box


def test_nodes_whose_gpus_slurm_does_not_list(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A feature names them; how many there are is asked, and no job asks Slurm for them."""
    shape = replace(default_shape(nodes=2), gpus_per_node=0)
    shape = replace(shape, groups=(replace(shape.usual_nodes, features=("gh200",)),))
    with own_client(shape, monkeypatch):
        done = hpctrain("profile", "detect", "-o", PROFILE)
        assert done.exit_code == 0, done.stderr
        assert "how many GPUs has a node?" in " ".join(done.stderr.split())
        profile = load_profile(here / PROFILE).document
        assert (profile.gpu.per_node, profile.slurm.gpu_request) == (1, "none")
        assert "`per_node`: how many GPUs" in hpctrain("validate", PROFILE).stderr
        assert hpctrain("profile", "check", PROFILE).exit_code == 0
        spec = here / "spec.yaml"
        spec.write_text(SPEC)
        options = ("--set", "resources.gpus=2", "--runs", str(tmp_path / "runs"), "--check")
        taken = hpctrain("submit", "-p", PROFILE, str(spec), *options)
        assert taken.exit_code == 0, taken.stderr
        looked = hpctrain("profile", "detect", "--in-job")
    assert looked.exit_code == 3, "this machine has no GPU"
    assert re.search(r"a job on n\d saw none", " ".join(looked.stderr.split()))


@pytest.mark.variant("test_nodes_whose_gpus_slurm_does_not_list")
def test_a_cluster_of_slices(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(default_shape(nodes=1), gpus_per_node=7, gpu_type="a100_1g.10gb")
    with own_client(shape, monkeypatch):
        detect("-o", PROFILE)
        profile = load_profile(here / PROFILE).document
        assert (profile.gpu.type, profile.slurm.gpu_request) == ("a100_1g.10gb", "gres-typed")
        assert {one.max_gpus for one in profile.slurm.partitions} == {1}
        assert hpctrain("profile", "check", PROFILE).exit_code == 0


@contextmanager
def changed(sandbox: Sandbox, key: str, value: str, usual: str) -> Iterator[None]:
    set_option(sandbox, key, value)
    try:
        yield
    finally:
        set_option(sandbox, key, usual)


def test_doctor_reads_what_is_in_force(here: Path, sandbox: Sandbox) -> None:
    usual = sentences()
    assert "jobs of `train` are preempted by urgent after a grace of 20 s, and wait again" in usual
    assert "TERM only, grace 20 s" in usual and "10 s (KillWait)" in usual
    assert "end with 85 (RequeueExit)" in usual and usual.endswith("nothing was found.")
    with changed(sandbox, "KillWait", "4", "10"), changed(sandbox, "RequeueExit", "99", "85"):
        other = sentences()
        assert "4 s (KillWait); short" in other and "end with 99 (RequeueExit)" in other
    options = ("PreemptMode=CANCEL", "GraceTime=0", "AllocNodes=elsewhere")
    sandbox.command("scontrol", "update", "PartitionName=train", *options)
    try:
        other = sentences()
        assert "after a grace of 0 s, and end" in other and "grace 0 s" in other
        assert "not allowed, only from elsewhere" in other
    finally:
        usual_options = ("PreemptMode=REQUEUE", "GraceTime=20", "AllocNodes=ALL")
        sandbox.command("scontrol", "update", "PartitionName=train", *usual_options)


@pytest.mark.variant("test_a_detected_sandbox_trains")
def test_a_step_of_a_job_surveys_its_node(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = patient_client(os.environ)
    job = slurm.submit("#!/bin/sh\n#SBATCH -N1 -t 10 -o /dev/null\nsleep 600\n").job_id

    def runs() -> bool:
        record = slurm.show_job(job)
        return record is not None and record.state.is_running

    assert await_condition(runs, PATIENCE_SECONDS)
    monkeypatch.setenv("SLURM_JOB_ID", str(job))
    done = hpctrain("profile", "detect", "--in-job")
    assert f"looking at a node of job {job}" in done.stderr
    assert "from: job on n" in done.stdout and done.exit_code == 0


def test_a_job_that_does_not_start_is_cancelled(here: Path, sandbox: Sandbox) -> None:
    sandbox.command("scontrol", "update", "PartitionName=train", "State=DOWN")
    try:
        done = hpctrain("profile", "detect", "--partition", "train", "--in-job", "--wait", "1")
    finally:
        sandbox.command("scontrol", "update", "PartitionName=train", "State=UP")
    assert done.exit_code == 1 and "was cancelled" in done.stderr
    assert not sandbox.command("squeue", "--noheader", "--states=PD,R").strip()
