"""A batch script that Slurm runs as it is, and the run that `hpctrain adopt` makes of it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from command_line import hpctrain
from rehearsal import Rehearsal, Stage
from waiting import wait_until

from hpctrain.records.find import find_run
from hpctrain.runs.state import RunState

pytestmark = [
    pytest.mark.stand_in,
    pytest.mark.variant("test_a_script_of_ones_own_runs_to_its_end"),
]

TRAINER = """\
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=pathlib.Path)
parser.add_argument("--resume")
parser.add_argument("--max_steps", type=int)
given = parser.parse_args()
loss = 1.0
for step in range(1, given.max_steps + 1):
    loss = 0.9 * loss + 0.01 * (step % 7)
if os.environ["SLURM_PROCID"] == "0":
    given.output_dir.mkdir(parents=True, exist_ok=True)
    told = {"loss": loss, "mode": os.environ["MODE"], "here": os.getcwd()}
    (given.output_dir / f"state-{step}.json").write_text(json.dumps(told))
"""

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=adopted
#SBATCH -N 2 --ntasks-per-node=1 --gres=gpu:1   # a rank on each node
#SBATCH -o {directory}/%x.log --time=10
#SBATCH --chdir={directory}
set -euo pipefail
STEPS=$((4 * 10))
export MODE="quick test"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ARGS=(
    --output_dir {directory}/out
    --resume {directory}/out/none
    --max_steps $STEPS
)
echo "from $MASTER_ADDR"
srun --wait=60 --kill-on-bad-exit=1 {python} trainer.py "${{ARGS[@]}}" 2>&1 | tee -a log.txt
"""


def test_the_run_does_what_the_script_did(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stage.sandbox.environment().items():
        monkeypatch.setenv(name, value)
    place = stage.at(tmp_path)
    _, files = place.prepared("name=profile")
    work = tmp_path / "work"
    work.mkdir()
    (work / "trainer.py").write_text(TRAINER)
    script = work / "job.sbatch"
    script.write_text(SCRIPT.format(directory=work, python=sys.executable))
    place.slurm.submit(script.read_text())
    wait_until(
        lambda: not place.sandbox.command("squeue", "--noheader").strip(),
        "over",
        pause_seconds=0.5,
    )
    by_script = json.loads((work / "out" / "state-40.json").read_text())

    monkeypatch.chdir(work)
    done = hpctrain("adopt", "job.sbatch", "-p", str(files / "profile.yaml"), "-o", "spec")
    assert done.exit_code == 0, done.stderr
    assert re.findall(r"`([\w.]+)`: a question is open", done.stderr) == ["trainer.checkpoint.path"]
    spec = work / "spec" / "adopted.yaml"
    spec.write_text(spec.read_text().replace("path: ASK", 'path: "state-{step}.json"'))
    words = [str(spec), "-p", str(files / "profile.yaml"), "--runs", str(place.runs)]
    submitted = hpctrain("submit", *words, "-y")
    assert submitted.exit_code == 0, submitted.stdout + submitted.stderr
    run = find_run(place.runs, "adopted")
    row = Rehearsal(place.sandbox, place.slurm, run, 0, files, ()).wait_till_over()
    assert row.state is RunState.DONE, submitted.stdout
    (state,) = (run.layout.directory / "output").glob("launch-*/state-40.json")
    assert json.loads(state.read_text()) == by_script
    assert by_script["mode"] == "quick test"
    assert by_script["here"] == os.path.realpath(work)
