"""Successors: who submits them, who must leave, who ends them, with a Slurm in memory."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest
from launch_evidence import config
from virtual_clock import VirtualClock

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Verdict
from hpctrain.records.jobs import cancel_requested, generation, job_ids
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, EventKind
from hpctrain.records.run_records import Progress, write_record
from hpctrain.records.supervise_config import SubmitSettings
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord, SubmittedJob
from hpctrain.slurm.states import JobState
from hpctrain.supervise.act.successor import (
    adopt_own_job,
    end_succession,
    ensure_successor,
    exclude_from_successors,
    must_leave,
)
from hpctrain.supervise.context import AttemptContext, JobAttempt
from hpctrain.supervise.decision_inputs import allocation_of, assess
from hpctrain.supervise.srun_process import Signals

Mode = Literal["requeue", "chain", "singleton", "array", "none"]


def job(job_id: int, state: JobState, start_time: float | None = 1.0, **more: object) -> JobRecord:
    fields = {"state": state, "start_time": start_time, **more}
    return JobRecord(job_id, **fields)  # type: ignore[arg-type]


@pytest.fixture
def slurm() -> FakeSlurm:
    fake = FakeSlurm()
    fake.records[5] = job(5, JobState.RUNNING, 50.0)
    return fake


def attempt(
    directory: Path, slurm: FakeSlurm, mode: Mode = "chain", job_id: int = 5
) -> AttemptContext:
    """The supervisor of job 5, the first of its generation and begun."""
    layout = RunLayout(directory / "r1")
    if not layout.directory.exists():
        layout.create()
        layout.supervise_config.write_text("{}")
        layout.script.write_text("#!/bin/sh\n")
    ledger = BufferedLedger(layout)
    context = AttemptContext(
        run_layout=layout,
        config=config().model_copy(update={"continuation": mode}),
        attempt=JobAttempt(job_id, 0, "n[0-1]", "n0"),
        ledger=ledger,
        slurm=cast(SlurmClient, slurm),
        signals=Signals(),
    )
    if not ledger.events():
        ledger.append(EventKind.SUBMITTED, job_id=5)
        context.note(EventKind.ATTEMPT_STARTED)
    return context


def submitted(context: AttemptContext) -> list[tuple[int | None, int | None]]:
    events = context.ledger.events()
    found = [event for event in events if event.event is EventKind.SUBMITTED]
    return [(event.job_id, event.successor_of) for event in found]


# -- submitting ------------------------------------------------------------------------------


def test_a_chain_submits_the_same_script_behind_itself(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    ensure_successor(context)
    assert submitted(context) == [(5, None), (6, 5)]
    assert context.ledger.events()[-1].reason == "successor"
    assert slurm.scripts[6] == context.run_layout.script.read_text()
    assert slurm.options[6] == [
        "--dependency=afterany:5",
        "--kill-on-invalid-dep=yes",
        f"--chdir={context.run_layout.directory}",
    ]


def test_there_is_only_one_successor(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    ensure_successor(context)
    ensure_successor(context)
    assert len(slurm.scripts) == 1


@pytest.mark.parametrize("mode", ["requeue", "singleton", "array", "none"])
def test_nobody_else_submits_from_inside_a_job(
    mode: Mode, tmp_path: Path, slurm: FakeSlurm
) -> None:
    ensure_successor(attempt(tmp_path, slurm, mode))
    assert not slurm.scripts


def test_no_successor_of_a_run_that_is_done_or_cancelled(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    context.run_layout.done.touch()
    ensure_successor(context)
    context.run_layout.done.unlink()
    context.ledger.append(EventKind.CANCEL_REQUESTED, job_id=5)
    ensure_successor(context)
    assert not slurm.scripts


def test_a_cancel_before_the_newest_submission_is_over(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    context.ledger.append(EventKind.CANCEL_REQUESTED, job_id=5)
    context.ledger.append(EventKind.SUBMITTED, job_id=5)
    ensure_successor(context)
    assert slurm.scripts


def test_a_node_that_may_not_submit_trains_on(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    slurm.refusal = "Access/permission denied"
    ensure_successor(context)
    last = context.ledger.events()[-1]
    assert (last.event, last.successor_of) == (EventKind.SUBMIT_FAILED, 5)
    assert "Access/permission denied" in (last.reason or "")


def test_a_cancel_that_comes_meanwhile_takes_the_successor_along(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    class Cancelling(FakeSlurm):
        def submit(
            self,
            script: Path | str,
            extra_args: Sequence[str] = (),
            *,
            variables: Collection[str] | None = None,
        ) -> SubmittedJob:
            context.ledger.append(EventKind.CANCEL_REQUESTED, job_id=5)
            return super().submit(script, extra_args, variables=variables)

    cancelling = Cancelling()
    cancelling.records.update(slurm.records)
    context = attempt(tmp_path, cancelling)
    ensure_successor(context)
    assert cancelling.records[6].state is JobState.CANCELLED


# -- ending ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["chain", "singleton"])
def test_what_waits_is_ended_and_what_runs_is_not(
    mode: Mode, tmp_path: Path, slurm: FakeSlurm
) -> None:
    context = attempt(tmp_path, slurm, mode)
    for job_id in (6, 7):
        slurm.records[job_id] = job(job_id, JobState.PENDING)
        context.ledger.append(EventKind.SUBMITTED, job_id=job_id, successor_of=5)
    slurm.records[8] = job(8, JobState.PENDING)  # somebody else's
    end_succession(context)
    states = {job_id: record.state.name for job_id, record in slurm.records.items()}
    assert states == {5: "RUNNING", 6: "CANCELLED", 7: "CANCELLED", 8: "PENDING"}


def test_the_waiting_elements_of_an_array_are_ended(tmp_path: Path, slurm: FakeSlurm) -> None:
    """sbatch has printed 5; the element that runs has an id of its own, the others wait as 5."""
    slurm.records[5] = job(5, JobState.PENDING, array_job_id=5)
    slurm.records[6] = job(6, JobState.RUNNING, array_job_id=5)
    end_succession(attempt(tmp_path, slurm, "array", job_id=6))
    assert slurm.records[5].state is JobState.CANCELLED
    assert slurm.records[6].state is JobState.RUNNING


@pytest.mark.parametrize("mode", ["requeue", "none"])
def test_a_single_job_has_nothing_to_end(mode: Mode, tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.away = True
    context = attempt(tmp_path, slurm, mode)
    end_succession(context)
    assert len(context.ledger.events()) == 2


def test_a_silent_slurm_is_told_of_and_raises_nothing(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    slurm.away = True
    end_succession(context)
    assert "could not be cancelled" in (context.ledger.events()[-1].reason or "")


# -- leaving ---------------------------------------------------------------------------------


def second(directory: Path, slurm: FakeSlurm, mode: Mode = "chain") -> AttemptContext:
    """The supervisor of job 6, which goes on after job 5."""
    first = attempt(directory, slurm, mode)
    first.ledger.append(EventKind.SUBMITTED, job_id=6, successor_of=5)
    slurm.records[6] = job(6, JobState.RUNNING, 60.0)
    return attempt(directory, slurm, mode, job_id=6)


@pytest.mark.parametrize(
    ("first", "again", "reason"),
    [
        (job(5, JobState.RUNNING, 50.0), False, "job 5 of this run is running: the run is left"),
        (job(5, JobState.SUSPENDED, 50.0), False, "job 5 of this run is suspended"),
        (job(5, JobState.CONFIGURING, 50.0), False, "job 5 of this run is configuring"),
        (job(5, JobState.COMPLETED, 50.0), False, None),
        (job(5, JobState.PREEMPTED, 50.0), False, None),
        (job(5, JobState.TIMEOUT, 50.0), False, None),
        (job(5, JobState.NODE_FAIL, 50.0), False, None),
        (job(5, JobState.CANCELLED, 50.0), False, None),  # while it waited
        (job(5, JobState.CANCELLED, 50.0, node_list="n0"), False, "cancelled runs stay cancelled"),
        (job(5, JobState.CANCELLED, 50.0, node_list="n0"), True, None),
    ],
)
def test_whether_the_second_of_two_leaves(
    first: JobRecord, again: bool, reason: str | None, tmp_path: Path, slurm: FakeSlurm
) -> None:
    """`again`: a person has submitted the run since."""
    context = second(tmp_path, slurm)
    slurm.records[5] = first
    if again:
        context.ledger.append(EventKind.SUBMITTED, job_id=6)
    found = must_leave(context)
    assert (found is None) is (reason is None) and (reason or "") in (found or "")


def test_the_first_of_two_stays(tmp_path: Path, slurm: FakeSlurm) -> None:
    second(tmp_path, slurm)
    assert must_leave(attempt(tmp_path, slurm)) is None
    slurm.records[5] = job(5, JobState.RUNNING, 60.0)  # in the same second: the lower id stays
    assert must_leave(attempt(tmp_path, slurm)) is None
    assert must_leave(attempt(tmp_path, slurm, job_id=6)) is not None


def test_a_job_that_is_just_ending_is_waited_for(
    tmp_path: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    over = job(5, JobState.CANCELLED, 50.0, node_list="n0")
    virtual_clock.at(3.0, lambda: slurm.records.update({5: over}))
    context = second(tmp_path, slurm)
    slurm.records[5] = job(5, JobState.COMPLETING, 50.0)
    assert "cancelled runs stay cancelled" in (must_leave(context) or "")
    assert 3 <= virtual_clock.passed_seconds < 10


def test_patience_with_a_job_that_never_ends_has_a_limit(
    tmp_path: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    context = second(tmp_path, slurm)
    slurm.records[5] = job(5, JobState.COMPLETING, 50.0)
    assert must_leave(context) is None
    assert 30 <= virtual_clock.passed_seconds <= 40, "KillWait of 3 s and half a minute"


def test_after_a_cancelled_job_the_next_one_leaves_and_ends_the_others(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    context = second(tmp_path, slurm, "singleton")
    context.ledger.append(EventKind.SUBMITTED, job_id=7, successor_of=5)
    slurm.records[7] = job(7, JobState.PENDING)
    slurm.records[5] = job(5, JobState.CANCELLED, 50.0, node_list="n0")
    assert "cancelled runs stay cancelled" in (must_leave(context) or "")
    assert slurm.records[7].state is JobState.CANCELLED
    last = context.ledger.events()[-1]
    assert (last.event, last.job_id) == (EventKind.CANCELLED, 5)


def test_after_a_job_that_has_stopped_the_run_the_next_one_leaves(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    """Slurm was away when it wanted to cancel the others."""
    first = attempt(tmp_path, slurm, "singleton")
    context = second(tmp_path, slurm, "singleton")
    slurm.records[5] = job(5, JobState.FAILED, 50.0)
    slurm.records[7] = job(7, JobState.PENDING)
    context.ledger.append(EventKind.SUBMITTED, job_id=7, successor_of=5)
    first.note(EventKind.ACTION, action="leave", reason="before")
    assert must_leave(context) is None
    first.note(EventKind.ACTION, action="stop", reason="3 crashes")
    assert must_leave(context) == "job 5 has stopped this run (3 crashes)"
    assert slurm.records[7].state is JobState.CANCELLED
    context.ledger.append(EventKind.SUBMITTED, job_id=6)
    assert must_leave(context) is None, "somebody has submitted it again since"
    first.note(EventKind.ACTION, action="stop", reason="late words of an outlived supervisor")
    assert must_leave(context) is None


def test_a_job_that_stopped_itself_may_be_revived(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm, "requeue")
    context.ledger.append(EventKind.SUBMITTED, job_id=4)
    context.ledger.append(EventKind.SUBMITTED, job_id=5)
    context.note(EventKind.ACTION, action="stop", reason="3 crashes")
    assert must_leave(context) is None


def test_a_job_that_ran_and_was_cancelled_waiting_again_means_nothing(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    """`scontrol requeuehold 5; sbatch job.sbatch; scancel 5`: the run goes on in the new job."""
    first = attempt(tmp_path, slurm, "requeue")
    first.note(EventKind.ATTEMPT_STARTED, nodes="n0")
    context = attempt(tmp_path, slurm, "requeue", job_id=14)
    adopt_own_job(context)
    slurm.records[5] = job(5, JobState.CANCELLED, 50.0)
    slurm.records[14] = job(14, JobState.RUNNING, 60.0, node_list="n1")
    assert must_leave(context) is None
    slurm.records[5] = job(5, JobState.CANCELLED, 50.0, node_list="n0")
    assert "was cancelled" in (must_leave(context) or "")


def test_silence_of_slurm_and_being_alone_keep_nobody_from_training(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    context = second(tmp_path, slurm)
    slurm.away = True
    assert must_leave(context) is None

    class NeverAsked(FakeSlurm):
        def jobs(self, ids: object) -> dict[int, JobRecord]:
            raise AssertionError("a run with one job needs no question")

    assert must_leave(attempt(tmp_path / "other", NeverAsked())) is None


# -- whose job it is -------------------------------------------------------------------------


def test_a_job_that_nobody_has_recorded_records_itself(tmp_path: Path, slurm: FakeSlurm) -> None:
    first = attempt(tmp_path, slurm, "requeue")
    adopt_own_job(first)
    assert EventKind.ADOPTED not in {e.event for e in first.ledger.events()}, "it is recorded"
    by_hand = attempt(tmp_path, slurm, "requeue", job_id=14)
    adopt_own_job(by_hand)
    adopt_own_job(by_hand)
    events = first.ledger.events()
    adopted = [event for event in events if event.event is EventKind.ADOPTED]
    assert [(event.job_id, event.successor_of) for event in adopted] == [(14, 5)]
    assert job_ids(generation(events)) == [5, 14], "one more job of those that go on"


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_run_that_was_over_begins_anew_by_hand(
    tmp_path: Path, slurm: FakeSlurm, cancelled: bool
) -> None:
    first = attempt(tmp_path, slurm, "requeue")
    if cancelled:
        first.ledger.append(EventKind.CANCEL_REQUESTED, job_id=5)
    else:
        first.note(EventKind.ACTION, action="stop", reason="3 crashes")
    slurm.records[5] = job(
        5, JobState.CANCELLED if cancelled else JobState.FAILED, 50.0, node_list="n0"
    )
    by_hand = attempt(tmp_path, slurm, "requeue", job_id=14)
    assert must_leave(by_hand) is None, "a person has started it"
    adopt_own_job(by_hand)
    assert job_ids(generation(first.ledger.events())) == [14]
    assert not cancel_requested(first.ledger.events())


def test_the_client_may_write_its_line_after_the_job_has_begun(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    context = attempt(tmp_path, slurm, "requeue", job_id=7)
    context.ledger.append(EventKind.SUBMITTING)
    adopt_own_job(context)
    context.note(EventKind.ATTEMPT_STARTED, nodes="n0")
    context.ledger.append(EventKind.SUBMITTED, job_id=7)
    recent = generation(context.ledger.events())
    assert [event.event for event in recent][:1] == [EventKind.ADOPTED]
    assert EventKind.ATTEMPT_STARTED in {event.event for event in recent}


def test_an_element_of_an_array_is_recorded_by_the_id_of_the_whole(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    context = attempt(tmp_path, slurm, "array")
    element = replace(context, attempt=replace(context.attempt, job_id=9, array_job_id=5))
    adopt_own_job(element)
    assert EventKind.ADOPTED not in {e.event for e in context.ledger.events()}


def test_a_run_that_lives_on_another_cluster_is_left_to_it(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    """`sbatch job.sbatch` on the wrong login node: no Slurm of here knows the job of there."""
    context = attempt(tmp_path, slurm, "requeue")
    context.ledger.append(EventKind.SUBMITTED, job_id=5, cluster="alpha")
    here = replace(context, attempt=replace(context.attempt, job_id=3, cluster="beta"))
    assert must_leave(here) is None, "no sign of life: the run may be moved"
    sign = Progress(epoch=1, phase="training", step=7, target_step=60, time=time.time() - 3)
    write_record(context.run_layout.progress, sign)
    assert "on cluster alpha, where it made progress" in (must_leave(here) or "")
    there = replace(context, attempt=replace(context.attempt, cluster="alpha"))
    assert must_leave(there) is None
    old = sign.model_copy(update={"time": time.time() - 100_000})
    write_record(context.run_layout.progress, old)
    assert must_leave(here) is None


def test_no_job_of_somebody_else_is_cancelled_or_waited_for(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    """The ledger's job 6 is somebody else's by now."""
    context = attempt(tmp_path, slurm)
    context.ledger.append(EventKind.SUBMITTED, job_id=6, successor_of=5)
    for state in (JobState.PENDING, JobState.RUNNING, JobState.CANCELLED):
        slurm.records[6] = job(6, state, 1.0, name="innocent", comment="of somebody")
        assert must_leave(context) is None
        end_succession(context)
        assert slurm.records[6].state is state


def test_jobs_that_wait_are_kept_away_from_nodes(tmp_path: Path, slurm: FakeSlurm) -> None:
    """Not our own, which runs, and nobody else's."""
    context = attempt(tmp_path, slurm)
    assert "no pending job" in exclude_from_successors(context, ("n1",))
    context.ledger.append(EventKind.SUBMITTED, job_id=6, successor_of=5)
    slurm.records[6] = job(6, JobState.PENDING, name="r1", comment="hpctrain:r1")
    slurm.records[7] = job(7, JobState.PENDING, name="innocent", comment="of somebody")
    assert exclude_from_successors(context, ("n1", "n2")) == "job 6: without n1, n2"
    excluded = {job_id: one.exclude_nodes for job_id, one in slurm.records.items()}
    assert excluded[6] == "n1,n2" and not excluded[5] and not excluded[7]


