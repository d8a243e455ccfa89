"""What only newer Slurms do: from 24.05 on whatever leaves in a grace period is requeued."""

from __future__ import annotations

import time

from rehearsal import STEPS, PlannedFault, Rehearsal, Stage
from slurm_settings import grace
from survival import Fault, Survival

from hpctrain.actions.state import RunState
from hpctrain.store.ledger import EventKind

# Longer than Slurm lets a requeued job wait here (cred_expire + 1 s).
_COMEBACK_SECONDS = 12.0


def test_a_run_that_is_done_within_a_grace_is_not_started_again(
    accounting_stage: Stage, survival: Survival
) -> None:
    waits = (
        PlannedFault(epoch=1, rank=-1, step=STEPS, do="settle"),
        PlannedFault(epoch=1, rank=1, step=STEPS, do="await_word", text="last"),
    )
    rehearsal = accounting_stage.start("name=grace", planned=waits)
    rehearsal.wait_for_step(STEPS - 1)
    with grace(accounting_stage.sandbox):
        rehearsal.urgent_job()
        rehearsal.wait(lambda: is_being_preempted(rehearsal), "being preempted")
        rehearsal.say("last")
        row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    deadline = time.monotonic() + _COMEBACK_SECONDS
    while time.monotonic() < deadline:
        assert rehearsal.attempts == 1, rehearsal.logs()
        time.sleep(0.5)
    job = rehearsal.slurm.show_job(rehearsal.job_id)
    assert job is None or (job.state.is_ended and job.requeue is False), job
    assert [event.action for event in rehearsal.events(EventKind.ACTION)] == ["finish"]
    survival.shown(
        Fault(76, "preempted in its last step, done within the grace (Slurm 24.11, 26.05)"),
        cause="done",
        action="finish; Slurm is told not to requeue it, and does not",
    )


def is_being_preempted(rehearsal: Rehearsal) -> bool:
    job = rehearsal.slurm.show_job(rehearsal.job_id)
    return job is not None and job.preempt_time is not None
