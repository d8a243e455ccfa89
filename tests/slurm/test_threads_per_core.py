"""Cores and threads: what a real Slurm gives to jobs whose site leaves one thread of each core."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal import own_sandbox, patient_client
from variants import varied

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.job.prepare import prepare
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import shape_from_profile
from hpctrain.spec.loader import find_profile, load_profile

LIMIT_SECONDS = 300
SITE = "juwels-booster"
SPEC = """
name: cores
model: {layers: 4, hidden: 64, heads: 8, vocab: 256, seq: 64}
batch: {global: 8, micro: 1}
budget: {steps: 10}
optimizer: {lr: 1e-3}
recompute: none
checkpoint: {every_steps: 5}
resources: {gpus: 4, walltime: 00:05:00}
"""


@pytest.fixture(scope="module")
def booster() -> Iterator[Sandbox]:
    """One node as the site has them: 48 cores with two threads each."""
    shape = shape_from_profile(load_profile(find_profile(SITE)).document)
    assert (shape.cpus_per_node, shape.threads_per_core) == (96, 2)
    with own_sandbox(replace(shape, nodes=1, slurmd_timeout_seconds=600)) as box:
        yield box


# Options of the site, and the CPUs of a task that its job and its steps ask for.
CASES = {
    "both": ("{sbatch: {threads-per-core: 1}, srun: {threads-per-core: 1}}", 12, 12),
    "hint": ("{sbatch: {hint: nomultithread}, srun: {threads-per-core: null}}", 12, 12),
    "srun": ("{sbatch: {threads-per-core: null}, srun: {threads-per-core: 1}}", 24, 12),
    "none": ("{sbatch: {threads-per-core: null}, srun: {threads-per-core: null}}", 24, 24),
}


@pytest.mark.parametrize("case", varied(CASES, "both", "srun"))
def test_a_job_has_all_cores_of_its_node(booster: Sandbox, tmp_path: Path, case: str) -> None:
    options, job, step = CASES[case]
    spec, profile = tmp_path / "cores.yaml", tmp_path / "own.yaml"
    spec.write_text(SPEC)
    # what a job has may be asked for again by its steps
    again = "memory: auto, srun_resources: true"
    base = f"extends: {SITE}\nname: own\nslurm: {{account: sandbox, {again}, options: {options}}}\n"
    profile.write_text(f"{base}software: {{modules: null}}\n")
    script = prepare(spec, str(profile), runs=tmp_path / "runs").script
    assert f"#SBATCH --cpus-per-task={job}\n" in script
    directives = "".join(re.findall(r"^#SBATCH .*\n", script, re.MULTILINE))
    launch = script[script.index("\n  srun ") : script.index(" -m hpctrain.train")]
    srun = re.sub(r"\S+$", "", launch)
    assert f"--cpus-per-task={step} " in srun and "--gres=gpu:4 " in srun and "--mem=0 " in srun
    (tmp_path / "logs").mkdir()
    text = f"#!/bin/bash\n{directives}\n{srun} true\n"
    (tmp_path / "job.sbatch").write_text(text)
    environment = {**os.environ, **booster.environment()}
    done = subprocess.run(
        ["sbatch", "--wait", "job.sbatch"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    log = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))
    assert done.returncode == 0, done.stderr + log
    twice = text.replace(f"#SBATCH --cpus-per-task={job}\n", f"#SBATCH --cpus-per-task={2 * job}\n")
    with pytest.raises(SlurmRefusedError, match="node configuration is not available"):
        patient_client(environment).test_only(twice)