@pytest.mark.parametrize(
    ("mode", "submitted", "started", "followed"),
    [
        ("chain", [(6, 5)], [5], True),
        ("chain", [], [5], False),
        ("chain", [(6, 4)], [5], False),
        ("singleton", [(6, 0), (7, 0)], [5], True),
        ("singleton", [(6, 0), (7, 0)], [5, 6, 7], False),
        ("array", [], [5, 6], True),
        ("array", [], [5, 6, 7], False),
        ("requeue", [], [5], True),
        ("none", [], [5], True),
    ],
)
def test_whether_another_job_goes_on(
    tmp_path: Path,
    slurm: FakeSlurm,
    mode: Mode,
    submitted: list[tuple[int, int]],
    started: list[int],
    followed: bool,
) -> None:
    context = attempt(tmp_path, slurm, mode)
    context = replace(context, config=context.config.model_copy(update={"continuation_jobs": 3}))
    for job_id, after in submitted:
        context.ledger.append(EventKind.SUBMITTED, job_id=job_id, successor_of=after or 5)
    for job_id in started[1:]:
        context.ledger.append(EventKind.ATTEMPT_STARTED, job_id=job_id)
    allocation = allocation_of(context)
    assert assess(context, allocation, Verdict(Cause.TIME_LIMIT, "x")).followed is followed


def test_refusals_of_slurm_raise_nothing(tmp_path: Path, slurm: FakeSlurm) -> None:
    class Refusing(FakeSlurm):
        def cancel_all(self, ids: object, *, pending_only: bool = False) -> None:
            raise SlurmRefusedError("Access/permission denied")

    refusing = Refusing()
    refusing.records.update(slurm.records)
    end_succession(attempt(tmp_path, refusing))


def test_the_successor_is_submitted_by_the_sites_command(tmp_path: Path, slurm: FakeSlurm) -> None:
    context = attempt(tmp_path, slurm)
    words = ("site_sbatch", "--project", "x")
    named = context.config.model_copy(
        update={"submission": SubmitSettings(words=words, cluster="fake")}
    )
    slurm.messages = ("charging x",)
    ensure_successor(replace(context, config=named))
    assert slurm.commands == [words], "and on the cluster of this job, which needs no name"
    event = context.ledger.events()[-1]
    assert (event.event, event.site_messages) == (EventKind.SUBMITTED, ("charging x",))
