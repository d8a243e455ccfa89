"""The state of a run from its ledger and from what Slurm says, row by row."""

from __future__ import annotations

import pytest
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, Said, ended, said

from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_jobs import RunJobs
from hpctrain.runs.state import RunState, judge, last_job_id
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

BEGUN = (*SUBMITTED, STARTED, LAUNCHED)
CANCEL = said(EventKind.CANCEL_REQUESTED, job_id=1, user="somebody")
AGAIN = (said(EventKind.SUBMITTING), said(EventKind.SUBMITTED, job_id=2))
REQUEUED = said(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=1)
CONFIRMED = said(EventKind.CANCELLED, job_id=1, user="somebody")
CANCEL_FAILED = said(EventKind.CANCEL_FAILED, reason="no answer")
BY_HAND = (SUBMITTED[0], said(EventKind.ADOPTED, job_id=9), STARTED)
UNANSWERED = said(EventKind.SUBMIT_FAILED, reason="no answer within 20 s", answered=False)
REFUSED = said(EventKind.SUBMIT_FAILED, reason="Invalid account")


def job(state: JobState, **more: object) -> JobRecord:
    return JobRecord(1, state=state, **more)  # type: ignore[arg-type]


PENDING = job(JobState.PENDING, reason="Priority")
RUNNING = job(JobState.RUNNING)
COMPLETING = job(JobState.COMPLETING)
FAILED = job(JobState.FAILED, exit_code=3)
KILLED = job(JobState.FAILED, exit_code=0, exit_signal=9)
CANCELLED = job(JobState.CANCELLED)
TIMEOUT = job(JobState.TIMEOUT)
CRASHED = ended("crash", "rank 1: boom", "stop")
ASKED = ended("yielded", "asked", "stop")
SILENT = dict(answered=False)
ELSEWHERE = dict(answered=False, elsewhere="alpha")


# what the ledger says, what else is known, state, words of the reason
ROWS: list[tuple[tuple[Said, ...], dict[str, object], RunState, str]] = [
    (SUBMITTED, dict(queued=PENDING), RunState.PENDING, "Priority"),
    (SUBMITTED, dict(queued=job(JobState.PENDING)), RunState.PENDING, "waiting"),
    (
        SUBMITTED,
        dict(queued=job(JobState.PENDING, reason="user_env_retrieval_failed_requeued_held")),
        RunState.PENDING,
        "held: the login environment could not be read (user_env_retrieval_failed_requeued_held)",
    ),
    (BEGUN, dict(queued=COMPLETING), RunState.RUNNING, "completing"),
    (
        (*BEGUN, *ended("preempted", "urgent", "requeue")),
        dict(queued=PENDING),
        RunState.PENDING,
        "requeued: preempted; Priority",
    ),
    ((*BEGUN, *CRASHED), dict(queued=FAILED), RunState.FAILED, "because it was crash"),
    ((*BEGUN, *CRASHED, REQUEUED), dict(queued=TIMEOUT), RunState.FAILED, "TIMEOUT"),
    ((*BEGUN, *ASKED), {}, RunState.STOPPED, "asked"),
    ((*BEGUN, *ended("cancelled", "scancel", "stop")), {}, RunState.CANCELLED, "scancel"),
    ((*BEGUN, *ASKED, SUBMITTED[1]), ELSEWHERE, RunState.UNKNOWN, "on cluster alpha"),
    ((*BY_HAND, *ASKED), SILENT, RunState.STOPPED, "asked"),
    ((*BEGUN, CANCEL), SILENT, RunState.UNKNOWN, "nobody knows whether the cancel was done"),
    ((*BEGUN, CANCEL), {}, RunState.CANCELLED, "by its user"),
    ((*BEGUN, CANCEL, CANCEL_FAILED), {}, RunState.UNKNOWN, "does not know the job"),
    (BEGUN, ELSEWHERE, RunState.UNKNOWN, "on cluster alpha"),
    (BY_HAND, dict(queued=RUNNING), RunState.RUNNING, ""),
    ((*BEGUN, *CRASHED, *BY_HAND[1:]), {}, RunState.UNKNOWN, "does not know the job"),
    (BEGUN, SILENT, RunState.UNKNOWN, "Slurm does not answer"),
    (BEGUN, {}, RunState.UNKNOWN, "does not know the job"),
    (BEGUN, dict(queued=CANCELLED), RunState.CANCELLED, "cancelled in Slurm"),
    (BEGUN, dict(queued=FAILED), RunState.FAILED, "FAILED, exit code 3 without a word"),
    (BEGUN, dict(queued=KILLED), RunState.FAILED, "killed by signal 9"),
    (SUBMITTED[:2], {}, RunState.NOT_SUBMITTED, "sbatch did not finish"),
    ((*SUBMITTED[:2], REFUSED), {}, RunState.NOT_SUBMITTED, "Invalid account"),
    ((), {}, RunState.PREPARED, "`hpctrain resume` submits it"),
]


def events(entries: tuple[Said, ...]) -> list[Event]:
    return [
        Event.model_validate({"event": kind, "time": NOW + number, **fields})
        for number, (kind, fields) in enumerate(entries)
    ]


@pytest.mark.parametrize(("entries", "known", "state", "words"), ROWS)
def test_judge(
    entries: tuple[Said, ...], known: dict[str, object], state: RunState, words: str
) -> None:
    queued = [known["queued"]] if "queued" in known else []
    jobs = {key: known[key] for key in ("answered", "elsewhere") if key in known}
    found = RunJobs(tuple(queued), **jobs)  # type: ignore[arg-type]
    judged = judge(events(entries), found, done=bool(known.get("done")))
    assert judged.state is state
    assert words in judged.reason and bool(words) == bool(judged.reason)


def test_states_that_are_over() -> None:
    assert {state for state in RunState if not state.over} == {
        RunState.PENDING,
        RunState.RUNNING,
        RunState.UNKNOWN,
    }


def test_the_newest_job_counts() -> None:
    assert last_job_id(events((*BEGUN, *AGAIN))) == 2
    assert last_job_id(events(SUBMITTED[:2])) is None
