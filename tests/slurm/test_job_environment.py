"""What a job of the real Slurm inherits, and the software that it loads before it starts a run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from rehearsal import Stage, patient_client
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
    mine |= {"https_proxy": "http://p:1", "no_proxy_at_all": "x"}
    slurm = patient_client({**os.environ, **sandbox.environment(), **mine})
    script = f"#!/bin/bash\nenv -0 > {seen}.part\nmv {seen}.part {seen}\n"
    options = ("--output=/dev/null",)
    job_id = slurm.submit(script, options, variables=(*INHERITED, "WANTED", "*_proxy")).job_id
    assert eventually(lambda: job_of(slurm, job_id).state.is_ended)
    found = dict(line.split("=", 1) for line in seen.read_text().split("\0") if line)
    assert (found["WANTED"], found["HOME"]) == ("two words", str(home))
    assert found.pop("https_proxy") == "http://p:1"
    assert "SLURM_GET_USER_ENV" not in found, "slurmd has run `su - USER -c env`"
    expected = {*INHERITED, "WANTED", *_OF_BASH, *_OF_SLURMD}
    strangers = {name for name in found if not name.startswith(_OF_LAUNCHERS)} - expected
    assert not strangers, sorted(strangers)


@pytest.mark.stand_in
def test_a_run_has_the_software_that_its_job_activates(stage: Stage, tmp_path: Path) -> None:
    """Supervisor and ranks are started by the `python3` of that environment."""
    own = Stage(stage.sandbox, tmp_path, stand_in=stage.stand_in)
    activate = tmp_path / "it's $one/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export ACTIVE=yes PATH={shlex.quote(str(activate.parent))}:$PATH\n")
    setup = tmp_path / "setup.sh"
    setup.write_text('[ "$ACTIVE" = yes ]\nexport SET_UP=yes\n')

    def software(python: str) -> dict[str, object]:
        (activate.parent / "python3").unlink(missing_ok=True)
        (activate.parent / "python3").symlink_to(python)
        place = str(activate.parents[1]).replace("$", "$$")
        return {"python": None, "activate": {"venv": place}, "setup": str(setup)}

    good = own.start("name=good", "budget.steps=10", software=software)
    good.wait_till_over()
    assert "-m hpctrain.train" in good.run.layout.script.read_text()
    setup.write_text("true\n[ $ACTIVE = no ]\ntrue\n")
    bad = own.start("name=bad", "budget.steps=10", software=software)
    bad.wait(lambda: "software.setup" in bad.logs(), "ended")
    assert f"hpctrain: software.setup: {setup}:2: `[ $ACTIVE = no ]` failed on " in bad.logs()
    assert eventually(lambda: job_of(own.slurm, bad.job_id).exit_code == 78)
    assert not bad.run.layout.metrics.exists(), "nothing was trained"
