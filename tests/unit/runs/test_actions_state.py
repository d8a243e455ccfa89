"""The state of a run from its ledger and from what Slurm says, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.observe.exporter import Exporter, ExporterSlurm
from hpctrain.observe.live_view import LiveRuns
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_jobs import RunJobs
from hpctrain.report.collect import collect_reports
from hpctrain.runs.describe import describe
from hpctrain.runs.goodput import goodput
from hpctrain.runs.state import RunState, judge, last_job_id
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.runs.watch_rules import Symptom
from hpctrain.runs.why import why
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
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
    (BEGUN, dict(done=True, queued=RUNNING), RunState.DONE, ""),
    (BEGUN, dict(done=True, answered=False), RunState.DONE, ""),
    (SUBMITTED, dict(queued=PENDING), RunState.PENDING, "Priority"),
    (SUBMITTED, dict(queued=job(JobState.PENDING)), RunState.PENDING, "waiting"),
    (
        SUBMITTED,
        dict(queued=job(JobState.PENDING, reason="user_env_retrieval_failed_requeued_held")),
        RunState.PENDING,
        "held: the login environment could not be read (user_env_retrieval_failed_requeued_held)",
    ),
    (BEGUN, dict(queued=RUNNING), RunState.RUNNING, ""),
    (BEGUN, dict(queued=COMPLETING), RunState.RUNNING, "completing"),
    (
        (*BEGUN, *ended("preempted", "urgent", "requeue")),
        dict(queued=PENDING),
        RunState.PENDING,
        "requeued: preempted; Priority",
    ),
    ((*BEGUN, *CRASHED), dict(queued=FAILED), RunState.FAILED, "because it was crash"),
    ((*BEGUN, *CRASHED), SILENT, RunState.FAILED, "because it was crash"),
    ((*BEGUN, *CRASHED), dict(queued=COMPLETING), RunState.RUNNING, "completing"),
    ((*BEGUN, *CRASHED, *AGAIN), dict(queued=PENDING), RunState.PENDING, "Priority"),
    ((*BEGUN, *CRASHED, *AGAIN), SILENT, RunState.UNKNOWN, "Slurm does not answer"),
    ((*BEGUN, *CRASHED, REQUEUED), dict(queued=TIMEOUT), RunState.FAILED, "TIMEOUT"),
    ((*BEGUN, *ASKED), {}, RunState.STOPPED, "asked"),
    ((*BEGUN, *ended("cancelled", "scancel", "stop")), {}, RunState.CANCELLED, "scancel"),
    # A client that has called sbatch may have died before it could record the job.
    ((*BEGUN, *ASKED, SUBMITTED[1]), SILENT, RunState.UNKNOWN, "Slurm does not answer"),
    ((*BEGUN, *ASKED, SUBMITTED[1]), ELSEWHERE, RunState.UNKNOWN, "on cluster alpha"),
    ((*BEGUN, *ASKED, SUBMITTED[1]), {}, RunState.STOPPED, "asked"),
    ((*BEGUN, *ASKED, SUBMITTED[1], UNANSWERED), SILENT, RunState.UNKNOWN, "does not answer"),
    ((*BEGUN, *ASKED, SUBMITTED[1], REFUSED), SILENT, RunState.STOPPED, "asked"),
    ((*BY_HAND, *ASKED), SILENT, RunState.STOPPED, "asked"),
    ((*BEGUN, CANCEL, CONFIRMED, SUBMITTED[1]), SILENT, RunState.UNKNOWN, "not answer"),
    ((*BEGUN, CANCEL), SILENT, RunState.UNKNOWN, "nobody knows whether the cancel was done"),
    ((*BEGUN, CANCEL), {}, RunState.CANCELLED, "by its user"),
    ((*BEGUN, CANCEL, CONFIRMED), SILENT, RunState.CANCELLED, "by its user"),
    ((*BEGUN, CANCEL, CANCEL_FAILED), {}, RunState.UNKNOWN, "does not know the job"),
    (BEGUN, ELSEWHERE, RunState.UNKNOWN, "on cluster alpha"),
    (SUBMITTED[:2], SILENT, RunState.UNKNOWN, "Slurm does not answer"),
    ((*SUBMITTED[:2], REFUSED), SILENT, RunState.NOT_SUBMITTED, "Invalid account"),
    ((*SUBMITTED[:2], UNANSWERED), SILENT, RunState.UNKNOWN, "Slurm does not answer"),
    (BY_HAND, dict(queued=RUNNING), RunState.RUNNING, ""),
    ((*BEGUN, *CRASHED, *BY_HAND[1:]), {}, RunState.UNKNOWN, "does not know the job"),
    ((*BEGUN, CANCEL), dict(queued=RUNNING), RunState.RUNNING, ""),
    ((*BEGUN, CANCEL, *AGAIN), dict(queued=FAILED), RunState.FAILED, "exit code 3"),
    (BEGUN, SILENT, RunState.UNKNOWN, "Slurm does not answer"),
    (BEGUN, {}, RunState.UNKNOWN, "does not know the job"),
    (BEGUN, dict(queued=CANCELLED), RunState.CANCELLED, "cancelled in Slurm"),
    (BEGUN, dict(queued=FAILED), RunState.FAILED, "FAILED, exit code 3 without a word"),
    (BEGUN, dict(queued=KILLED), RunState.FAILED, "killed by signal 9"),
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


# -- A run has one state, whichever command shows it: made-up ledgers, read by all of them -------


SBATCH_REFUSED = said(EventKind.SUBMIT_FAILED, reason="Invalid account")
CANCEL_ASKED = said(EventKind.CANCEL_REQUESTED, job_id=1)
SUBMITTED_AGAIN = (said(EventKind.SUBMITTING), said(EventKind.SUBMITTED, job_id=1))


def ledgers() -> Iterator[tuple[Said, ...]]:
    """Every phase; every cause with every action in turn; every kind of event after a phase."""
    yield from (SUBMITTED[:1], SUBMITTED[:2], (*SUBMITTED[:2], SBATCH_REFUSED), SUBMITTED)
    yield from ((*SUBMITTED, STARTED), BEGUN, (said(EventKind.ADOPTED, job_id=1), STARTED))
    yield from ((*BEGUN, CANCEL_ASKED), (*BEGUN, CANCEL_ASKED, said(EventKind.CANCELLED, job_id=1)))
    others = cycle(kind for kind in ActionKind if kind is not ActionKind.STOP)
    for cause in Cause:
        stopped = (*BEGUN, *ended(cause, "boom", "stop"))
        yield stopped
        yield (*BEGUN, *ended(cause, "boom", next(others)))
        yield (*stopped, *SUBMITTED_AGAIN)
    phases = (BEGUN, (*BEGUN, *ended("crash", "boom", "stop")), (*BEGUN, CANCEL_ASKED))
    phases = (*phases, (*BEGUN, *ended("preempted", "urgent", "requeue")))
    for kind in EventKind:
        fields = {"cause": "crash"} if kind is EventKind.LAUNCH_ENDED else {}
        for phase in phases:
            yield (*phase, said(kind, job_id=1, **fields))


@dataclass
class Stage:
    """Runs with made-up ledgers, and what Slurm knows about their jobs."""

    directory: Path
    runs: list[RunFiles]
    slurm: FakeSlurm

    @property
    def client(self) -> SlurmClient:
        return cast(SlurmClient, self.slurm)


@pytest.fixture(scope="module")
def fabricated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunFiles]]:
    directory = tmp_path_factory.mktemp("runs")
    runs = []
    for number, entries in enumerate(ledgers(), 1):
        own = [
            (kind, {**fields, **({"job_id": number} if "job_id" in fields else {})})
            for kind, fields in entries
        ]
        runs.append(fabricate(directory, f"run-{number:03}", own, steps=1))
    runs.append(fabricate(directory, "run-done", BEGUN, done=True))
    return directory, runs


@pytest.fixture(params=["live", "ended or forgotten", "silent"])
def stage(request: pytest.FixtureRequest, fabricated: tuple[Path, list[RunFiles]]) -> Stage:
    directory, runs = fabricated
    slurm = FakeSlurm()
    live = (JobState.PENDING, JobState.RUNNING, JobState.COMPLETING)
    ended_states = (*(state for state in JobState if state.is_ended), None)
    states = cycle(live if request.param == "live" else ended_states)
    for number, run in enumerate(runs, 1):
        if (state := next(states)) is not None:
            job = JobRecord(number, state=state, name=run.run_id, node_list="n[0-1]")
            slurm.records[number] = job
    slurm.away = request.param == "silent"
    slurm.queries = 0  # type: ignore[attr-defined]
    return Stage(directory, runs, slurm)


def test_all_commands_show_one_state(stage: Stage) -> None:
    runs, client = stage.runs, stage.client
    assert len(runs) >= 200
    status = {row.run_id: row.state for row in statuses(runs, client)}
    top = {
        row.status.run_id: row.status.state for row in LiveRuns(stage.directory, client).look().rows
    }
    exporter = Exporter((stage.directory,), cast(ExporterSlurm, stage.slurm), 1e9)
    exported = {
        dict(sample.labels)["run"]: RunState(dict(sample.labels)["hpctrain_run_state"])
        for sample in exporter.samples()
        if sample.family.name == "hpctrain_run_state" and sample.value == 1
    }
    reports = {one.run_id: one.status.state for one in collect_reports(runs, client)}
    explained = {run.run_id: why(run, client).state for run in runs}
    assert top == status and exported == status and reports == status and explained == status


def test_what_is_read_without_slurm_agrees(stage: Stage) -> None:
    """The history and the account of time, which ask no Slurm, and whom `watch` leaves alone."""
    status = {row.run_id: row.state for row in statuses(stage.runs, stage.client)}
    found = watch(stage.directory, stage.client)
    problems = {one.run_id: one.symptom for one in found.seen}
    still_open = 0
    for run in stage.runs:
        told, shown = describe(run).state, status[run.run_id]
        live = shown in (RunState.PENDING, RunState.RUNNING)
        assert told in (None, shown) or live, f"{run.run_id}: {told}, {shown}"
        if told is None:
            assert not goodput(run).over or _is_held(run), run.run_id
        else:
            assert goodput(run).over, run.run_id
        still_open += told is None
        symptom = problems.get(run.run_id)
        if told is not None and not live and symptom is not Symptom.UNRECORDED:
            failed = told is RunState.FAILED
            assert symptom in ((None, Symptom.FAILED) if failed else (None,)), run.run_id
        if symptom is Symptom.CANCELLED:
            assert shown is RunState.CANCELLED
    assert found.open_runs == still_open


def _is_held(run: RunFiles) -> bool:
    actions = [event.action for event in run.ledger.events() if event.event is EventKind.ACTION]
    return actions[-1:] == ["hold"]
