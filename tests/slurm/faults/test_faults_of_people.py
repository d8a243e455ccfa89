"""What users and administrators do to a run: followed, and never undone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage, held
from slurm_settings import nothing_starts
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel
from hpctrain.runs.state import RunState
from hpctrain.runs.watch import watch

pytestmark = pytest.mark.stand_in

# The sandbox lets a requeued job wait for 6 s (cred_expire + 1 s): past that it would run again.
_BEYOND_REQUEUE_SECONDS = 9.0


@pytest.mark.usefixtures("patient_slurm")
def test_requeued_held_and_cancelled_by_people(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    planned = [held(launch, 4 + 10 * launch, do="await_warning") for launch in (1, 2, 3)]
    rehearsal = stage.start("name=people", planned=[one for pair in planned for one in pair])
    epoch = rehearsal.wait_for_progress()
    control(rehearsal, "requeue")
    fault = Fault(35, "an administrator requeues the job")
    survival.recovered(rehearsal, fault, cause="requeued", action="leave", epoch=epoch)
    epoch = rehearsal.wait_for_progress()
    control(rehearsal, "requeuehold")
    stays(rehearsal, RunState.PENDING)
    assert rehearsal.epoch == epoch, "a held job was started"
    control(rehearsal, "release")
    fault = Fault(35, "an administrator requeues and holds the job, and releases it later")
    survival.recovered(rehearsal, fault, cause="requeued", action="leave", epoch=epoch)
    rehearsal.wait_for_progress()
    with nothing_starts(stage.sandbox):
        control(rehearsal, "requeue")
        rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "pending")
        rehearsal.sandbox.command("scancel", str(rehearsal.job_id))
    stays(rehearsal, RunState.CANCELLED)
    survival.shown(
        Fault(34, "the user cancels the job while it waits in the queue again"),
        cause="cancelled",
        action="none: it stays cancelled",
        identical=rehearsal.assert_same_so_far(reference),
    )


def test_cancelled_by_scancel_stays_cancelled(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    planned = (PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),)
    own = stage.at(tmp_path)
    rehearsal = own.start("name=scancelled", planned=planned)
    rehearsal.wait_for_step(12)
    rehearsal.sandbox.command("scancel", str(rehearsal.job_id))
    row = rehearsal.wait_till_over()
    assert row.state is RunState.CANCELLED, rehearsal.logs()
    assert not [e for e in rehearsal.events(EventKind.ACTION) if e.action == "requeue"]
    acted = watch(own.runs, rehearsal.slurm, act=True, grace_seconds=0)
    assert not [one for one in acted.seen if one.outcome == "done"], acted
    assert rehearsal.status().state is RunState.CANCELLED, rehearsal.logs()
    survival.shown(
        Fault(34, "the user cancels the running job with scancel, and `watch --act` looks"),
        cause="cancelled",
        action="none: it stays cancelled",
        identical=rehearsal.assert_same_so_far(reference),
    )


@pytest.mark.variant("test_cancelled_by_scancel_stays_cancelled")
def test_cancelled_by_hpctrain_during_the_grace_of_a_preemption(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """The supervisor is about to requeue: `cancel` has taken that right away first."""
    planned = (PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),)
    rehearsal = stage.start("name=cancelled", planned=planned)
    rehearsal.wait_for_step(12)
    rehearsal.urgent_job()
    cancel(rehearsal.run, rehearsal.slurm)
    fault = Fault(34, "`hpctrain cancel` during the grace of a preemption")
    row = rehearsal.wait_till_over()
    assert row.state is RunState.CANCELLED, rehearsal.logs()
    survival.shown(
        fault,
        cause="cancelled",
        action="none: it stays cancelled",
        identical=rehearsal.assert_same_so_far(reference),
    )


def control(rehearsal: Rehearsal, verb: str) -> None:
    rehearsal.sandbox.command("scontrol", verb, str(rehearsal.job_id))


def stays(rehearsal: Rehearsal, state: RunState) -> None:
    """The state is reached, and still is when Slurm could have started the job again."""
    rehearsal.wait_until(lambda row: row.state is state, state.value.lower())
    time.sleep(_BEYOND_REQUEUE_SECONDS)
    row = rehearsal.status()
    assert row.state is state, f"{row}\n{rehearsal.logs()}"
