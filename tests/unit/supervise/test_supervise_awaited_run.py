"""A run that waits for another one, and whose job Slurm starts before that is done."""

from __future__ import annotations

import shutil

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, Stage

from hpctrain.records.jobs import awaited_run
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger


@pytest.fixture
def awaited(stage: Stage) -> RunLayout:
    """Another run, which is not done; the one on the stage waits for it."""
    layout = RunLayout(stage.layout.directory.with_name("first-1a2b"))
    layout.create()
    ledger = Ledger(stage.layout.ledger)
    ledger.append(EventKind.SUBMITTING, after_run=layout.run_id)
    ledger.append(EventKind.SUBMITTED, job_id=JOB_ID, after_run=layout.run_id)
    return layout


def test_it_is_held_in_the_queue_and_launches_nothing(stage: Stage, awaited: RunLayout) -> None:
    assert stage.play("done") == 0
    assert stage.actions == ["hold"] and not stage.events(EventKind.LAUNCH_STARTED)
    assert stage.slurm.records[JOB_ID].reason == "JobHeldUser"
    (action,) = stage.events(EventKind.ACTION)
    assert action.reason == (
        "run `first-1a2b`, for which this one waits, is not done: `hpctrain resume first-1a2b` "
        "goes on with it, and this one begins when that is done; `hpctrain resume r1` begins this "
        "one without it"
    )
    (observed,) = stage.events(EventKind.OBSERVED)
    assert observed.after_run == awaited.run_id


def test_it_trains_when_the_other_is_done(stage: Stage, awaited: RunLayout) -> None:
    awaited.done.write_text("{}")
    assert stage.play("done") == 0
    assert stage.actions == ["finish"] and not stage.events(EventKind.OBSERVED)


def test_who_releases_the_job_in_slurm_does_not_begin_it_and_who_resumes_it_does(
    stage: Stage, awaited: RunLayout
) -> None:
    ledger = Ledger(stage.layout.ledger)
    ledger.append(EventKind.CONTROL, action="resume")  # of a hold while it has waited
    assert stage.play("done") == 0
    assert stage.supervisor("done", restart_count=1).run() == 0
    assert stage.actions == ["hold", "hold"]
    ledger.append(EventKind.CONTROL, action="resume")
    assert stage.supervisor("done", restart_count=2).run() == 0
    assert stage.actions == ["hold", "hold", "finish"]


def test_a_launched_run_waits_for_nothing_any_more(stage: Stage, awaited: RunLayout) -> None:
    ledger = Ledger(stage.layout.ledger)
    assert awaited_run(ledger.events()) == awaited.run_id
    ledger.append(EventKind.LAUNCH_STARTED, job_id=JOB_ID, epoch=1)
    assert awaited_run(ledger.events()) is None
    ledger.append(EventKind.SUBMITTING)
    ledger.append(EventKind.SUBMITTED, job_id=6)
    assert awaited_run(ledger.events()) is None


def test_a_run_that_was_removed_keeps_nobody_waiting(stage: Stage, awaited: RunLayout) -> None:
    shutil.rmtree(awaited.directory)
    assert stage.play("done") == 0
    assert stage.actions == ["finish"]
    (observed,) = stage.events(EventKind.OBSERVED)
    assert "`first-1a2b`, for which this one has waited, was removed" in str(observed.reason)


def test_where_jobs_are_not_requeued_it_stops(stage: Stage, awaited: RunLayout) -> None:
    stage.configure(config(continuation="none"))
    assert stage.play("done") == 1
    assert stage.actions == ["stop"] and not stage.events(EventKind.LAUNCH_STARTED)
