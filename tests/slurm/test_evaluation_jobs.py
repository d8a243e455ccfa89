"""Evaluation jobs beside a run of the stand-in: results, a command that fails, retention."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, SPEC, Rehearsal, Stage, profile_text

from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.prepare import prepare
from hpctrain.job.submit import submit
from hpctrain.records.evaluations import read_evaluations_of
from hpctrain.records.find import find_run
from hpctrain.runs.evaluations import evaluation_rows, submit_evaluations
from hpctrain.runs.state import RunState
from hpctrain.supervise.evaluation_jobs import EvaluationPass
from tests.rig.stand_in.interpreter import write_stand_in_interpreter

# Counts its calls for each step, waits for a word, looks at the checkpoint, and fails on request.
_COMMAND = """\
import json, os, sys, time
checkpoint, step, output, place, mode = sys.argv[1:]
with open(f"{place}/calls", "a") as calls:
    calls.write(f"{mode} {step}\\n")
while not os.path.exists(f"{place}/go"):
    time.sleep(0.1)
files = len(os.listdir(checkpoint))
if mode == "bad":
    sys.exit("no such task")
json.dump({"files": files, "half step": int(step) / 2}, open(output, "w"))
"""


def started(stage: Stage, name: str, *overrides: str) -> Rehearsal:
    place = stage.directory / f"{name} place"
    place.mkdir()
    python = write_stand_in_interpreter(place / "stand-in", step_seconds=0.05)
    spec, site = place / "rehearsal.yaml", place / "profile.yaml"
    command = place / "evaluate it.py"
    command.write_text(_COMMAND)
    jobs = "".join(
        f"    - name: {mode}\n"
        f"      command: [{sys.executable}, '{command}', '{{checkpoint}}', '{{step}}', "
        f"'{{output}}', '{place}', {mode}]\n"
        "      gpus: 0\n"
        for mode in ("good", "bad")
    )
    spec.write_text(f"{SPEC}\nevaluation:\n  jobs:\n{jobs}")
    site.write_text(profile_text(stage.sandbox.shape, str(python)))
    given = (f"name={name}", "budget.steps=12", "checkpoint.every_steps=4", *overrides)
    prepared = prepare(spec, str(site), given, runs=stage.runs)
    submitted = submit(prepared, stage.runs, stage.slurm)
    run = find_run(stage.runs, submitted.run_id)
    return Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, place, ())


def states(run: Rehearsal) -> dict[tuple[str, int], str]:
    return {(row.name, row.step): row.state for row in evaluation_rows(run.run)}


def wait_for(run: Rehearsal, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        text = run.run.layout.evaluations
        told = text.read_text() if text.exists() else "no evaluations"
        assert time.monotonic() < deadline, f"{states(run)}\n{told}\n{run.logs()}"
        time.sleep(0.3)


def test_results_retries_and_checkpoints_that_wait(stage: Stage) -> None:
    run = started(stage, "scored", "checkpoint.keep=1")
    assert run.place is not None
    assert run.wait_till_over().state is RunState.DONE, run.logs()
    # All evaluations wait for the word, so that retention has kept what they need.
    assert published_steps(run.run.layout.checkpoints) == [4, 8, 12], run.logs()
    (run.place / "go").touch()

    def all_settled() -> bool:
        # the job of the training is gone: this is what cron does
        submit_evaluations([run.run], stage.slurm, act=True)
        return set(states(run).values()) == {"done", "failed"}

    wait_for(run, all_settled)
    rows = {(row.name, row.step): row for row in evaluation_rows(run.run)}
    assert set(rows) == {(name, step) for name in ("good", "bad") for step in (4, 8, 12)}
    for step in (4, 8, 12):
        good, bad = rows["good", step], rows["bad", step]
        assert good.metrics is not None and good.metrics["half step"] == step / 2
        assert good.metrics["files"] > 1, "it has seen the checkpoint"
        assert (bad.state, bad.attempt) == ("failed", 2) and "exit code 1" in bad.reason
        assert bad.log is not None and "no such task" in Path(bad.log).read_text()
    calls = (run.place / "calls").read_text().split("\n")[:-1]
    assert sorted(calls) == sorted(
        [f"good {step}" for step in (4, 8, 12)] + 2 * [f"bad {step}" for step in (4, 8, 12)]
    ), "each once, and a second time where it had failed"
    assert not submit_evaluations([run.run], stage.slurm, act=True)

    # A submitter dies after sbatch: only its announcement is left, and the jobs wait.
    path = run.run.layout.evaluations
    stage.fill()
    path.unlink()
    EvaluationPass(run.run.layout, stage.slurm, "watch").make()
    jobs = {one.job_id for one in read_evaluations_of(run.run.layout).values()}
    announced = [line for line in path.read_text().splitlines() if '"submitting"' in line]
    assert len(announced) == len(jobs) > 1
    path.write_text("\n".join(announced) + "\n")
    EvaluationPass(run.run.layout, stage.slurm, "watch").make()
    again = read_evaluations_of(run.run.layout)
    assert {one.job_id for one in again.values()} == jobs, "the same jobs, found by their names"
    assert {one.state for one in again.values()} == {"submitted"}


@pytest.mark.variant("test_results_retries_and_checkpoints_that_wait")
def test_where_nodes_may_not_submit_watch_does(stage: Stage) -> None:
    """The sbatch of the job refuses; the training does not notice, and a login node submits."""
    forbids = stage.directory / "forbids"
    forbids.mkdir()
    refuses = forbids / "sbatch"
    refuses.write_text("#!/bin/sh\necho 'sbatch: error: Access/permission denied' >&2; exit 1\n")
    refuses.chmod(0o755)
    run = started(
        stage,
        "forbidden",
        f"environment.variables.PATH={forbids}:{os.environ['PATH']}",
    )
    assert run.place is not None
    (run.place / "go").touch()
    assert run.wait_till_over().state is RunState.DONE, run.logs()
    found_ = read_evaluations_of(run.run.layout)
    assert found_ and all(one.refused_by == "supervisor" for one in found_.values()), run.logs()
    lines = submit_evaluations([run.run], stage.slurm, act=False)
    assert any("would submit" in line for line in lines)

    def good_done() -> bool:
        submit_evaluations([run.run], stage.slurm, act=True)
        return all(row.state == "done" for row in evaluation_rows(run.run) if row.name == "good")

    wait_for(run, good_done)
