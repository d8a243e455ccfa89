"""A job that was over and is started again: who has asked for that?"""

from __future__ import annotations

import time

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, Stage

from hpctrain.records.ledger import Event, EventKind, Ledger
from hpctrain.slurm.states import JobState
from hpctrain.supervise.loop import standing_stop


def event(kind: str, restart_count: int = 0, job_id: int = 5, **fields: object) -> Event:
    return Event.model_validate(
        {"event": kind, "time": 0.0, "job_id": job_id, "restart_count": restart_count, **fields}
    )


SUBMITTED = event("submitted")
STOPPED = (event("attempt_started"), event("action", action="stop", reason="asked"))


@pytest.mark.parametrize(
    ("events", "stands"),
    [
        ((SUBMITTED, *STOPPED), True),
        (STOPPED, True),
        ((SUBMITTED, *STOPPED, event("attempt_started", 1)), True),
        ((SUBMITTED, *STOPPED, event("action_result", action="stop")), True),
        ((SUBMITTED, *STOPPED, event("control", action="resume")), False),
        ((SUBMITTED, *STOPPED, event("submitted", job_id=6)), False),
        ((SUBMITTED, event("attempt_started"), event("action", action="requeue")), False),
        ((SUBMITTED, event("attempt_started"), event("action", action="relaunch")), False),
        ((SUBMITTED, event("action", action="stop", job_id=4)), False),
        ((SUBMITTED, *STOPPED, event("attempt_started", 1), event("attempt_lost", 1),
          event("attempt_started", 2)), False),
        ((), False),
    ],
)  # fmt: skip
def test_which_stop_still_stands(events: tuple[Event, ...], stands: bool) -> None:
    found = standing_stop(events, 5, 1)
    assert (found is not None) is stands


def preempt_once_training(stage: Stage) -> None:
    """The ranks wait for it with `await:go`."""

    def preempt() -> None:
        stage.slurm.change(preempt_time=1.0)
        (stage.layout.directory / "go").touch()

    stage.once_training(preempt)


@pytest.mark.parametrize("later_seconds", [3.0, None])
def test_a_stop_within_a_grace_period_is_not_undone_by_slurm(
    stage: Stage, later_seconds: float | None
) -> None:
    """Slurm 24.05 and newer: the job leaves, and is back some seconds later (or nobody says
    when)."""
    preempt_once_training(stage)
    assert stage.play("progress:3 await:go config") == 1
    assert stage.actions == ["stop"]
    submit_time = None if later_seconds is None else time.time() + later_seconds
    back = {"restart_count": 1, "submit_time": submit_time, "preempt_time": None}
    stage.slurm.change(state=JobState.RUNNING, **back)
    assert stage.supervisor("", "done", restart_count=1).run() == 1
    assert stage.actions == ["stop", "stop"]
    assert "nobody has resumed it" in str(stage.events(EventKind.ACTION)[-1].reason)
    assert len(stage.events(EventKind.LAUNCH_STARTED)) == 1, "nothing is trained"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_person_may_have_it_go_on(stage: Stage, resumed: bool) -> None:
    assert stage.play("progress:3 config") == 1
    later_seconds = 3.0 if resumed else 3600.0
    stage.slurm.change(restart_count=1, submit_time=time.time() + later_seconds)
    if resumed:
        Ledger(stage.layout.ledger).append(EventKind.CONTROL, action="resume", user="ada")
    assert stage.supervisor("", "progress:3 done", restart_count=1).run() == 0
    assert stage.actions == ["stop", "finish"]


@pytest.mark.parametrize(
    ("part", "requeues"),
    [("progress:3 config", False), ("progress:3 done", False), ("progress:3 await-stop", True)],
    ids=["stopped", "done", "held"],
)
def test_a_run_that_is_over_is_not_to_be_requeued(stage: Stage, part: str, requeues: bool) -> None:
    if requeues:
        stage.once_training(lambda: stage.layout.hold_request.write_text("ada\n"))
    stage.play(part)
    assert stage.slurm.records[JOB_ID].requeue is requeues


def test_a_run_that_goes_on_may_be_requeued(stage: Stage) -> None:
    preempt_once_training(stage)
    assert stage.play("progress:3 await:go crash") == 0
    assert stage.slurm.records[JOB_ID].requeue is True
    stage.configure(config("none"))
    stage.slurm.change(preempt_time=None, state=JobState.RUNNING)
    assert stage.supervisor("", "config", restart_count=1).run() == 1
    assert stage.slurm.records[JOB_ID].requeue is True, "nobody requeues it there"


def test_a_controller_that_does_not_hear_it_is_told_of(stage: Stage) -> None:
    def away() -> None:
        stage.slurm.away = True
        (stage.layout.directory / "go").touch()

    stage.once_training(away)
    assert stage.play("progress:3 await:go config") == 1
    assert stage.actions == ["stop"]
    told = [str(event.reason) for event in stage.events(EventKind.ACTION_RESULT)]
    assert any("Slurm may start the job again" in words for words in told)


def test_the_last_line_of_the_log_says_that_the_run_is_over(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.play("progress:3 config")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "run r1 is over: no such data set: a retry cannot help" in last
