"""What a site makes of a job: a real job_submit.lua, and a command of its own in sbatch's place."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from command_line import hpctrain
from other_cluster import client_of
from rehearsal import NO_ROOM, Rehearsal, Stage, patient_client
from sleeping_jobs import QUIET, SLEEP

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel, hold, resume
from hpctrain.runs.describe import describe, story_lines
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.runs.why import why, why_lines
from hpctrain.sandbox.faults import set_option
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm.client import SlurmClient
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


def prepared_with(stage: Stage, name: str, slurm: str, continuation: str = "requeue") -> Prepared:
    """A rehearsal whose profile has one more line in its section `slurm`."""
    _, place = stage.prepared(f"name={name}", *SHORT, continuation=continuation)
    site = place / "profile.yaml"
    site.write_text(site.read_text().replace("\nslurm:\n", f"\nslurm:\n  {slurm}\n"))
    words = (f"name={name}", *SHORT)
    return prepare(place / "rehearsal.yaml", str(site), words, runs=stage.runs)


def test_a_plug_in_changes_the_job_and_says_so(stage: Stage) -> None:
    """It is told, and the run is found without its comment."""
    prepared, _ = stage.prepared("name=moved", *SHORT)
    with job_submit_lua(stage.sandbox, MOVES):
        submitted = submit(prepared, stage.runs, stage.slurm)
    said = ("sbatch: Jobs of students go to `brief`: see https://site.example/queues",)
    assert submitted.answer.messages == said
    changes = submitted.answer.changes
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
    assert cancel(run, stage.slurm).job_ids == (submitted.job_id,), "it is known by name and place"


def test_a_refusal_of_a_plug_in_is_shown_whole(stage: Stage) -> None:
    _, place = stage.prepared("name=refused", *SHORT)
    with job_submit_lua(stage.sandbox, REFUSES), client_of(stage.sandbox):
        spec, site = place / "rehearsal.yaml", place / "profile.yaml"
        words = [word for one in ("name=refused", *SHORT) for word in ("--set", one)]
        done = hpctrain(
            "submit", "-y", "-p", str(site), str(spec), *words, "--runs", str(stage.runs)
        )
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
[ "$1" = --project ] && [ "$3" = --parsable ] || exit 64
account=$2
shift 3
echo "Welcome to the site"
echo "charging $account" >&2
exec sbatch --account="$account" "$@"
"""


def test_another_command_submits(stage: Stage) -> None:
    """It answers as sbatch without --parsable; a job of a chain submits the next one by it, too."""
    wrapper = stage.directory / "site_sbatch"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    line = f"submit_command: [{wrapper}, --project, mine]"
    prepared = prepared_with(stage, "wrapped", line, "chain")
    assert f"&& {wrapper} --project mine job.sbatch" in prepared.script
    submitted = submit(prepared, stage.runs, stage.slurm)
    assert submitted.answer.messages == ("Welcome to the site", "charging mine")
    assert stage.slurm.jobs([submitted.job_id])[submitted.job_id].account == "mine"
    run = find_run(stage.runs, submitted.run_id)
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id)
    rehearsal.wait(lambda: len(rehearsal.events(EventKind.SUBMITTED)) > 1, "with a successor")
    cancel(run, stage.slurm)
    first, successor = rehearsal.events(EventKind.SUBMITTED)
    assert (
        successor.successor_of == first.job_id
        and successor.site_messages == submitted.answer.messages
    )


def test_a_command_that_is_not_there_is_named(stage: Stage) -> None:
    prepared = prepared_with(stage, "unsubmitted", "submit_command: [no_such_sbatch]")
    with pytest.raises(SlurmRefusedError, match="cannot run `no_such_sbatch`") as refused:
        submit(prepared, stage.runs, stage.slurm)
    assert "slurm.submit_command" in str(refused.value.hint)
    assert not list(stage.runs.glob("unsubmitted-*"))


def test_a_program_that_the_node_does_not_have_is_named(stage: Stage) -> None:
    """The script ends before there is a supervisor: its own log has the reason."""
    missing = "/nonexistent/env/bin/python"
    prepared, place = stage.prepared("name=lost", *SHORT, software=lambda _: {"python": missing})
    submitted = submit(prepared, stage.runs, stage.slurm)
    run = find_run(stage.runs, submitted.run_id)
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, place)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.FAILED, rehearsal.logs()
    assert "exit code 127" in row.reason
    assert f"{missing}: No such file or directory; the node does not have it" in row.reason
    assert row.reason in " ".join(" ".join(why_lines(why(run, stage.slurm), 0.0)).split())
    seen = watch(stage.runs, stage.slurm, grace_seconds=0.0).seen  # and what other tests have left
    assert [missing in one.reason for one in seen if one.run_id == run.run_id] == [True]


def login_node_of_another(sandbox: Sandbox, place: Path) -> SlurmClient:
    """A client of a cluster whose own controller never answers, with the same slurmdbd."""
    text = sandbox.paths.slurm_conf.read_text()
    text = text.replace("ClusterName=sandbox", "ClusterName=elsewhere")
    conf = place / "slurm.conf"
    conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", text))
    return patient_client({**os.environ, **sandbox.environment(), "SLURM_CONF": str(conf)})


@pytest.mark.nightly("newer releases of Slurm, which are fetched, with accounting")
def test_a_run_of_another_cluster_by_its_name(accounting_stage: Stage, tmp_path: Path) -> None:
    """Submitted, seen, held, resumed and looked after from a login node of another cluster."""
    stage, elsewhere = accounting_stage, login_node_of_another(accounting_stage.sandbox, tmp_path)
    with pytest.raises(SlurmUnreachableError):
        elsewhere.config()
    prepared = prepared_with(stage, "far", "cluster: sandbox")
    assert "&& sbatch --clusters=sandbox job.sbatch" in prepared.script
    there = elsewhere.at(cluster="sandbox")
    full = there.submit(NO_ROOM).job_id
    submitted = submit(prepared, stage.runs, elsewhere)
    assert submitted.answer.changes == ()
    run = find_run(stage.runs, submitted.run_id)
    rehearsal = Rehearsal(stage.sandbox, there, run, submitted.job_id)
    row = statuses([run], elsewhere)[0]
    assert (row.state, row.job_id) == (RunState.PENDING, submitted.job_id)
    assert hold(run, elsewhere).changed and "held" in statuses([run], elsewhere)[0].reason.lower()
    assert why(run, elsewhere).waiting
    passed = watch(stage.runs, elsewhere)
    assert (passed.complete, passed.elsewhere) == (True, 0)
    there.cancel(full)
    resume(run, elsewhere)
    rehearsal.wait(lambda: bool(rehearsal.events(EventKind.ATTEMPT_STARTED)), "started")
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()
    again = submit(prepared_with(stage, "off", "cluster: sandbox"), stage.runs, elsewhere)
    cancelled = find_run(stage.runs, again.run_id)
    assert cancel(cancelled, elsewhere).job_ids == (again.job_id,)
    assert statuses([cancelled], elsewhere)[0].state is RunState.CANCELLED
