"""Files for bare hosts: what the script of a node starts, with a program in the trainer's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_exported_pods import planned

from hpctrain.base.errors import UsageError
from hpctrain.export.exported_run import write_files
from hpctrain.export.host_files import export_hosts
from hpctrain.job.prepare import Prepared

SAYS_ITS_WORDS = (
    "import json, os, sys\n"
    "print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.isupper()}]))\n"
)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that prints its arguments and its environment."""
    program = tmp_path / "python with a blank"
    program.write_text(f"#!{sys.executable}\n{SAYS_ITS_WORDS}")
    program.chmod(0o755)
    return str(program)


def exported(tmp_path: Path, prepared: Prepared, hosts: str = "n[1-2]") -> Path:
    directory = tmp_path / "files of $a run"
    write_files(export_hosts(prepared, hosts, directory, tmp_path / "runs"), directory)
    return directory


def started(
    directory: Path, *rank: str, **environment: str
) -> tuple[int, list[str], dict[str, str], str]:
    """Run the script of a node: exit code, arguments, environment, stderr."""
    done = subprocess.run(
        ["sh", str(directory / "run-node.sh"), *rank],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    words, variables = json.loads(done.stdout) if done.stdout else ([], {})
    return done.returncode, words, variables, done.stderr


def test_a_node_is_started_with_its_place(tmp_path: Path, python: str) -> None:
    prepared = planned(tmp_path, "resources.gpus=16", 'environment.variables.A=it\'s "$$x"')
    prepared = replace(prepared, facts=replace(prepared.facts, python=python))
    directory = exported(tmp_path, prepared)
    code, words, variables, _ = started(directory, "1")
    assert (code, words[:2]) == (0, ["-m", "hpctrain.train.unsupervised"])
    assert words[2:] == [
        "--nnodes=2",
        "--nproc-per-node=8",
        f"--run-directory={tmp_path}/runs/llama7b",
        "--node-rank=1",
        "--master-addr=n1",
        "--master-port=29500",
        f"{directory}/train.json",
    ]
    assert variables["A"] == 'it\'s "$x"'
    assert variables["NCCL_SOCKET_IFNAME"], "hosts have the interfaces of the profile"
    assert started(directory, MASTER_PORT="123", OMPI_COMM_WORLD_RANK="0")[1][5:8] == [
        "--node-rank=0",
        "--master-addr=n1",
        "--master-port=123",
    ]
    code, words, _, complaint = started(directory)
    assert code and not words and "give the rank of this host" in complaint


def test_inherited_variables_have_to_be_there(tmp_path: Path, python: str) -> None:
    prepared = planned(tmp_path, "resources.gpus=16", "environment.inherit=[WANDB_API_KEY]")
    prepared = replace(prepared, facts=replace(prepared.facts, python=python))
    directory = exported(tmp_path, prepared)
    code, words, _, complaint = started(directory, "0")
    assert code and not words and "WANDB_API_KEY" in complaint
    assert started(directory, "0", WANDB_API_KEY="secret")[2]["WANDB_API_KEY"] == "secret"
    assert "secret" not in (directory / "run-node.sh").read_text()


def test_hostfile_and_command_lines(tmp_path: Path) -> None:
    prepared = planned(tmp_path, "resources.gpus=16")
    directory = exported(tmp_path, prepared, "n[1-2]")
    assert (directory / "hostfile").read_text() == "n1 slots=8\nn2 slots=8\n"
    settings = json.loads((directory / "train.json").read_text())
    assert settings == json.loads(prepared.train.model_dump_json())
    # `ssh` that runs what it is told here, as the shell of the other host would
    stub = tmp_path / "ssh"
    stub.write_text('#!/bin/sh\necho "$1"; shift; exec sh -c "$*"\n')
    stub.chmod(0o755)
    (directory / "run-node.sh").write_text('echo "rank $1"\n')
    done = subprocess.run(
        ["sh", str(directory / "commands.txt")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["n1", "n2", "rank 0", "rank 1"]


@pytest.mark.parametrize("hosts", [None, "n1", "n[1-3]", "n1,n1", "n[1-2", "n1,-oProxyCommand=x"])
def test_hosts_that_do_not_match_the_plan(tmp_path: Path, hosts: str | None) -> None:
    prepared = planned(tmp_path, "resources.gpus=16")
    with pytest.raises(UsageError):
        export_hosts(prepared, hosts, tmp_path, tmp_path / "runs")


def test_a_run_stays_below_the_directory_of_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no name of a run"):
        export_hosts(planned(tmp_path), "n1", tmp_path, tmp_path / "runs", "../elsewhere")
