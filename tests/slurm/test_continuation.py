"""A run that Slurm does not requeue goes on in its next job, with the same losses."""

from __future__ import annotations

import signal

import pytest
from rehearsal import MADE_UP, PlannedFault, Rehearsal, Stage, held
from slurm_settings import grace
from variants import varied

from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import started_ids, submitted_ids
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus
from hpctrain.sandbox.daemons import step_daemons
from hpctrain.sandbox.processes import send
from hpctrain.slurm.records import JobRecord

pytestmark = pytest.mark.stand_in


def live_jobs(rehearsal: Rehearsal) -> list[JobRecord]:
    """Everything of the run that waits or runs."""
    found = rehearsal.slurm.jobs(submitted_ids(rehearsal.run.ledger.events()))
    return [job for job in found.values() if not job.state.is_ended]


def running(rehearsal: Rehearsal) -> JobRecord:
    (job,) = (job for job in live_jobs(rehearsal) if job.state.is_running)
    return job


def wait_till_no_job_is_left(rehearsal: Rehearsal) -> RunStatus:
    """The last job may be completing for a while after Slurm has ended it."""
    rehearsal.wait_until(lambda _: not live_jobs(rehearsal), "without a job")
    return rehearsal.wait_until(lambda row: row.state.over, "over")


def jobs_that_began(rehearsal: Rehearsal) -> list[int]:
    return started_ids(rehearsal.run.ledger.events())


@pytest.mark.parametrize("mode", varied(["chain", "singleton", "array"], "chain"))
def test_the_next_job_goes_on_after_a_preemption(
    mode: str, stage: Stage, reference: RunFiles
) -> None:
    planned = held(1, 14, do="await_warning")
    rehearsal = stage.start(f"name={mode}", continuation=mode, planned=planned)
    rehearsal.wait_for_checkpoint(10)
    waiting = [job for job in live_jobs(rehearsal) if job.state.is_pending]
    assert waiting, "somebody waits behind the job that runs"
    with grace(stage.sandbox, seconds=600):
        rehearsal.urgent_job()
        rehearsal.wait(lambda: bool(rehearsal.causes), "preempted")
    wait_till_no_job_is_left(rehearsal)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["preempted", "done"], rehearsal.logs()
    first, second = jobs_that_began(rehearsal)
    assert first != second and rehearsal.attempts == 2, rehearsal.logs()
    assert all(event.restart_count == 0 for event in rehearsal.events(EventKind.ATTEMPT_STARTED))
    before, after = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert after.resume_step == before.checkpoint_step
    assert [event.action for event in rehearsal.events(EventKind.ACTION)] == ["leave", "finish"]


@pytest.mark.variant("test_cancel_ends_every_job")
@pytest.mark.parametrize("mode", varied(["chain", "array"], "chain"))
def test_scancel_of_the_running_job_ends_the_run(mode: str, stage: Stage) -> None:
    """Slurm would start the next job: a supervisor or the next job itself must end that."""
    rehearsal = stage.start(f"name=scancel-{mode}", "budget.steps=4000", MADE_UP, continuation=mode)
    rehearsal.wait_for_step(1)
    first = f"{rehearsal.job_id}_1" if mode == "array" else str(rehearsal.job_id)
    stage.sandbox.command("scancel", first)
    row = wait_till_no_job_is_left(rehearsal)
    assert row.state is RunState.CANCELLED, rehearsal.logs()
    assert len(rehearsal.events(EventKind.LAUNCH_STARTED)) == 1, rehearsal.logs()


@pytest.mark.variant("test_cancel_ends_every_job")
def test_a_chain_whose_supervisor_dies_with_its_cancelled_job_ends_too(stage: Stage) -> None:
    """Nobody is left to end the chain, so its next job has to."""
    deaf = (  # ranks that left would let the supervisor speak before it is killed
        PlannedFault(epoch=1, rank=-1, do="hear_nothing"),
        PlannedFault(epoch=1, rank=1, step=3, do="sleep"),
    )
    rehearsal = stage.start("name=killed", continuation="chain", planned=deaf)
    rehearsal.wait_for_step(2)
    supervisors = [p for p in rehearsal.processes() if "hpctrain.supervise" in p.command_line]
    # without slurmstepd no TERM arrives before the KILL
    batch = [one.identity for one in step_daemons(stage.sandbox.paths, rehearsal.nodes()[0])]
    rehearsal.kill(supervisors, signal.SIGSTOP)
    send(batch, signal.SIGSTOP)
    stage.slurm.cancel(running(rehearsal).job_id)
    rehearsal.kill(supervisors)
    send(batch, signal.SIGCONT)
    rehearsal.wait_until(lambda _: bool(rehearsal.events(EventKind.ACTION)), "in its second job")
    row = wait_till_no_job_is_left(rehearsal)
    (left,) = rehearsal.events(EventKind.ACTION)
    assert left.action == "leave" and left.job_id != rehearsal.job_id
    assert len(rehearsal.events(EventKind.LAUNCH_STARTED)) == 1, rehearsal.logs()
    assert row.state is RunState.CANCELLED, rehearsal.logs()


def test_cancel_ends_every_job(stage: Stage) -> None:
    rehearsal = stage.start(
        "name=cancel-all", "budget.steps=4000", MADE_UP, continuation="singleton"
    )
    rehearsal.wait_for_step(1)
    assert len(live_jobs(rehearsal)) == 8
    cancel(rehearsal.run, stage.slurm)
    row = wait_till_no_job_is_left(rehearsal)
    assert row.state is RunState.CANCELLED, rehearsal.logs()
    assert rehearsal.attempts == 1
