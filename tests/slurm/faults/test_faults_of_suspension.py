"""A job that Slurm suspends: everybody of it stands still, and nobody is hung."""

from __future__ import annotations

import time

import pytest
from rehearsal import Rehearsal, Stage, waits_for
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.runs.control import cancel, stop
from hpctrain.runs.state import RunState
from hpctrain.sandbox.processes import find_process

pytestmark = pytest.mark.stand_in

# Longer than anything but a hang lasts on a machine under load.
STALL_SECONDS = 45


def suspend(rehearsal: Rehearsal, stage: Stage) -> None:
    """While the ranks wait for the word at step 13."""
    rehearsal.wait_for_step(12)
    stage.sandbox.command("scontrol", "suspend", str(rehearsal.job_id))
    row = rehearsal.wait_until(lambda row: row.reason == "suspended", "suspended")
    assert row.state is RunState.RUNNING
    rehearsal.wait(lambda: stand_still(rehearsal), "with ranks that stand still")


def stand_still(rehearsal: Rehearsal) -> bool:
    """Slurm says that a job is suspended before its nodes have done it."""
    ranks = [process for process in rehearsal.processes() if process.rank is not None]
    found = [find_process(process.pid) for process in ranks]
    return bool(ranks) and all(one is None or one.state == "T" for one in found)


def unsuspend(rehearsal: Rehearsal, stage: Stage) -> None:
    stage.sandbox.command("scontrol", "resume", str(rehearsal.job_id))


@pytest.mark.variant("test_hangs_are_told_from_slow_saves_and_the_odd_rank_is_named")
def test_a_job_that_is_suspended_for_longer_than_a_hang_takes(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    words = ("name=suspended", f"supervise.stall={STALL_SECONDS}s")
    rehearsal = stage.start(*words, planned=waits_for("on", 13))
    suspend(rehearsal, stage)
    rehearsal.say("on")
    time.sleep(1.5 * STALL_SECONDS)
    assert max(row.step for row in rehearsal.rows(1)) <= 13, "it was not suspended at all"
    unsuspend(rehearsal, stage)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["done"], rehearsal.logs()
    survival.shown(
        Fault(79, "suspended for half as long again as a hang takes, and resumed"),
        cause="none",
        action="none: one launch",
        identical=60,
    )


def test_a_suspended_job_is_stopped_when_it_goes_on_and_cancelled_at_once(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    stopped = stage.start("name=stopped", planned=waits_for("on", 13))
    suspend(stopped, stage)
    stop(stopped.run, stopped.slurm)
    time.sleep(1)
    assert stopped.status().state is RunState.RUNNING, "nobody has heard it"
    unsuspend(stopped, stage)
    assert stopped.wait_till_over().state is RunState.STOPPED, stopped.logs()
    survival.shown(
        Fault(79, "asked to stop while it is suspended, and resumed"),
        cause="yielded",
        action="stop",
        identical=stopped.assert_same_so_far(reference),
    )
    cancelled = stage.start("name=cancelled", planned=waits_for("on", 13))
    suspend(cancelled, stage)
    cancel(cancelled.run, cancelled.slurm)
    assert cancelled.wait_till_over().state is RunState.CANCELLED, cancelled.logs()
    survival.shown(Fault(79, "cancelled while it is suspended"), cause="cancelled", action="stop")
