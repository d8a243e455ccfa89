"""`submit --after RUN`: a run that waits for another one, whatever happens to that."""

from __future__ import annotations

import re

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage, held, waits_for

from hpctrain.base.errors import InvalidInputError, UsageError
from hpctrain.job.job_submission import resubmit
from hpctrain.job.submit import submit
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import resume, stop
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.stand_in

SHORT = ("budget.steps=12", "checkpoint.every_steps=4")


def second(stage: Stage, first: Rehearsal, name: str, *, field: bool = False) -> Rehearsal:
    """Submit a run after `first`, by the option or by the field of its spec."""
    more = (f"after={first.run.run_id}",) if field else ()
    prepared, place = stage.prepared(f"name={name}", *SHORT, *more)
    submitted = submit(prepared, stage.runs, stage.slurm, None if field else first.run)
    run = find_run(stage.runs, submitted.run_id)
    return Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, place, ())


def test_it_begins_when_the_other_is_done_and_not_when_it_is_requeued(stage: Stage) -> None:
    first = stage.start("name=first", planned=held(1, 14, do="await_warning"))
    first.wait_for_step(13)
    follower = second(stage, first, "follower", field=True)
    first.urgent_job(nodes=first.nodes())
    row = follower.status()
    assert row.state is RunState.PENDING and "ependency" in row.reason
    assert first.wait_till_over().state is RunState.DONE, first.logs()
    assert len(first.events(EventKind.ATTEMPT_STARTED)) == 2, "it was requeued in between"
    row = follower.wait_till_over()
    assert row.state is RunState.DONE and row.step == 12, follower.logs()
    (done,) = [event.time for event in first.events(EventKind.LAUNCH_ENDED)][-1:]
    (began,) = [event.time for event in follower.events(EventKind.ATTEMPT_STARTED)]
    assert began > done


def test_it_never_begins_when_the_other_fails(stage: Stage) -> None:
    fault = PlannedFault(epoch=1, rank=1, step=3, do="leave", code=3)
    planned = (*waits_for("go", 2), fault)
    first = stage.start("name=fails", *SHORT, "supervise.budgets.crash=0", planned=planned)
    first.wait_for_step(1)
    follower = second(stage, first, "waits")
    first.say("go")
    assert first.wait_till_over().state is RunState.FAILED, first.logs()
    row = follower.wait_until(lambda row: "NeverSatisfied" in row.reason, "told")
    assert row.state is RunState.PENDING
    assert not follower.events(EventKind.ATTEMPT_STARTED)
    with pytest.raises(UsageError, match="is not done and has no job to wait for"):
        second(stage, first, "refused")
    prepared, _ = stage.prepared("name=refused", *SHORT, f"after={first.run.run_id}")
    place = re.escape(f"--set after={first.run.run_id}: `after`: run `{first.run.run_id}` is not")
    with pytest.raises(InvalidInputError, match=place):
        submit(prepared, stage.runs, stage.slurm)

    # A new job of the first run is what the follower waits for from then on.
    again = resubmit(first.run, stage.slurm)
    assert again.job_id != first.job_id
    row = follower.wait_till_over()
    assert row.state is RunState.DONE, f"{row}\n{follower.logs()}"
    assert first.status().state is RunState.DONE
    (began,) = [event.time for event in follower.events(EventKind.ATTEMPT_STARTED)]
    assert began > [event.time for event in first.events(EventKind.LAUNCH_ENDED)][-1]


@pytest.mark.variant("test_it_begins_when_the_other_is_done_and_not_when_it_is_requeued")
def test_it_does_not_begin_when_the_other_is_stopped_and_begins_when_that_is_done(
    stage: Stage,
) -> None:
    first = stage.start("name=first", planned=held(1, 14))
    first.wait_for_step(13)
    follower = second(stage, first, "follower", field=True)
    stop(first.run, stage.slurm, now=True)
    assert first.wait_till_over().state is RunState.STOPPED, first.logs()

    # For Slurm the job of the first has ended well, so it starts the one of the follower.
    row = follower.wait_until(lambda row: "held" in row.reason, "put back")
    assert row.state is RunState.PENDING and not follower.events(EventKind.LAUNCH_STARTED)
    (action,) = follower.events(EventKind.ACTION)
    assert f"run `{first.run.run_id}`, for which this one waits, is not done" in str(action.reason)

    resume(first.run, stage.slurm)
    row = follower.wait_until(lambda row: "ependency" in row.reason, "made to wait")
    assert first.wait_till_over().state is RunState.DONE, first.logs()
    row = follower.wait_till_over()
    assert row.state is RunState.DONE and row.step == 12, follower.logs()
    (done,) = [event.time for event in first.events(EventKind.LAUNCH_ENDED)][-1:]
    (launched,) = [event.time for event in follower.events(EventKind.LAUNCH_STARTED)]
    assert launched > done


@pytest.mark.variant("test_it_begins_when_the_other_is_done_and_not_when_it_is_requeued")
def test_a_run_that_is_done_is_not_waited_for(stage: Stage) -> None:
    first = stage.start("name=over", *SHORT)
    assert first.wait_till_over().state is RunState.DONE
    assert second(stage, first, "next", field=True).wait_till_over().state is RunState.DONE
