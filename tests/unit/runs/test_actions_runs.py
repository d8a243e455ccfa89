"""Finding and naming runs, their logs, their history, cancelling, comparing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from another_user import AnotherUser, public_directory
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, published, said
from judged_runs import submitted
from virtual_clock import VirtualClock

from hpctrain.base.errors import NoSuchRunError, SlurmUnreachableError, UsageError
from hpctrain.job.job_submission import resubmit
from hpctrain.records.find import all_runs, find_run, new_run_id, runs_directory
from hpctrain.records.jobs import cancel_requested, run_comment
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_jobs import identity_of, select_jobs
from hpctrain.records.run_records import append_metrics, read_metrics
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.runs.bitwise import compare_runs
from hpctrain.runs.control import cancel, hold, resume, stop
from hpctrain.runs.describe import describe
from hpctrain.runs.logs import LogPart, attempt_directories, follow, job_logs, rank_logs
from hpctrain.runs.run_documents import known_plan
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

# -- names -----------------------------------------------------------------------------------


def test_where_runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_directory() == Path("runs")
    monkeypatch.setenv("HPCTRAIN_RUNS", "/elsewhere")
    assert runs_directory() == Path("/elsewhere")
    assert runs_directory(Path("given")) == Path("given")


def test_new_run_ids(tmp_path: Path) -> None:
    first = new_run_id(tmp_path, "gpt", "digest")
    assert first == new_run_id(tmp_path, "gpt", "digest"), "what --dry-run shows is what comes"
    assert first != new_run_id(tmp_path, "gpt", "other digest")
    (tmp_path / first).mkdir()
    second = new_run_id(tmp_path, "gpt", "digest")
    assert second != first and second.startswith("gpt-")


def test_finding_runs(tmp_path: Path) -> None:
    for run_id in ("gpt-1a2b", "gpt-1a2b-long", "llama-77aa"):
        fabricate(tmp_path, run_id)
    assert find_run(tmp_path, "gpt-1a2b").run_id == "gpt-1a2b", "an exact name is not a prefix"
    assert find_run(tmp_path, "ll").run_id == "llama-77aa"
    with pytest.raises(UsageError, match="start of several runs"):
        find_run(tmp_path, "gpt")
    with pytest.raises(NoSuchRunError) as caught:
        find_run(tmp_path, "lama-77aa")
    assert "`llama-77aa`" in str(caught.value.hint)


def test_an_empty_name_is_no_run(tmp_path: Path) -> None:
    """`hpctrain cancel -y "$RUN"` with RUN unset must not take the only run there is."""
    fabricate(tmp_path, "gpt-1a2b")
    with pytest.raises(NoSuchRunError):
        find_run(tmp_path, "")


def test_directories_without_a_ledger_are_no_runs(tmp_path: Path) -> None:
    assert all_runs(tmp_path / "nowhere") == []
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").touch()
    fabricate(tmp_path, "b-0001")
    fabricate(tmp_path, "a-0002")
    assert [run.run_id for run in all_runs(tmp_path)] == ["b-0001", "a-0002"], "newest last"


# -- logs ------------------------------------------------------------------------------------


def test_logs_come_in_the_order_of_attempts(tmp_path: Path) -> None:
    run = fabricate(tmp_path)
    logs = run.layout.logs
    for name in ("10.0", "9.10", "9.2", "not-an-attempt", "9"):
        (logs / name).mkdir()
    for name in ("slurm-10.out", "slurm-9.out", "slurm-x.out"):
        (logs / name).touch()
    assert [path.name for path in attempt_directories(run)] == ["9.2", "9.10", "10.0"]
    assert [path.name for path in job_logs(run)] == ["slurm-9.out", "slurm-10.out"]


def test_logs_of_a_rank(tmp_path: Path) -> None:
    run = fabricate(tmp_path)
    for name in ("9.0/step10-rank0001", "9.0/step2-rank0001", "9.1/step0-rank0001"):
        path = run.layout.logs / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (run.layout.logs / "9.0/step2-rank0011.log").touch()
    names = [log.path.name for log in rank_logs(run, 1)]
    assert names == ["step2-rank0001.log", "step10-rank0001.log", "step0-rank0001.log"]
    assert [log.path.name for log in rank_logs(run, 1, attempt=2)] == ["step0-rank0001.log"]
    for rank, attempt in ((1, 3), (1, 0), (7, None)):
        with pytest.raises(UsageError):
            rank_logs(run, rank, attempt)


def test_logs_of_a_rank_in_those_of_nodes(tmp_path: Path) -> None:
    """With a plan the node of a rank is known; without one the labels show it."""
    run = fabricate(tmp_path)
    directory = run.layout.logs / "9.0"
    directory.mkdir()
    for node in (0, 1):
        text = f"{2 * node}: one\n{2 * node + 1}: two\n{2 * node}: three\nof the agent\n"
        (directory / f"step0-node{node:04d}.log").write_text(text)
    (directory / "step1-rank0003.log").write_text("of its own\n")
    (directory / "step1-node0001.log").write_text("of an agent\n")
    logs = rank_logs(run, 3)
    assert [log.path.name for log in logs] == ["step0-node0001.log", "step1-rank0003.log"]
    assert [log.text() for log in logs] == ["two\n", "of its own\n"]
    assert [log.text() for log in rank_logs(run, 0)] == ["one\nthree\n"]
    with pytest.raises(UsageError, match="no log of rank 4 yet"):
        rank_logs(run, 4)
    submitted_run, ranks = submitted(tmp_path, "gpt1300m", "a100x64")
    directory = submitted_run.layout.logs / "9.0"
    directory.mkdir()
    per_node = known_plan(submitted_run.layout).nodes.gpus_per_node  # type: ignore[union-attr]
    for node in range(ranks // per_node):
        (directory / f"step0-node{node:04d}.log").write_text(f"{node * per_node}: on {node}\n")
    (log,) = rank_logs(submitted_run, ranks - 1)
    assert log.path.name == f"step0-node{ranks // per_node - 1:04d}.log"
    assert log.text() == "", "nothing yet"
    (log,) = rank_logs(submitted_run, 0)
    assert log.text() == "on 0\n"


def test_following_a_rank_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step0-node0000.log"
    path.write_text("0: one\n1: not this\n0: tw")

    def rounds() -> Iterator[bool]:
        yield False
        path.write_text(path.read_text() + "o\n1: nor this\n")
        yield True

    states = rounds()
    text = "".join(follow(lambda: LogPart(path, 0), lambda: next(states)))
    assert text == "one\ntwo\n"


def test_follow(tmp_path: Path, virtual_clock: VirtualClock) -> None:
    """Text that is appended while we look, then a newer log, then the end: nothing is lost."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("one ")
    newest = [LogPart(first)]

    def rounds() -> Iterator[bool]:
        yield False
        first.write_text("one two ")
        yield False
        first.write_text("one two three ")
        second.write_text("four ")
        newest[0] = LogPart(second)
        yield False
        second.write_text("four five")
        yield True

    states = rounds()
    assert "".join(follow(lambda: newest[0], lambda: next(states))) == "one two three four five"
    assert "".join(follow(lambda: None, lambda: True)) == ""


