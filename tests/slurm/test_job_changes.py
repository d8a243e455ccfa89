"""What a site makes of a job: a real job_submit.lua, and a command of its own in sbatch's place."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from command_line import hpctrain
from other_cluster import client_of
from rehearsal import Rehearsal, Stage, patient_client
from sleeping_jobs import QUIET, SLEEP

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel, hold, resume
from hpctrain.runs.describe import describe, story_lines
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.why import why, why_lines
from hpctrain.sandbox.faults import set_option
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm.job_changes import job_changes, requested_job

pytestmark = pytest.mark.stand_in

SHORT = ("budget.steps=8", "checkpoint.every_steps=4")
MOVES = """
slurm.log_user("Jobs of students go to `brief`: see https://site.example/queues")
job.partition = "brief"
job.comment = "proj42"
job.time_limit = 4
"""
REFUSES = """
slurm.log_user("Account is missing.")
slurm.log_user("Ask your supervisor for one.")
return 2045
"""


@contextlib.contextmanager
def job_submit_lua(sandbox: Sandbox, body: str) -> Iterator[None]:
    """The site's plug-in runs `body` on each new job, `job`."""
    (sandbox.paths.slurm_conf.parent / "job_submit.lua").write_text(
        "function slurm_job_submit(job, partitions, uid)\n"
        f"{body if 'return' in body else f'{body}return slurm.SUCCESS'}\nend\n"
        "function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end\n"
    )
    set_option(sandbox, "JobSubmitPlugins", "lua")
    try:
        yield
    finally:
        set_option(sandbox, "JobSubmitPlugins", None)


def prepared_with(stage: Stage, name: str, slurm: str, *overrides: str) -> Prepared:
    """A rehearsal whose profile has one more line in its section `slurm`."""
    _, place = stage.prepared(f"name={name}", *SHORT)
    site = place / "profile.yaml"
    site.write_text(site.read_text().replace("\nslurm:\n", f"\nslurm:\n  {slurm}\n"))
    words = (f"name={name}", *SHORT, *overrides)
    return prepare(place / "rehearsal.yaml", str(site), words, runs=stage.runs)


def test_a_plug_in_changes_the_job_and_says_so(stage: Stage) -> None:
    """It is told, and the run is found without its comment."""
    prepared, place = stage.prepared("name=moved", *SHORT)
    with job_submit_lua(stage.sandbox, MOVES):
        submitted = submit(prepared, stage.runs, stage.slurm)
    said = ("sbatch: Jobs of students go to `brief`: see https://site.example/queues",)
    assert submitted.messages == said
    changes = submitted.changes
    assert changes == (
        "Slurm changed the partition: asked train, is brief; jobs there are preempted (requeue), "
        "with 6s of grace",
        "Slurm changed the time limit: asked 30 min, is 4 min; each attempt has that long, and "
        "the forecast took the other",
        f"Slurm changed the comment: asked hpctrain:{submitted.run_id}, is proj42; hpctrain finds "
        "the job by its name and directory",
    )
    run = find_run(stage.runs, submitted.run_id)
    for lines in (why_lines(why(run, stage.slurm), 0.0), story_lines(describe(run))):
        told = " ".join(" ".join(lines).split())
        assert all(sentence in told for sentence in (*said, *changes))
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, place)
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()


def test_a_refusal_of_a_plug_in_is_shown_whole(stage: Stage) -> None:
    prepared, place = stage.prepared("name=refused", *SHORT)
    with job_submit_lua(stage.sandbox, REFUSES), client_of(stage.sandbox):
        spec, site = place / "rehearsal.yaml", place / "profile.yaml"
        words = [word for one in ("name=refused", *SHORT) for word in ("--set", one)]
        done = hpctrain("submit", "-y", "-p", site, spec, *words, "--runs", stage.runs)
    assert done.exit_code == 5, done.stderr
    lines = done.stderr.splitlines()
    for line in ("Account is missing.", "Ask your supervisor for one."):
        assert any(line in one for one in lines), done.stderr
    assert not list(stage.runs.glob("refused-*")), "nothing is left of it"


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--gres=gpu:2", "--time=90"),
        ("--nodes=1", "--gpus-per-node=a100:1", "--exclusive", "--time=1-0", "--no-requeue"),
        ("--nodes=2-3", "--gres=gpu:a100:1", "--mem=0", "--time=1:30:10", "--requeue"),
        ("--ntasks=3", "--array=0-1%1", "--comment=two words", "--job-name=a=b", "--account=Mine"),
    ],
)
def test_a_job_as_it_was_asked_for_has_no_changes(stage: Stage, options: Sequence[str]) -> None:
    words = ("--partition=train,urgent", "--hold", *options)
    asked = requested_job("", words)
    job_id = stage.slurm.submit(SLEEP, (*QUIET, *words)).job_id
    made = next(iter(stage.slurm.jobs([job_id]).values()))
    assert asked.partition and job_changes(asked, made) == (), made


WRAPPER = """#!/bin/sh
echo "Welcome to the site"
for word; do [ "$word" = --parsable ] || set -- "$@" "$word"; shift; done
echo "charging {account}" >&2
exec sbatch --account={account} "$@"
"""


def test_another_command_submits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sbatch without --parsable answers, and a chain's successor inside of the job, too."""
    programs = stage.directory / "site-programs"
    programs.mkdir()
    wrapper = programs / "site_sbatch"
    wrapper.write_text(WRAPPER.format(account="mine"))
    wrapper.chmod(0o755)
    line = f"submit_command: [{wrapper}]"
    prepared = prepared_with(stage, "wrapped", line)
    assert f"&& {wrapper} job.sbatch" in prepared.script
    submitted = submit(prepared, stage.runs, stage.slurm)
    assert submitted.messages == ("Welcome to the site", "charging mine")
    assert stage.slurm.jobs([submitted.job_id])[submitted.job_id].account == "mine"
    run = find_run(stage.runs, submitted.run_id)
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id)
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()


def test_a_command_that_is_not_there_is_named(stage: Stage) -> None:
    prepared = prepared_with(stage, "unsubmitted", "submit_command: [no_such_sbatch]")
    with pytest.raises(SlurmRefusedError, match="cannot run `no_such_sbatch`") as refused:
        submit(prepared, stage.runs, stage.slurm)
    assert "slurm.submit_command" in str(refused.value.hint)
    assert not list(stage.runs.glob("unsubmitted-*"))
