"""Which attempt this is, which one was lost, and what counts as a failure."""

from __future__ import annotations

import shutil
import time

import pytest
from launch_evidence import config
from supervise_stage import JOB_ID, Stage

from hpctrain.base.errors import UsageError
from hpctrain.judge.causes import Cause
from hpctrain.records.jobs import awaited_run
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind, Ledger
from hpctrain.slurm.states import JobState
from hpctrain.supervise.context import (
    JobAttempt,
    attempt_from,
    unfinished_attempt,
    why_lost,
)
from hpctrain.supervise.loop import standing_stop

VARIABLES = {
    "SLURM_JOB_ID": "5",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURMD_NODENAME": "n0",
}


def attempt(restart_count: int = 0, job_id: int = 5) -> JobAttempt:
    return JobAttempt(job_id, restart_count, "n[0-1]", "n0")


def event(kind: str, restart_count: int = 0, job_id: int = 5, **fields: object) -> Event:
    return Event.model_validate(
        {"event": kind, "time": 0.0, "job_id": job_id, "restart_count": restart_count, **fields}
    )


STARTED = event("attempt_started")


def test_attempt_from_slurm() -> None:
    assert attempt_from(VARIABLES) == attempt(2)
    assert str(attempt_from(VARIABLES)) == "5.2"


@pytest.mark.parametrize("value", [None, ""])
def test_the_first_attempt_has_no_restart_count(value: str | None) -> None:
    variables = {k: v for k, v in VARIABLES.items() if k != "SLURM_RESTART_COUNT"}
    if value is not None:
        variables["SLURM_RESTART_COUNT"] = value
    assert attempt_from(variables).restart_count == 0


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_outside_of_a_job_the_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        attempt_from({k: v for k, v in VARIABLES.items() if k != name})


def test_a_job_id_that_is_no_number() -> None:
    with pytest.raises(UsageError, match="inside a Slurm job"):
        attempt_from({**VARIABLES, "SLURM_JOB_ID": "5_[1-3]"})


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        ([], False),
        ([STARTED], True),
        ([STARTED, event("launch_started"), event("signal", signal="USR1")], True),
        ([STARTED, event("action", action="relaunch")], True),
        ([STARTED, event("action", action="requeue")], False),
        ([STARTED, event("action", action="stop")], False),
        ([STARTED, event("action", action="leave")], False),
        ([STARTED, event("attempt_lost")], False),
    ],
)
def test_an_attempt_that_never_said_how_it_ended(events: list[Event], lost: bool) -> None:
    assert unfinished_attempt(events, attempt(1)) == (STARTED if lost else None)


def test_late_words_of_an_old_supervisor_do_not_close_the_attempt_after_it() -> None:
    second = event("attempt_started", 1)
    late = event("action", 0, action="leave")
    assert unfinished_attempt([STARTED, second, late], attempt(2)) == second


def test_the_present_attempt_is_not_lost() -> None:
    assert unfinished_attempt([STARTED], attempt(0)) is None


def test_the_same_restart_count_of_another_job_is_another_attempt() -> None:
    assert unfinished_attempt([STARTED], attempt(0, job_id=6)) == STARTED


@pytest.mark.parametrize(
    ("current", "events", "cause"),
    [
        (attempt(1), [STARTED], Cause.NODE_FAILURE),
        (attempt(0, job_id=6), [STARTED], Cause.SUPERVISOR_LOST),
        (attempt(1), [STARTED, event("signal", signal="TERM")], Cause.EXTERNAL_SIGNAL),
        (attempt(1), [event("signal", signal="TERM"), STARTED], Cause.NODE_FAILURE),
        (attempt(2), [STARTED, event("signal", 1, signal="TERM")], Cause.NODE_FAILURE),
    ],
)
def test_why_an_attempt_was_lost(current: JobAttempt, events: list[Event], cause: Cause) -> None:
    found, reason = why_lost(STARTED, events, current)
    assert found is cause
    assert ("TERM" in reason) == (cause is Cause.EXTERNAL_SIGNAL)


def test_a_node_that_was_shut_down_says_more_than_its_term() -> None:
    events = [STARTED, event("signal", signal="TERM")]
    found, reason = why_lost(STARTED, events, attempt(1), gone=("n0",))
    assert found is Cause.NODE_FAILURE and "n0" in reason
    found, _ = why_lost(STARTED, events, attempt(0, job_id=6), gone=("n0",))
    assert found is Cause.EXTERNAL_SIGNAL, "a new job says nothing of why the old one ended"


# -- A job that was over and is started again: who has asked for that? --------------------------


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


# -- A run that waits for another one, and whose job Slurm starts before that is done -----------


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
