"""Runs that have several jobs: chains, singletons, arrays; submitting, showing, cancelling them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.base.errors import SlurmRefusedError, UsageError
from hpctrain.job.job_submission import resubmit
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.submit import check, submit
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import generation, started_ids, submitted_ids, successor_ids
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel
from hpctrain.runs.describe import describe
from hpctrain.runs.logs import attempt_directories, job_logs
from hpctrain.runs.state import RunState, counted
from hpctrain.runs.status import RunStatus, statuses
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord, SubmittedJob
from hpctrain.slurm.states import JobState

ROOT = Path(__file__).resolve().parents[3]


def site(mode: str, directory: Path) -> str:
    text = (ROOT / "cluster_profiles/sandbox.yaml").read_text()
    path = directory / f"{mode}.yaml"
    path.write_text(f"{text}continuation: {mode}\ncontinuation_jobs: 3\n")
    return str(path)


def prepared(mode: str, directory: Path) -> Prepared:
    overrides = ["data.sources=[]", "data.tokenizer=null"]
    spec = ROOT / "examples/gpt-tiny.yaml"
    return prepare(spec, site(mode, directory), overrides, runs=directory / "runs")


def client(slurm: FakeSlurm) -> SlurmClient:
    return cast(SlurmClient, slurm)


def job(job_id: int, state: JobState, **more: object) -> JobRecord:
    return JobRecord(job_id, state=state, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("requeue", [(1, None)]),
        ("chain", [(1, None)]),
        ("array", [(1, None)]),
        ("none", [(1, None)]),
        ("singleton", [(1, None), (2, 1), (3, 1)]),
    ],
)
def test_what_is_submitted(
    mode: str, expected: list[tuple[int, int | None]], tmp_path: Path
) -> None:
    slurm = FakeSlurm()
    submitted = submit(prepared(mode, tmp_path), tmp_path / "runs", client(slurm))
    run = RunFiles(RunLayout(submitted.directory))
    events = [event for event in run.ledger.events() if event.event is EventKind.SUBMITTED]
    assert [(event.job_id, event.successor_of) for event in events] == expected
    assert submitted_ids(generation(run.ledger.events())) == [job_id for job_id, _ in expected]
    slurm.cancel_all(slurm.records)
    first = resubmit(run, client(slurm)).job_id
    assert submitted_ids(generation(run.ledger.events()))[0] == first, "a new generation"
    assert len(slurm.scripts) == 2 * len(expected)


def test_fewer_singletons_than_wanted_are_better_than_none(tmp_path: Path) -> None:
    class Limited(FakeSlurm):
        def submit(
            self,
            script: Path | str,
            extra_args: Sequence[str] = (),
            *,
            variables: Collection[str] | None = None,
        ) -> SubmittedJob:
            if len(self.records) == 2:
                raise SlurmRefusedError("Job violates accounting/QOS policy")
            return super().submit(script, extra_args, variables=variables)

    slurm = Limited()
    submitted = submit(prepared("singleton", tmp_path), tmp_path / "runs", client(slurm))
    run = RunFiles(RunLayout(submitted.directory))
    assert len(slurm.records) == 2
    last = run.ledger.events()[-1]
    assert (last.event, last.successor_of) == (EventKind.SUBMIT_FAILED, 1)


def test_a_name_that_another_job_has_is_refused_for_singletons(tmp_path: Path) -> None:
    ready, slurm = prepared("singleton", tmp_path), FakeSlurm()
    slurm.records[9] = job(9, JobState.PENDING, name=ready.run_id)
    with pytest.raises(UsageError, match="job 9 of another directory"):
        check(ready, client(slurm))
    with pytest.raises(UsageError, match="job 9 of another directory"):
        submit(ready, tmp_path / "runs", client(slurm))
    assert not (tmp_path / "runs").exists()
    chain = prepared("chain", tmp_path)
    slurm.records[9] = job(9, JobState.PENDING, name=chain.run_id)
    check(chain, client(slurm))


# -- looking ---------------------------------------------------------------------------------

SUCCESSOR = said(EventKind.SUBMITTED, job_id=2, successor_of=1)
FIRST = (*SUBMITTED, STARTED, SUCCESSOR, LAUNCHED)
LEFT = (*FIRST, *ended("preempted", "urgent", "leave"))
SECOND = (*LEFT, said(EventKind.ATTEMPT_STARTED, job_id=2, restart_count=0))


def status(run: RunFiles, *jobs: JobRecord) -> RunStatus:
    slurm = FakeSlurm()
    slurm.records = {one.job_id: one for one in jobs}
    return statuses([run], client(slurm))[0]


@pytest.mark.parametrize(
    ("entries", "jobs", "state", "words", "job_id"),
    [
        (FIRST, {1: "RUNNING", 2: "PENDING"}, RunState.RUNNING, "", 1),
        (LEFT, {1: "COMPLETED", 2: "PENDING"}, RunState.PENDING, "next job: preempted; Dep", 2),
        (SECOND, {1: "COMPLETED", 2: "RUNNING"}, RunState.RUNNING, "", 2),
        (LEFT, {1: "COMPLETED", 2: "COMPLETING"}, RunState.RUNNING, "completing", 2),
        (LEFT, {2: "PENDING"}, RunState.PENDING, "next job", 2),
        (FIRST, {1: "NODE_FAIL", 2: "PENDING"}, RunState.PENDING, "Dependency", 2),
    ],
)
def test_the_job_that_counts(
    entries: tuple[Said, ...],
    jobs: dict[int, str],
    state: RunState,
    words: str,
    job_id: int,
    tmp_path: Path,
) -> None:
    run = fabricate(tmp_path, entries=entries)
    row = status(
        run, *(job(number, JobState[name], reason="Dependency") for number, name in jobs.items())
    )
    assert (row.state, row.job_id) == (state, job_id)
    assert words in row.reason


def test_an_end_of_an_earlier_job_is_not_that_of_the_run(tmp_path: Path) -> None:
    stopped = (*LEFT, *ended("crash", "boom", "stop"))
    jobs = (job(1, JobState.COMPLETED), job(2, JobState.CANCELLED))
    row = status(fabricate(tmp_path, "stopped", stopped), *jobs)
    assert row.state is RunState.FAILED and "crash" in row.reason, "a successor hides no stop"
    again = (*stopped, said(EventKind.SUBMITTED, job_id=3))
    row = status(fabricate(tmp_path, "again", again), *jobs, job(3, JobState.PENDING))
    assert (row.state, row.job_id) == (RunState.PENDING, 3)


def test_an_array_is_known_by_its_elements(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=(*SUBMITTED,))
    waiting = job(1, JobState.PENDING, array_job_id=1, reason="JobArrayTaskLimit")
    element = job(7, JobState.RUNNING, array_job_id=1)
    row = status(run, waiting, element)
    assert (row.state, row.job_id) == (RunState.RUNNING, 7)


def test_which_of_several_jobs_counts() -> None:
    ran = job(3, JobState.COMPLETED, node_list="n0", start_time=5.0)
    ran_later = job(1, JobState.FAILED, node_list="n0", start_time=9.0)
    never = job(4, JobState.CANCELLED, start_time=99.0)
    assert counted([ran, ran_later, never]) is ran_later
    assert counted([never]) is never and counted([]) is None
    soon = job(5, JobState.PENDING, start_time=20.0)
    assert counted([never, job(6, JobState.PENDING), soon]) is soon


def test_one_question_and_no_look_back_while_a_job_lives(tmp_path: Path) -> None:
    asked: list[str] = []

    class Counting(FakeSlurm):
        def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
            asked.append("squeue")
            return super().jobs_of_users(user_ids)

        def past_jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
            asked.extend("sacct" for _ in ids)
            return {}

    slurm = Counting()
    slurm.records[2] = job(2, JobState.PENDING)
    statuses([fabricate(tmp_path, entries=LEFT)], client(slurm))
    assert asked == ["squeue"], "job 1 is forgotten, and nobody needs it"


def test_attempts_are_told_apart_when_they_overlap(tmp_path: Path) -> None:
    """The first supervisor says its last words after the second has begun."""
    late = said(EventKind.ACTION, action="leave", reason="late", job_id=1, restart_count=0)
    own = said(EventKind.ACTION, action="finish", reason="own", job_id=2, restart_count=0)
    story = describe(fabricate(tmp_path, entries=(*SECOND, own, late)))
    assert [(one.job_id, one.reason) for one in story.attempts][1] == (2, "own")


def test_logs_of_an_array_come_in_the_order_of_its_elements(tmp_path: Path) -> None:
    begun = [said(EventKind.ATTEMPT_STARTED, job_id=n, restart_count=0) for n in (8, 9, 7)]
    run = fabricate(tmp_path, entries=(*SUBMITTED, *begun))
    for name in ("slurm-7_10.out", "slurm-7_9.out", "slurm-7_8.out"):
        (run.layout.logs / name).touch()
    for name in ("7.0", "8.0", "9.0", "9.1"):
        (run.layout.logs / name).mkdir()
    assert [path.name for path in job_logs(run)] == [f"slurm-7_{n}.out" for n in (8, 9, 10)]
    assert [path.name for path in attempt_directories(run)] == ["8.0", "9.0", "9.1", "7.0"]


# -- cancelling ------------------------------------------------------------------------------


def test_cancel_ends_what_waits_before_what_runs(tmp_path: Path) -> None:
    calls: list[tuple[list[int], bool]] = []

    class Looking(FakeSlurm):
        def cancel_all(self, ids: Collection[int], *, pending_only: bool = False) -> None:
            calls.append((sorted(ids), pending_only))
            super().cancel_all(ids, pending_only=pending_only)

    slurm = Looking()
    slurm.records = {1: job(1, JobState.RUNNING), 2: job(2, JobState.PENDING)}
    run = fabricate(tmp_path, entries=FIRST)
    told = cancel(run, client(slurm))
    assert calls == [([1, 2], True), ([1, 2], False)]
    assert (told.job_id, told.job_ids) == (1, (1, 2)), "its supervisor looks for its own id"
    assert run.ledger.events()[-1].job_id == 1
    assert {record.state for record in slurm.records.values()} == {JobState.CANCELLED}


def test_cancel_finds_a_successor_that_is_submitted_meanwhile(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=(*SUBMITTED, STARTED))

    class Growing(FakeSlurm):
        def cancel_all(self, ids: Collection[int], *, pending_only: bool = False) -> None:
            super().cancel_all(ids, pending_only=pending_only)
            if 2 not in self.records:
                self.records[2] = job(2, JobState.PENDING)
                run.ledger.append(EventKind.SUBMITTED, job_id=2, successor_of=1)

    slurm = Growing()
    slurm.records[1] = job(1, JobState.RUNNING)
    assert cancel(run, client(slurm)).job_ids == (1, 2)
    assert slurm.records[2].state is JobState.CANCELLED


# -- the ledger ------------------------------------------------------------------------------


def test_generations(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=(*SECOND, said(EventKind.SUBMITTED, job_id=3), SUCCESSOR))
    events = run.ledger.events()
    assert [event.job_id for event in generation(events)] == [3, 2]
    assert submitted_ids(events) == [1, 2, 3, 2] and started_ids(events) == [1, 2]
    assert successor_ids(events, 1) == [2, 2] and successor_ids(events, 3) == []
    assert generation(events[:2]) == []


def test_the_end_of_a_ledger(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=SECOND)
    whole, size_bytes = run.ledger.events(), run.layout.ledger.stat().st_size
    assert run.ledger.last_events(size_bytes) == (whole, True)
    assert run.ledger.last_events(size_bytes - 1) == (whole[1:], False), "no torn first line"
    assert run.ledger.last_events(3) == ([], False)
