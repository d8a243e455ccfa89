"""`submit --prepare`: a run directory that an administrator reads, and starts with sbatch alone."""

from __future__ import annotations

import os
import stat
import subprocess

import pytest
from rehearsal import Rehearsal, Stage

from hpctrain.job.submit import prepare_only
from hpctrain.records.jobs import sbatch_options
from hpctrain.runs.control import resume
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses

pytestmark = pytest.mark.stand_in

SHORT = ("budget.steps=12", "checkpoint.every_steps=4")


def test_it_is_started_by_hand(stage: Stage) -> None:
    prepared, place = stage.prepared("name=by-hand", *SHORT)
    run = prepare_only(prepared, stage.runs)
    (row,) = statuses([run], stage.slurm)
    assert row.state is RunState.PREPARED
    mode = stat.S_IMODE(run.layout.script.stat().st_mode)
    assert mode == 0o600 and stat.S_IMODE(run.layout.directory.stat().st_mode) == 0o700
    options = sbatch_options(run.layout.directory)
    argv = ["sbatch", "--parsable", *options, str(run.layout.script)]
    environment = {**os.environ, **stage.sandbox.environment()}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    answer = done.stdout
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, int(answer), place, ())
    row = rehearsal.wait_until(lambda row: row.state.over, "over")
    assert (row.state, row.step, row.job_id) == (RunState.DONE, 12, int(answer))


@pytest.mark.variant("test_it_is_started_by_hand")
def test_it_is_submitted_by_resume(stage: Stage) -> None:
    prepared, place = stage.prepared("name=resumed", *SHORT)
    run = prepare_only(prepared, stage.runs)
    assert not stage.slurm.live_jobs_named(run.run_id)
    resume(run, stage.slurm)
    (job_id,) = stage.slurm.live_jobs_named(run.run_id)
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, job_id, place, ())
    row = rehearsal.wait_until(lambda row: row.state.over, "over")
    assert (row.state, row.step) == (RunState.DONE, 12)
