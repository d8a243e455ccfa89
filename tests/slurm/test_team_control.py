"""What a team asks of a run while it trains on a real Slurm: followed, answered, nothing lost."""

from __future__ import annotations

import pytest
from rehearsal import MADE_UP, PATIENCE_SECONDS, Rehearsal, Stage

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.ledger import EventKind
from hpctrain.runs import control
from hpctrain.runs.describe import describe
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.stand_in

# Long enough that only people end it.
_ENDLESS = "budget.steps=100000"


def test_a_run_is_saved_held_resumed_stopped_and_resumed(stage: Stage) -> None:
    rehearsal = stage.start("name=team", _ENDLESS, MADE_UP, "checkpoint.every_steps=100000")
    rehearsal.wait_for_step(3)
    run, slurm = rehearsal.run, rehearsal.slurm
    asked_at_step = control.step_now(run.layout)
    control.save(run, slurm, reason="before the demo")
    saved = control.wait_for_save(run, slurm, asked_at_step, PATIENCE_SECONDS)
    assert saved > asked_at_step and rehearsal.epoch == 1, "training goes on"

    control.hold(run, slurm, reason="budget meeting")
    rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "held")
    record = slurm.show_job(rehearsal.job_id)
    assert record is not None and record.hold is not None, record
    held = step_of_the_end(rehearsal)
    assert control.hold(run, slurm).changed is False

    control.resume(run, slurm)
    assert control.resume(run, slurm).changed is False
    rehearsal.wait(lambda: rehearsal.epoch == 2, "launched again")
    assert rehearsal.events(EventKind.RESUME)[-1].resume_step == held
    rehearsal.wait_for_step(held + 3, epoch=2)

    run.layout.stop_request.touch()  # as any member of the team can
    row = rehearsal.wait_till_over()
    assert row.state is RunState.STOPPED, f"{row}\n{rehearsal.logs()}"
    stopped = step_of_the_end(rehearsal)
    assert control.stop(run, slurm).changed is False

    job_id = control.resume(run, slurm).job_id
    assert job_id is not None and job_id != rehearsal.job_id
    rehearsal.job_id = job_id
    rehearsal.wait(lambda: rehearsal.epoch == 3, "submitted again")
    assert rehearsal.events(EventKind.RESUME)[-1].resume_step == stopped
    rehearsal.wait_for_step(stopped + 3, epoch=3)

    control.stop(run, slurm, now=True)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.STOPPED, f"{row}\n{rehearsal.logs()}"
    assert published_steps(run.layout.checkpoints)[-1] == stopped, "it was told not to save"
    assert list(run.layout.control.iterdir()) == []
    assert all(one.answer for one in describe(run).asked), describe(run).asked


def step_of_the_end(rehearsal: Rehearsal) -> int:
    """The step that the last launch left at, which is saved."""
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[-1]
    assert ended.cause == "yielded", rehearsal.logs()
    assert ended.last_step is not None and ended.last_step == ended.checkpoint_step
    return ended.last_step
