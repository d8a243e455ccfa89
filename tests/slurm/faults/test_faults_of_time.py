"""Slurm's time limit: a warning in time, and a limit that is too short for anything."""

from __future__ import annotations

import time

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind

pytestmark = pytest.mark.stand_in


def test_the_time_limit_is_met_in_time_and_one_that_is_too_short_is_named(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    planned = (
        PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),
        PlannedFault(epoch=2, rank=1, step=24, do="await_warning"),
        PlannedFault(epoch=3, rank=-1, do="await_warning"),  # before it has begun to train
    )
    rehearsal = stage.start(
        "name=limit",
        "supervise.failures_without_progress=1",
        planned=planned,
    )
    rehearsal.wait_for_step(12)
    # Slurm looks every 30 s and warns 120 s before the end: here 120 to 180 s from now.
    job = rehearsal.slurm.show_job(rehearsal.job_id)
    assert job is not None and job.start_time is not None
    limit(rehearsal, int(time.time() - job.start_time) // 60 + 3)
    rehearsal.wait(lambda: bool(rehearsal.events(EventKind.SIGNAL)), "warned")
    limit(rehearsal, 30)  # a slow start of the next launch is not to be warned by Slurm
    fault = Fault(8, "Slurm warns with USR1 before the time limit")
    warned = survival.recovered(rehearsal, fault, cause="time_limit", action="requeue", epoch=1)
    assert (warned.resumed_step, warned.lost_steps) == (13, 0), rehearsal.logs()
    assert [event.signal for event in rehearsal.events(EventKind.SIGNAL)] == ["USR1"]
    warn(rehearsal, epoch=2)  # after steps of its own, so that is progress
    warn(rehearsal, epoch=3)
    fault = Fault(10, "a time limit that comes before the first step, in a run without budget")
    survival.ended(
        rehearsal, fault, cause="time_limit", action="stop", why="raise `resources.walltime`"
    )
    rehearsal.assert_same_so_far(reference)


def limit(rehearsal: Rehearsal, minutes: int) -> None:
    words = (f"JobId={rehearsal.job_id}", f"TimeLimit={minutes}")
    rehearsal.sandbox.command("scontrol", "update", *words)


def warn(rehearsal: Rehearsal, epoch: int) -> None:
    """What `--signal=B:USR1@N` does, once the launch has begun."""
    rehearsal.wait(lambda: rehearsal.epoch >= epoch, f"in launch {epoch}")
    rehearsal.sandbox.command("scancel", "--batch", "--signal=USR1", str(rehearsal.job_id))
