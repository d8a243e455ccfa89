"""An exported run on the real trainer: the files' own commands, without Slurm and a supervisor.

Two "hosts" are two names of this machine. The trainer connects them as it would connect pods.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from trial_runs import LIMIT_SECONDS, Trial, make_trial

from bench.free_ports import free_port
from hpctrain.export.exported_run import write_files
from hpctrain.export.host_files import export_hosts
from hpctrain.export.kubernetes import PodOptions, export_pods
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.records.epochs import current_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import TrainerExit, read_metrics

pytestmark = pytest.mark.nightly("each launch is four processes that import torch")

ROOT = Path(__file__).resolve().parents[2]
HOSTS = "localhost,127.0.0.1"
SPEC = """
name: tiny
model: {family: gpt, layers: 2, hidden: 32, heads: 2, vocab: 250, seq: 32}
batch: {global: 8, micro: 2}
budget: {steps: 6}
precision: fp32
optimizer: {lr: 3.0e-3}
schedule: {warmup_steps: 1}
checkpoint: {every_steps: 2, keep: 9, asynchronous: false}
engine: {name: ddp}
resources: {gpus: 2}
"""
PROFILE = "extends: sandbox\nname: single\ngpu: {per_node: 1}\nnvlink: {domain: 1}\n"


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    spec, profile = tmp_path / "spec.yaml", tmp_path / "single.yaml"
    spec.write_text(SPEC)
    profile.write_text(PROFILE)
    return prepare(spec, str(profile), runs=tmp_path / "runs", python=sys.executable)


Start = Callable[[int], "subprocess.Popen[str]"]


def launched(start: Start) -> list[subprocess.Popen[str]]:
    """Start both nodes; the second first, which has to wait for the other."""
    return [start(rank) for rank in (1, 0)]


def ended(nodes: list[subprocess.Popen[str]], logs: Path) -> list[int]:
    codes = [node.wait(LIMIT_SECONDS) for node in nodes]
    for log in sorted(logs.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text()}")
    return codes


def starter(command: Callable[[int], list[str]], logs: Path, **variables: str) -> Start:
    """Return what starts the command of a node, in an environment without Slurm."""
    logs.mkdir(exist_ok=True)
    port = str(free_port())

    def start(rank: int) -> subprocess.Popen[str]:
        # `GLOO_SOCKET_IFNAME` of the profile is among the variables of the files
        own = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": port, **variables}
        with (logs / f"{time.monotonic_ns()}-node{rank}.log").open("w") as log:
            return subprocess.Popen(
                command(rank), env=own, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    return start


def losses(run: RunLayout) -> dict[int, str]:
    return {row.step: row.loss_hex for row in read_metrics(run)}


@pytest.fixture
def reference(tmp_path: Path, prepared: Prepared) -> Trial:
    """The same settings, trained by ranks that have the launch of a supervisor."""
    made = make_trial(tmp_path / "reference", prepared.train.model_dump(mode="json"))
    assert made.train() == [0, 0]
    return made


def test_pods_train_as_slurm_does_and_hosts_go_on_after_a_failure(
    tmp_path: Path, prepared: Prepared, reference: Trial
) -> None:
    """One run by both kinds of files: the losses are those of ranks that a supervisor starts."""
    prepared = replace(prepared, train=reference.config)  # with its order of mock tokens
    run, logs = RunLayout(tmp_path / "runs" / "tiny"), tmp_path / "logs"
    run.directory.parent.mkdir()
    assert ended(launched(pods(prepared, run, logs)), logs) == [0, 0]
    assert losses(run) == losses(reference.run)
    assert current_epoch(run.epochs) == 1

    # a failure after step 4: the next launch begins there, with the next number
    run.done.unlink()
    shutil.rmtree(run.checkpoints / checkpoint_name(6))
    files = tmp_path / "files"
    write_files(export_hosts(prepared, HOSTS, files, run.directory.parent), files)
    start = starter(lambda rank: ["sh", str(files / "run-node.sh"), str(rank)], logs)
    assert ended(launched(start), logs) == [0, 0]
    assert {row.step for row in read_metrics(run) if row.epoch == 2} == {5, 6}
    assert losses(run) == losses(reference.run)
    assert f"launch 2 of tiny, from {checkpoint_name(4)}" in shown(logs)
    assert current_epoch(run.epochs) == 2


@pytest.mark.variant("test_pods_train_as_slurm_does_and_hosts_go_on_after_a_failure")
def test_another_run_of_this_name_has_begun_there(tmp_path: Path, prepared: Prepared) -> None:
    """All nodes say so, and end for good."""
    run, logs = RunLayout(tmp_path / "runs" / "tiny"), tmp_path / "logs"
    run.directory.parent.mkdir()
    assert ended(launched(pods(prepared, run, logs)), logs) == [0, 0]
    changed = replace(prepared, train=prepared.train.model_copy(update={"seed": 4321}))
    assert ended(launched(pods(changed, run, logs)), logs) == [TrainerExit.CONFIG_ERROR] * 2
    assert shown(logs).count("another run has begun there") == 2
    assert current_epoch(run.epochs) == 1


def pods(prepared: Prepared, run: RunLayout, logs: Path) -> Start:
    """Return what starts the container of a JobSet, with what Kubernetes fills in."""
    options = PodOptions(image="any", run_claim="runs")
    text = export_pods(prepared, "jobset", options).files[0].text
    settings, jobset = yaml.safe_load_all(text)
    config = run.directory.parent / "train.json"
    config.write_text(settings["data"]["train.json"])
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    mounted = {"/runs/tiny": str(run.directory), "/etc/hpctrain/train.json": str(config)}
    words = [sys.executable, *container["command"][1:]]
    for inside, outside in mounted.items():
        words = [word.replace(inside, outside) for word in words]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert given.pop("PET_MASTER_ADDR") == "tiny-node-0-0.tiny"
    given["PET_MASTER_PORT"] = str(free_port())

    def command(rank: int) -> list[str]:
        return ["env", f"PET_NODE_RANK={rank}", "PET_MASTER_ADDR=127.0.0.1", *words]

    return starter(command, logs, GLOO_SOCKET_IFNAME="lo", **given)


def shown(logs: Path) -> str:
    return "".join(log.read_text() for log in logs.glob("*.log"))


@pytest.mark.variant("test_pods_train_as_slurm_does_and_hosts_go_on_after_a_failure")
def test_torchrun_itself_starts_the_first_launch(
    tmp_path: Path, prepared: Prepared, reference: Trial
) -> None:
    prepared = replace(prepared, train=reference.config)  # with its order of mock tokens
    made = make_trial(tmp_path / "run", prepared.train.model_dump(mode="json"))
    port = str(free_port())

    def command(rank: int) -> list[str]:
        words = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
        address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        trainer = ["-m", "hpctrain.train", str(made.run.train_config)]
        return [sys.executable, "-m", "torch.distributed.run", *words, *address, *trainer]

    logs = tmp_path / "logs"
    assert ended(launched(starter(command, logs)), logs) == [0, 0]
    assert losses(made.run) == losses(reference.run)
