"""The oracle of a storm can say no: each claim that it judges, true and false."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle import EVALUATE_EVERY_STEPS, Truth, falsehoods
from targets import Deed, DeedKind, QueuedJob, Row

RUNNING = QueuedJob(7, "RUNNING", "None", "hpctrain:run")
WAITING = QueuedJob(7, "PENDING", "Resources", "hpctrain:run")
ENDING = QueuedJob(7, "COMPLETING", "None", "hpctrain:run")
GONE = QueuedJob(7, "COMPLETED", "None", "hpctrain:run")
BEFORE = Truth(
    time=100.0,
    ended=100.1,
    jobs=(RUNNING,),
    present=True,
    done=False,
    row=Row(epoch=2, step=33, time=99.9),
    resume_step=20,
    progress_time=99.0,
    checkpoint=30,
)
AFTER = replace(
    BEFORE,
    time=100.2,
    ended=100.3,
    row=Row(epoch=2, step=35, time=100.1),
    progress_time=100.0,
)
SAID: dict[str, Any] = {
    "run_id": "run",
    "state": "RUNNING",
    "reason": "",
    "job_id": 7,
    "step": 33,
    "checkpoint_step": 30,
    "updated_seconds_ago": 1.1,
}


def claims(
    said: dict[str, Any],
    jobs: tuple[QueuedJob, ...] | None = (RUNNING,),
    later: tuple[QueuedJob, ...] | None = None,
    deeds: tuple[DeedKind, ...] = (),
    *,
    here: bool = True,
    **changed: Any,
) -> list[str]:
    before = replace(BEFORE, jobs=jobs, **changed)
    after = replace(AFTER, jobs=jobs if later is None else later, **changed)
    done = [Deed(kind, 50.0) for kind in deeds]
    return [one.claim for one in falsehoods({**SAID, **said}, before, after, done, here=here)]


def test_the_truth_is_no_falsehood() -> None:
    assert claims({}) == []


@pytest.mark.parametrize(
    ("said", "now", "claim"),
    [
        ({"state": "FAILED"}, {}, "FAILED while job 7 runs or waits"),
        ({"state": "FAILED"}, {"jobs": (WAITING,)}, "FAILED while job 7 runs or waits"),
        ({"state": "STOPPED"}, {"jobs": (GONE,)}, "STOPPED, and nobody has asked"),
        ({"state": "CANCELLED"}, {"jobs": (GONE,)}, "CANCELLED, and nobody has cancelled"),
        ({"state": "NOT SUBMITTED"}, {"jobs": (GONE,)}, "Slurm has a job of it"),
        ({"state": "DONE"}, {"jobs": (GONE,)}, "DONE without a done marker"),
        ({}, {"jobs": (GONE,)}, "RUNNING without a job that holds nodes"),
        ({}, {"jobs": ()}, "RUNNING without a job that holds nodes"),
        ({"state": "PENDING"}, {}, "PENDING without a job that waits"),
        ({"state": "UNKNOWN"}, {}, "UNKNOWN although Slurm knows its job"),
        ({"job_id": 8}, {}, "job 8, which is not of this run"),
        ({"step": 36}, {}, "step 36, beyond what was trained"),
        ({"step": 0}, {}, "before the checkpoint that it goes on from"),
        ({"checkpoint_step": 40}, {}, "checkpoint of step 40, which is not published"),
        ({"updated_seconds_ago": 9.0}, {}, "age of its last sign of life"),
    ],
)
def test_a_falsehood_is_found(said: dict[str, Any], now: dict[str, Any], claim: str) -> None:
    found = claims(said, **now)
    assert len(found) == 1 and claim in found[0], found


@pytest.mark.parametrize(
    ("said", "now"),
    [
        ({"state": "PENDING"}, {"jobs": (RUNNING,), "later": (WAITING,)}),
        ({"state": "PENDING"}, {"jobs": (ENDING,), "later": (RUNNING,)}),
        ({}, {"jobs": (WAITING,), "later": (RUNNING,)}),
        ({}, {"jobs": (ENDING,), "later": (GONE,)}),
        ({}, {"jobs": (WAITING,), "later": (GONE,)}),
        ({"state": "PENDING"}, {"jobs": (), "later": (RUNNING,)}),
        ({"state": "FAILED"}, {"jobs": (RUNNING,), "later": (GONE,)}),
        ({"state": "DONE"}, {"done": True}),
        ({"state": "CANCELLED"}, {"jobs": (GONE,), "deeds": (DeedKind.CANCELLED,)}),
        ({"state": "STOPPED"}, {"jobs": (GONE,), "deeds": (DeedKind.STOPPED,)}),
        ({"state": "UNKNOWN"}, {"here": False}),
        ({"state": "FAILED", "job_id": 9}, {"present": False}),
        ({"step": None, "checkpoint_step": None, "updated_seconds_ago": None}, {"row": None}),
    ],
)
def test_what_was_so_before_or_after_may_be_said(said: dict[str, Any], now: dict[str, Any]) -> None:
    assert claims(said, **now) == []


def test_a_step_that_is_being_evaluated_has_been_trained() -> None:
    row = Row(epoch=2, step=EVALUATE_EVERY_STEPS - 1, time=99.9)
    before, after = replace(BEFORE, row=row), replace(AFTER, row=row)
    for step, wrong in ((row.step, 0), (row.step + 1, 0), (row.step + 2, 1)):
        assert len(falsehoods({**SAID, "step": step}, before, after, [])) == wrong, step


def test_nothing_is_compared_while_the_directory_is_away() -> None:
    said = {**SAID, "state": "FAILED"}
    away = Deed(DeedKind.DIRECTORY_AWAY, 99.0, 100.1)
    assert falsehoods(said, BEFORE, AFTER, [away]) == []
    assert falsehoods(said, BEFORE, AFTER, [replace(away, until=99.5)]) != []


def test_silence_of_slurm_excuses_the_state_and_not_the_marker() -> None:
    silent = replace(BEFORE, jobs=None)
    for state, wrong in (("UNKNOWN", 0), ("RUNNING", 0), ("DONE", 1), ("CANCELLED", 1)):
        said = {**SAID, "state": state}
        assert len(falsehoods(said, silent, AFTER, [])) == wrong, state


def test_a_long_silence_is_compared_only_with_what_stays() -> None:
    late = replace(AFTER, time=130.0, ended=130.1, jobs=(WAITING,))
    held_up = replace(BEFORE, time=80.0)  # between its squeue and its files
    said = {**SAID, "job_id": 9, "step": 0}
    assert falsehoods(said, BEFORE, late, []) == falsehoods(said, held_up, AFTER, []) == []
    assert len(falsehoods({**SAID, "state": "CANCELLED"}, BEFORE, late, [])) == 1