# -- cancelling ------------------------------------------------------------------------------


def test_cancel_announces_it_and_keeps_the_job_from_being_requeued(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.submit("#!/bin/sh\n")
    run = fabricate(tmp_path)
    assert cancel(run, slurm).job_id == 1  # type: ignore[arg-type]
    assert slurm.records[1].state is JobState.CANCELLED
    assert slurm.records[1].requeue is False, "a supervisor that requeues now must be refused"
    kinds = [event.event for event in run.ledger.events()][-2:]
    assert kinds == [EventKind.CANCEL_REQUESTED, EventKind.CANCELLED]
    before = run.ledger.events()
    assert cancel(run, slurm).already and run.ledger.events() == before  # type: ignore[arg-type]
    assert statuses([run], slurm)[0].state is RunState.CANCELLED  # type: ignore[arg-type]


def test_a_cancel_that_slurm_does_not_hear_is_taken_back(tmp_path: Path) -> None:
    """It would be followed at the next crash, days later."""

    class AwayWhenActing(FakeSlurm):
        def cancel_all(self, ids: Collection[int], *, pending_only: bool = False) -> None:
            raise SlurmUnreachableError("Unable to contact slurm controller")

    slurm = AwayWhenActing()
    slurm.submit("#!/bin/sh\n")
    run = fabricate(tmp_path)
    with pytest.raises(SlurmUnreachableError, match="was cancelled"):
        cancel(run, slurm)  # type: ignore[arg-type]
    events = run.ledger.events()
    assert events[-1].event is EventKind.CANCEL_FAILED and not cancel_requested(events)
    assert slurm.records[1].requeue is True, "or the next preemption would end the run"
    assert statuses([run], slurm)[0].state is RunState.PENDING  # type: ignore[arg-type]


def test_a_cancel_without_an_answer_of_slurm_announces_nothing(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(), fabricate(tmp_path)
    slurm.away = True
    before = run.ledger.events()
    with pytest.raises(SlurmUnreachableError, match="was cancelled"):
        cancel(run, slurm)  # type: ignore[arg-type]
    assert run.ledger.events() == before


def test_cancel_of_what_is_over_says_so_and_writes_nothing(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.submit("#!/bin/sh\n")
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED, exit_code=1)
    entries = (*SUBMITTED, STARTED, LAUNCHED, *ended("crash", "boom", "stop"))
    run = fabricate(tmp_path, entries=entries)
    with pytest.raises(UsageError, match="is FAILED, so there is nothing to cancel: because"):
        cancel(run, slurm)  # type: ignore[arg-type]
    assert run.ledger.events()[-1].event is EventKind.ACTION


def test_cancel_never_touches_a_job_of_somebody_else(tmp_path: Path) -> None:
    """Job 1 is another one now: the controller lost its state, or this is another cluster."""
    slurm = FakeSlurm()
    slurm.records[1] = JobRecord(1, state=JobState.RUNNING, name="innocent", comment="dear")
    run = fabricate(tmp_path, entries=(*SUBMITTED, STARTED, LAUNCHED))
    with pytest.raises(UsageError, match="nothing to cancel"):
        cancel(run, slurm)  # type: ignore[arg-type]
    assert slurm.records[1].state is JobState.RUNNING
    assert statuses([run], slurm)[0].state is RunState.UNKNOWN  # type: ignore[arg-type]


def test_another_cluster_is_refused_by_name(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.records[1] = JobRecord(
        1,
        state=JobState.RUNNING,
        name="gpt-tiny-7f3a",
        comment=run_comment("gpt-tiny-7f3a"),
        cluster="fake",
    )
    entries = (*SUBMITTED[:2], said(EventKind.SUBMITTED, job_id=1, cluster="alpha"), STARTED)
    run = fabricate(tmp_path, entries=entries)
    for verb in (cancel, stop, hold, resume, resubmit):
        with pytest.raises(UsageError, match="on cluster `alpha`, and this is cluster `fake`"):
            verb(run, slurm)  # type: ignore[operator]
    assert slurm.records[1].state is JobState.RUNNING
    row = statuses([run], slurm)[0]  # type: ignore[arg-type]
    assert (row.state, row.reason) == (RunState.UNKNOWN, "its jobs are on cluster alpha")


def test_a_job_whose_client_died_is_found_by_its_comment(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    run = fabricate(tmp_path, entries=SUBMITTED[:2])
    mark = {"comment": run_comment(run.run_id), "work_directory": str(run.layout.directory)}
    slurm.records[4] = JobRecord(4, state=JobState.RUNNING, name=run.run_id, **mark)
    elsewhere = {**mark, "work_directory": "/scratch/else/runs/gpt-tiny-7f3a"}
    slurm.records[5] = JobRecord(5, state=JobState.RUNNING, name=run.run_id, **elsewhere)
    row = statuses([run], slurm)[0]  # type: ignore[arg-type]
    assert (row.state, row.job_id) == (RunState.RUNNING, 4)
    assert run.ledger.events()[-1].event is EventKind.SUBMITTING, "looking writes nothing"
    assert cancel(run, slurm).job_ids == (4,)  # type: ignore[arg-type]
    assert slurm.records[5].state is JobState.RUNNING, "of another directory of runs"
    kinds = [event.event for event in run.ledger.events()]
    assert kinds[-3:-1] == [EventKind.ADOPTED, EventKind.CANCEL_REQUESTED]


def test_a_second_submission_is_refused_while_an_unrecorded_job_waits(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    run = fabricate(tmp_path, entries=SUBMITTED[:2])
    mark = {"comment": run_comment(run.run_id), "work_directory": str(run.layout.directory)}
    slurm.records[4] = JobRecord(4, state=JobState.PENDING, name=run.run_id, **mark)
    with pytest.raises(UsageError, match="has job 4 in state PENDING"):
        resubmit(run, slurm)  # type: ignore[arg-type]
    assert run.ledger.events()[-1].event is EventKind.ADOPTED and len(slurm.records) == 1


def test_two_clusters_in_one_answer_are_told_apart(tmp_path: Path) -> None:
    """With SLURM_CLUSTERS=alpha,beta squeue prints the jobs of both."""
    entries = (*SUBMITTED[:2], said(EventKind.SUBMITTED, job_id=1, cluster="alpha"), STARTED)
    run = fabricate(tmp_path, entries=entries)
    ours = JobRecord(1, state=JobState.RUNNING, name=run.run_id, cluster="alpha")
    theirs = replace(ours, state=JobState.CANCELLED, cluster="beta")
    for records, wanted in (((theirs, ours), (ours,)), ((theirs,), ())):
        found = select_jobs(
            identity_of(run.layout.directory), run.ledger.events(), records, "alpha"
        )
        assert found.jobs == wanted and found.elsewhere is None


def test_a_job_that_was_started_by_hand_is_cancelled_too(tmp_path: Path) -> None:
    """`scontrol requeuehold 1; sbatch job.sbatch`: the ledger knows job 14 from its start only."""
    slurm = FakeSlurm()
    by_hand = said(EventKind.ATTEMPT_STARTED, job_id=14, restart_count=0, nodes="n2")
    run = fabricate(tmp_path, entries=(*SUBMITTED, STARTED, by_hand))
    slurm.records[1] = JobRecord(1, state=JobState.PENDING, reason="JobHeldUser", name=run.run_id)
    slurm.records[14] = JobRecord(14, state=JobState.RUNNING, name=run.run_id, requeue=True)
    row = statuses([run], slurm)[0]  # type: ignore[arg-type]
    assert (row.state, row.job_id) == (RunState.RUNNING, 14)
    assert cancel(run, slurm).job_ids == (1, 14)  # type: ignore[arg-type]
    assert {one.state for one in slurm.records.values()} == {JobState.CANCELLED}


@pytest.mark.parametrize("done", [True, False])
def test_nothing_to_cancel(tmp_path: Path, done: bool) -> None:
    run = fabricate(tmp_path, entries=SUBMITTED if done else SUBMITTED[:2], done=done)
    with pytest.raises(UsageError, match="nothing to cancel"):
        cancel(run, FakeSlurm())  # type: ignore[arg-type]


# -- telling ---------------------------------------------------------------------------------


def test_history(tmp_path: Path) -> None:
    lost = said(
        EventKind.ATTEMPT_LOST, job_id=1, restart_count=1, cause="supervisor_lost", reason="silent"
    )
    entries = [*SUBMITTED, STARTED, LAUNCHED, said(EventKind.SIGNAL, signal="USR1")]
    entries += ended("preempted", "urgent", "requeue")
    entries += [said(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=1, nodes="n[2-3]")]
    entries += [said(EventKind.LAUNCH_STARTED, epoch=2, resume_step=30)]
    entries += [said(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=2, nodes="n0"), lost]
    story = describe(fabricate(tmp_path, entries=entries))
    first, second, third = story.attempts
    assert (first.action, first.signals, first.nodes) == ("requeue", ("USR1",), "n[0-1]")
    assert (first.launches[0].last_step, first.launches[0].cause) == (30, "preempted")
    assert first.launches[0].seconds == 2.0
    assert (second.action, second.reason) == ("supervisor_lost", "silent"), "told by a later one"
    assert second.launches[0].resume_step == 30 and second.launches[0].cause is None
    assert third.action is None and third.launches == ()
    assert story.checkpoints == () and not story.done


def test_comparison(tmp_path: Path) -> None:
    reference = fabricate(tmp_path, "reference", steps=5)
    same = fabricate(tmp_path, "same", steps=5)
    result = compare_runs(reference, same)
    assert (result.identical, result.steps_compared, result.steps_lost) == (True, 5, 0)

    again = fabricate(tmp_path, "again", steps=5)
    repeated = read_metrics(again.layout)[4].model_copy(update={"epoch": 2})
    append_metrics(again.layout, repeated)
    result = compare_runs(reference, again)
    assert (result.identical, result.steps_lost) == (True, 1), "a repeated step is a lost step"
    assert [launch.cause for launch in result.launches] == ["lost", "lost"]

    off = repeated.model_copy(update={"loss_hex": float.hex(2.5000000000000004)})
    append_metrics(again.layout, off)
    result = compare_runs(reference, again)
    assert not result.identical and "step 5" in str(result.first_difference), "one bit is enough"

    for row in read_metrics(again.layout)[3:5]:
        append_metrics(again.layout, row.model_copy(update={"epoch": 3}))
    result = compare_runs(reference, again)
    assert (result.identical, result.steps_lost) == (True, 4), "what was taken back does not count"

    shorter = fabricate(tmp_path, "shorter", steps=4, last_loss=3.0)
    result = compare_runs(reference, shorter)
    assert not result.identical and result.first_difference is None, "a step is missing"
    nothing = fabricate(tmp_path, "nothing")
    assert not compare_runs(nothing, nothing).identical, "no steps prove nothing"


# -- runs that cannot be read ------------------------------------------------------------------


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    good = fabricate(tmp_path, "good-0001")
    bad = fabricate(tmp_path, "bad-0002")
    bad.layout.ledger.unlink()
    bad.layout.ledger.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "no-run").mkdir()
    found = all_runs(tmp_path)
    assert [(run.run_id, bool(run.unreadable)) for run in found] == [
        ("bad-0002", True),
        ("good-0001", False),
    ]
    rows = statuses(found, FakeSlurm())  # type: ignore[arg-type]
    assert rows[0].reason == "is damaged: ledger.jsonl is no file" and not rows[0].readable
    assert find_run(tmp_path, "good") == good
    with pytest.raises(UsageError, match="run `bad-0002` is damaged"):
        find_run(tmp_path, "bad-0002")


def test_runs_of_somebody_else_hide_no_other(another_user: AnotherUser) -> None:
    with public_directory() as runs:
        fabricate(runs, "closed-0001")
        closed = fabricate(runs, "half-open-0002")
        closed.layout.directory.chmod(0o755)
        closed.layout.ledger.chmod(0o600)
        fabricate(runs, "shared-0003").layout.directory.chmod(0o755)
        seen = another_user.call(seen_in, runs)
        denied = "cannot be read: Permission denied; it belongs to root"
        assert seen[:2] == [("closed-0001", denied), ("half-open-0002", denied)]
        assert seen[2] == ("shared-0003", "Slurm does not know the job any more")
        listed = another_user.hpctrain("status", "--runs", str(runs))
        assert listed.exit_code == 0 and "2 runs cannot be read" in listed.stderr


def seen_in(runs: Path) -> list[tuple[str, str]]:
    rows = statuses(all_runs(runs), FakeSlurm())  # type: ignore[arg-type]
    return [(row.run_id, row.reason) for row in rows]


# -- status ----------------------------------------------------------------------------------


class Counting(FakeSlurm):
    """Counts the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def jobs_of_users(self, user_ids):  # type: ignore[no-untyped-def]
        self.asked.append(("squeue", tuple(user_ids)))
        return super().jobs_of_users(user_ids)

    def past_jobs(self, ids):  # type: ignore[no-untyped-def]
        self.asked.append(("sacct", tuple(ids)))
        self._present()
        return {}


def test_one_question_for_all_runs(tmp_path: Path) -> None:
    slurm = Counting()
    for number in (1, 2, 3):
        slurm.submit("")
        entries = [*SUBMITTED[:2], said(EventKind.SUBMITTED, job_id=number)]
        fabricate(tmp_path, f"run-{number}", entries, done=number == 3)
    del slurm.records[2]
    rows = statuses(all_runs(tmp_path), slurm)  # type: ignore[arg-type]
    assert slurm.asked == [("squeue", (os.getuid(),)), ("sacct", (2,))]
    assert [row.state.value for row in rows] == ["PENDING", "UNKNOWN", "DONE"]


def test_no_question_without_open_runs(tmp_path: Path) -> None:
    slurm = Counting()
    fabricate(tmp_path, done=True)
    statuses(all_runs(tmp_path), slurm)  # type: ignore[arg-type]
    assert slurm.asked == []


def test_a_running_job_without_a_sign_of_life_is_stale(
    tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    slurm = FakeSlurm()
    slurm.submit("")
    slurm.records[1] = replace(slurm.records[1], state=JobState.RUNNING)
    run = fabricate(tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED], steps=23)
    for now, stale in ((1_800_000_000.0, False), (1_800_000_700.0, True)):
        virtual_clock.begins_at = now
        (row,) = statuses([run], slurm)  # type: ignore[arg-type]
        assert row.stale is stale
        assert (row.step, row.target_step, row.eta_seconds) == (23, 60, 74.0)
    # ten more steps of half the time of those that follow
    grows = read_supervise_config(run.layout.supervise_config)
    grows = grows.model_copy(update={"ramp": ((33, 0.5),)})
    run.layout.supervise_config.write_text(grows.model_dump_json())
    (row,) = statuses([run], slurm)  # type: ignore[arg-type]
    assert row.eta_seconds == 2 * (10 + 2 * 27)


def test_a_checkpoint_that_was_set_aside_is_not_told(tmp_path: Path) -> None:
    """The trainer has told of it before the supervisor found it damaged."""
    run = fabricate(tmp_path, steps=23)
    for step in (10, 20):
        published(run, step)
    (row,) = statuses([run], FakeSlurm())  # type: ignore[arg-type]
    assert row.checkpoint_step == 20
    newest = run.layout.checkpoints / "iter_0000020"
    newest.rename(newest.with_name("iter_0000020.bad"))
    (row,) = statuses([run], FakeSlurm())  # type: ignore[arg-type]
    assert row.checkpoint_step == 10


def test_status_of_a_run_of_another_version(tmp_path: Path) -> None:
    """A supervise.json that cannot be read (any more) costs some columns, not the table."""
    run = fabricate(tmp_path, steps=3)
    run.layout.supervise_config.write_text("{}")
    (row,) = statuses([run], FakeSlurm())  # type: ignore[arg-type]
    assert (row.step, row.target_step) == (3, 60)
    run.layout.progress.write_text("torn")
    (row,) = statuses([run], FakeSlurm())  # type: ignore[arg-type]
    assert (row.step, row.target_step, row.loss) == (None, None, 2.5)
