"""What a job of the real Slurm inherits: named variables, and nothing of a login."""

from __future__ import annotations

import os
from pathlib import Path

from rehearsal import patient_client
from test_client import eventually, job_of

from hpctrain.job.render.environment import INHERITED
from hpctrain.sandbox.sandbox import Sandbox

# bash's own, and those that slurmd sets besides SLURM_* (sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
_OF_BASH = {"PWD", "OLDPWD", "SHLVL", "_"}
_OF_SLURMD = {"ENVIRONMENT", "HOSTNAME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
_OF_SLURMD |= {"ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
# What Slurm 24 tells other launchers of a job about srun.
_OF_LAUNCHERS = ("SLURM_", "SLURMD_", "HYDRA_", "I_MPI_HYDRA_", "OMPI_MCA_", "PRTE_MCA_")


def test_a_job_inherits_the_named_variables_and_no_login_runs(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    home, seen = tmp_path / "home", tmp_path / "seen"
    home.mkdir()
    for name in (".bash_profile", ".profile", ".bashrc"):
        (home / name).write_text("export OF_THE_LOGIN=yes\nsleep 30\n")
    mine = {"HOME": str(home), "OF_THE_SHELL": "yes", "WANTED": "two words", "SBATCH_EXPORT": "NIL"}
    slurm = patient_client({**os.environ, **sandbox.environment(), **mine})
    script = f"#!/bin/bash\nenv -0 > {seen}.part\nmv {seen}.part {seen}\n"
    options = ("--output=/dev/null",)
    job_id = slurm.submit(script, options, variables=(*INHERITED, "WANTED")).job_id
    assert eventually(lambda: job_of(slurm, job_id).state.is_ended)
    found = dict(line.split("=", 1) for line in seen.read_text().split("\0") if line)
    assert (found["WANTED"], found["HOME"]) == ("two words", str(home))
    assert "SLURM_GET_USER_ENV" not in found, "slurmd has run `su - USER -c env`"
    expected = {*INHERITED, "WANTED", *_OF_BASH, *_OF_SLURMD}
    strangers = {name for name in found if not name.startswith(_OF_LAUNCHERS)} - expected
    assert not strangers, sorted(strangers)
