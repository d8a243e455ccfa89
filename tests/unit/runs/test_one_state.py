"""A run has one state, whichever command shows it: made-up ledgers, read by all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.observe.exporter import Exporter, ExporterSlurm
from hpctrain.observe.live_view import LiveRuns
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.report.collect import collect_reports
from hpctrain.runs.describe import describe
from hpctrain.runs.goodput import goodput
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.runs.watch_rules import Symptom
from hpctrain.runs.why import why
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

BEGUN = (*SUBMITTED, STARTED, LAUNCHED)
REFUSED = said(EventKind.SUBMIT_FAILED, reason="Invalid account")
CANCEL = said(EventKind.CANCEL_REQUESTED, job_id=1)
AGAIN = (said(EventKind.SUBMITTING), said(EventKind.SUBMITTED, job_id=1))


def ledgers() -> Iterator[tuple[Said, ...]]:
    """Every phase; every cause with every action in turn; every kind of event after a phase."""
    yield from (SUBMITTED[:1], SUBMITTED[:2], (*SUBMITTED[:2], REFUSED), SUBMITTED)
    yield from ((*SUBMITTED, STARTED), BEGUN, (said(EventKind.ADOPTED, job_id=1), STARTED))
    yield from ((*BEGUN, CANCEL), (*BEGUN, CANCEL, said(EventKind.CANCELLED, job_id=1)))
    others = cycle(kind for kind in ActionKind if kind is not ActionKind.STOP)
    for cause in Cause:
        stopped = (*BEGUN, *ended(cause, "boom", "stop"))
        yield stopped
        yield (*BEGUN, *ended(cause, "boom", next(others)))
        yield (*stopped, *AGAIN)
    phases = (BEGUN, (*BEGUN, *ended("crash", "boom", "stop")), (*BEGUN, CANCEL))
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
