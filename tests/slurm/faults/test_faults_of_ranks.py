"""Ranks, srun and slurmstepd die or hang: relaunched in place from the newest checkpoint."""

from __future__ import annotations

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage, held
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.sandbox import faults


@pytest.mark.stand_in
def test_ranks_that_die_are_named_and_relaunched_in_place(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """With a budget of no failure at all, because each launch has brought a new checkpoint."""
    planned = (
        PlannedFault(epoch=1, rank=0, do="take_port"),
        PlannedFault(epoch=2, rank=1, step=13, do="leave", code=3),
        PlannedFault(epoch=3, rank=0, step=23, do="leave", code=85),
        *held(4, 34),
        *held(5, 44, do="await_warning"),  # or the step would last until Slurm kills it
    )
    rehearsal = stage.start(
        "name=ranks",
        "checkpoint.asynchronous=false",  # published, hence progress, before the next step begins
        "supervise.failures_without_progress=1",
        "supervise.storm_failures=9",  # five within minutes would be one
        planned=planned,
    )
    fault = Fault(32, "somebody listens on MASTER_PORT when rank 0 wants to")
    survival.recovered(rehearsal, fault, cause="port", action="relaunch", epoch=1)
    fault = Fault(20, "rank 1 leaves with code 3 while rank 0 waits for it")
    left = survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=2)
    assert left.end.rank == 1 and "3" in (left.end.reason or ""), left.end
    fault = Fault(40, "rank 0 leaves with code 85, which is in the site's RequeueExit")
    left = survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=3)
    assert left.end.rank == 0, left.end
    epoch = rehearsal.wait_for_progress()
    rehearsal.kill_rank(1)
    fault = Fault(20, "rank 1 is killed by SIGKILL")
    killed = survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=epoch)
    assert killed.end.rank == 1 and "Killed" in (killed.end.reason or ""), killed.end
    epoch = rehearsal.wait_for_progress()
    rehearsal.kill_srun()
    fault = Fault(25, "srun is killed: the fourth crash in a row, each after new progress")
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=epoch)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1, "no queue for a crash"


@pytest.mark.stand_in
def test_hangs_are_told_from_slow_saves_and_the_odd_rank_is_named(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """A machine that stands still for 20 s is not taken for a hang, hence the long limit."""
    planned = (
        PlannedFault(epoch=1, rank=0, step=5, do="publish_slowly", seconds=45),
        PlannedFault(epoch=1, rank=1, step=15, do="sleep"),
    )
    rehearsal = start_with_short_stall(stage, "hang", planned)
    fault = Fault(21, "rank 1 sleeps while rank 0 waits for it in a collective")
    hung = survival.recovered(rehearsal, fault, cause="hang", action="relaunch", epoch=1)
    assert [row.step for row in rehearsal.rows(1)] == [*range(1, 15)], rehearsal.logs()
    survival.shown(
        Fault(22, "all ranks are silent for 45 s while a checkpoint is published"),
        cause="none",
        action="none: longer than a step may take, shorter than a save may",
    )
    saved = rehearsal.events(EventKind.STACKS_SAVED)
    assert len(saved) == 1 and saved[-1].rank == 1, rehearsal.logs()
    assert hung.end.node == rehearsal.nodes()[1], hung.end
    rehearsal.assert_done_exactly(reference)


@pytest.mark.variant("test_hangs_are_told_from_slow_saves_and_the_odd_rank_is_named")
def test_a_stopped_rank_hangs(stage: Stage, reference: RunFiles, survival: Survival) -> None:
    """It cannot write its stack."""
    rehearsal = start_with_short_stall(stage, "stopped", held(1, 14, do="stop"))
    fault = Fault(21, "rank 1 is stopped by SIGSTOP in the middle of a step")
    survival.recovered(rehearsal, fault, cause="hang", action="relaunch", epoch=1)
    assert [row.step for row in rehearsal.rows(1)] == [*range(1, 14)], rehearsal.logs()
    rehearsal.assert_done_exactly(reference)


def start_with_short_stall(stage: Stage, name: str, planned: tuple[PlannedFault, ...]) -> Rehearsal:
    words = (f"name={name}", "supervise.stall=30s", "checkpoint.asynchronous=false")
    return stage.start(*words, planned=planned)


@pytest.mark.variant("test_ranks_that_die_are_named_and_relaunched_in_place")
def test_a_dead_slurmstepd_is_noticed(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """Slurm notices nothing: srun would wait for ever for the tasks of that node."""
    rehearsal = stage.start("name=stepd", planned=held(1, 14))
    epoch = rehearsal.wait_for_progress()
    gone = rehearsal.nodes()[1]
    faults.kill_stepd(stage.sandbox, gone)
    fault = Fault(20, "the slurmstepd of the second node is killed; its rank lives on")
    found = survival.recovered(
        rehearsal, fault, cause="crash", action=("requeue", "relaunch"), epoch=epoch
    )
    assert found.end.node == gone and "slurmstepd" in (found.end.reason or ""), found.end
    rehearsal.assert_done_exactly(reference)
