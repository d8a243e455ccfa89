"""Two members of a group who do something to one directory of runs at the same moment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from another_user import AnotherUser, Bystander
from rehearsal import MADE_UP, PATIENCE_SECONDS, Rehearsal, Stage

from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.prepare import prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import all_runs
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import read_request
from hpctrain.runs.control import cancel, resume
from hpctrain.runs.describe import describe
from hpctrain.runs.state import RunState
from hpctrain.slurm.client import SlurmClient

pytestmark = pytest.mark.stand_in

# Long enough that only people end it.
_ENDLESS = ("budget.steps=100000", "checkpoint.every_steps=100000", MADE_UP)


def shared(stage: Stage, user: AnotherUser) -> Path:
    """A directory of runs of the other user's group, as a project has it."""
    stage.runs.mkdir()
    os.chown(stage.runs, -1, user.account.pw_gid)
    stage.runs.chmod(0o2775)
    return stage.runs


def test_both_submit_the_same_spec(public_stage: Stage, another_user: AnotherUser) -> None:
    """Each gets a run, with a job and a ledger of its own, and neither writes into the other's."""
    runs = shared(public_stage, another_user)
    _, place = public_stage.prepared("name=both", profile={"run_access": "group"})
    public_stage.fill()
    ada = another_user.client_of(public_stage.sandbox)
    fork = get_context("fork")
    barrier = fork.Barrier(2)
    mine = fork.Process(
        target=submit_with, args=(barrier, place, runs, public_stage.sandbox.environment())
    )
    mine.start()
    ada.call(submit_with, barrier, place, runs, ada.environment)
    mine.join(PATIENCE_SECONDS)
    assert mine.exitcode == 0

    found = all_runs(runs)
    assert len(found) == 2 and {run.owner_id for run in found} == {0, ada.account.pw_uid}
    jobs = set()
    for run in found:
        assert run.layout.ledger.stat().st_uid == run.owner_id
        (submitted,) = [e for e in run.ledger.events() if e.event is EventKind.SUBMITTED]
        assert submitted.job_id is not None
        job = public_stage.slurm.show_job(submitted.job_id)
        assert job is not None and job.state.is_pending and run.run_id in job.comment
        jobs.add(job.job_id)
    assert len(jobs) == 2


def submit_with(barrier: Barrier, place: Path, runs: Path, environment: dict[str, str]) -> None:
    """Submit what is in `place` when the other one is as far, too."""
    spec, profile = place / "rehearsal.yaml", place / "profile.yaml"
    prepared = prepare(spec, str(profile), ["name=both"], runs=runs)
    slurm = SlurmClient({**os.environ, **environment}, timeout_seconds=PATIENCE_SECONDS)
    barrier.wait(PATIENCE_SECONDS)
    submit(prepared, runs, slurm)


@pytest.mark.variant("test_both_submit_the_same_spec")
def test_one_holds_what_the_other_resumes_and_stops_what_the_other_cancels(
    public_stage: Stage, another_user: AnotherUser
) -> None:
    """Whoever comes first: the run ends up in one state, and what was saved stays."""
    shared(public_stage, another_user)
    profile = {"run_access": "group-control"}
    raced = public_stage.start("name=raced", *_ENDLESS, profile=profile)
    run, slurm = raced.run, raced.slurm
    raced.wait_for_step(3)
    client = another_user.client_of(public_stage.sandbox)
    with client.attending() as ada, ThreadPoolExecutor(1) as pool:
        held = pool.submit(typed, ada, ["hold", run.run_id, "--runs", str(public_stage.runs)])
        resume(run, slurm)
        assert held.result(PATIENCE_SECONDS) == (0, "")
        raced.wait_until(lambda row: settled(raced, row.state), "settled")
        resume(run, slurm)
        steps = raced.status().step or 0
        raced.wait_until(lambda row: (row.step or 0) > steps, "training again")
        saved = published_steps(run.layout.checkpoints)

        stopped = pool.submit(typed, ada, ["stop", run.run_id, "--runs", str(public_stage.runs)])
        cancel(run, slurm)
        code, error = stopped.result(PATIENCE_SECONDS)
        assert code == 0 or "there is nothing to stop" in error, error
    row = raced.wait_till_over()
    assert row.state in (RunState.CANCELLED, RunState.STOPPED), raced.logs()
    assert not slurm.live_jobs_named(run.run_id)
    assert set(saved) <= set(published_steps(run.layout.checkpoints))
    asked = {one.action for one in describe(run).asked}
    # `resume` may come before the supervisor has obeyed: it takes the request back.
    assert {"hold", "resume"} <= asked or "take back" in asked, asked


def typed(ada: Bystander, words: Sequence[str]) -> tuple[int, str]:
    """Exit code, and what was said about an error."""
    done = ada.hpctrain(*words)
    return done.exit_code, done.stderr if done.exit_code else ""


def settled(raced: Rehearsal, state: RunState) -> bool:
    """Held, with nothing left to follow; or it trains, and nobody asks it to leave."""
    if read_request(raced.run.layout) is not None:
        return False
    job = raced.slurm.show_job(raced.job_id)
    held = job is not None and job.state.is_pending and job.hold is not None
    trains = state is RunState.RUNNING and raced.run.layout.progress.exists()
    return held or trains
