"""Which attempt this is, which one was lost, and what counts as a failure."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.judge.causes import Cause
from hpctrain.records.ledger import Event
from hpctrain.supervise.context import (
    JobAttempt,
    attempt_from,
    unfinished_attempt,
    why_lost,
)

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
