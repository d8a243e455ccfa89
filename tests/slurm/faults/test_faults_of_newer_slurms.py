"""What only newer Slurms do: from 24.05 on whatever leaves in a grace period is requeued."""

from __future__ import annotations

import time

import pytest
from rehearsal import STEPS, PlannedFault, Rehearsal, Stage
from slurm_settings import grace
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind

pytestmark = pytest.mark.nightly("newer releases of Slurm, which are fetched")

# Longer than Slurm lets a requeued job wait here (cred_expire + 1 s).
_COMEBACK_SECONDS = 12.0
# Preempted in the middle of a long step, and again in the last step of the run.
PREEMPTIONS = (
    PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),
    PlannedFault(epoch=2, rank=-1, step=STEPS, do="settle"),
    PlannedFault(epoch=2, rank=1, step=STEPS, do="await_word", text="last"),
)


@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_a_run_that_is_done_within_a_grace_is_not_started_again(
    accounting_stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """Nor is one that only leaves lost: it asks for its requeue, and resumes without a loss."""
    rehearsal = accounting_stage.start("name=grace", planned=PREEMPTIONS)
    slurm = f"Slurm {'.'.join(map(str, rehearsal.slurm.config().version))}"
    with grace(accounting_stage.sandbox):
        preempt(rehearsal, epoch=1, after_step=12)
        fault = Fault(1, f"preempted; the ranks save and leave within the grace ({slurm})")
        saved = survival.recovered(rehearsal, fault, cause="preempted", action="requeue", epoch=1)
        assert (saved.resumed_step, saved.lost_steps) == (13, 0), rehearsal.logs()
        preempt(rehearsal, epoch=2, after_step=STEPS - 1)
        rehearsal.say("last")
        rehearsal.assert_done_exactly(reference)
    deadline = time.monotonic() + _COMEBACK_SECONDS
    while time.monotonic() < deadline:
        assert rehearsal.attempts == 2, rehearsal.logs()
        time.sleep(0.5)
    job = rehearsal.slurm.show_job(rehearsal.job_id)
    assert job is None or (job.state.is_ended and job.requeue is False), job
    assert [event.action for event in rehearsal.events(EventKind.ACTION)][-1] == "finish"
    survival.shown(
        Fault(76, f"preempted in its last step, done within the grace ({slurm})"),
        cause="done",
        action="finish; Slurm is told not to requeue it, and does not",
    )


def preempt(rehearsal: Rehearsal, epoch: int, after_step: int) -> None:
    """Take all nodes from the launch, and wait until its grace has begun."""
    rehearsal.wait_for_step(after_step, epoch)
    began_at = int(time.time())
    rehearsal.urgent_job()

    def in_its_grace_or_gone() -> bool:
        job = rehearsal.slurm.show_job(rehearsal.job_id)
        begun = job is not None and (job.preempt_time or 0) >= began_at
        return begun or len(rehearsal.events(EventKind.LAUNCH_ENDED)) >= epoch

    rehearsal.wait(in_its_grace_or_gone, f"preempted in launch {epoch}")
