"""Finding and naming runs, their logs, their history, cancelling, comparing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, said

from hpctrain.actions.bitwise import compare_runs
from hpctrain.actions.cancel import cancel
from hpctrain.actions.describe import describe
from hpctrain.actions.logs import attempt_directories, follow, job_logs, rank_logs
from hpctrain.actions.runs import all_runs, find_run, new_run_id, runs_directory
from hpctrain.actions.status import statuses
from hpctrain.errors import NoSuchRunError, SlurmUnreachableError, UsageError
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState
from hpctrain.store.ledger import EventKind
from hpctrain.store.signs import append_metrics, read_metrics

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
    names = [path.name for path in rank_logs(run, 1)]
    assert names == ["step2-rank0001.log", "step10-rank0001.log", "step0-rank0001.log"]
    assert [path.name for path in rank_logs(run, 1, attempt=2)] == ["step0-rank0001.log"]
    for rank, attempt in ((1, 3), (1, 0), (7, None)):
        with pytest.raises(UsageError):
            rank_logs(run, rank, attempt)


def test_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is appended while we look, then a newer log, then the end: nothing is lost."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("one ")
    newest = [first]

    def rounds() -> Iterator[bool]:
        yield False
        first.write_text("one two ")
        yield False
        first.write_text("one two three ")
        second.write_text("four ")
        newest[0] = second
        yield False
        second.write_text("four five")
        yield True

    states = rounds()
    monkeypatch.setattr("hpctrain.actions.logs.time.sleep", lambda seconds: None)
    assert "".join(follow(lambda: newest[0], lambda: next(states))) == "one two three four five"
    assert "".join(follow(lambda: None, lambda: True)) == ""


# -- cancelling ------------------------------------------------------------------------------


def test_cancel_writes_the_ledger_first(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.submit("#!/bin/sh\n")
    run = fabricate(tmp_path)
    assert cancel(run, slurm).job_id == 1  # type: ignore[arg-type]
    assert slurm.records[1].state is JobState.CANCELLED
    assert slurm.records[1].requeue is False, "a supervisor that requeues now must be refused"
    assert run.ledger.events()[-1].event is EventKind.CANCEL_REQUESTED
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        cancel(run, slurm)  # type: ignore[arg-type]
    kinds = [event.event for event in run.ledger.events()]
    assert kinds.count(EventKind.CANCEL_REQUESTED) == 2, "the wish is kept when Slurm is away"


def test_cancel_of_an_ended_job(tmp_path: Path) -> None:
    """Slurm refuses to update a job that it has forgotten, and scancel is silent about it."""
    assert cancel(fabricate(tmp_path), FakeSlurm()).job_id == 1  # type: ignore[arg-type]


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


# -- status ----------------------------------------------------------------------------------


class Counting(FakeSlurm):
    """Counts the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def jobs(self, ids):  # type: ignore[no-untyped-def]
        self.asked.append(("jobs", tuple(ids)))
        return super().jobs(ids)

    def history(self, ids):  # type: ignore[no-untyped-def]
        self.asked.append(("history", tuple(ids)))
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
    assert slurm.asked == [("jobs", (1, 2)), ("history", (2,))], "done runs need no question"
    assert [row.state.value for row in rows] == ["PENDING", "UNKNOWN", "DONE"]


def test_no_question_without_open_runs(tmp_path: Path) -> None:
    slurm = Counting()
    fabricate(tmp_path, done=True)
    fabricate(tmp_path, "refused", SUBMITTED[:2])
    statuses(all_runs(tmp_path), slurm)  # type: ignore[arg-type]
    assert slurm.asked == []


def test_a_running_job_without_a_sign_of_life_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()
    slurm.submit("")
    slurm.records[1] = replace(slurm.records[1], state=JobState.RUNNING)
    run = fabricate(tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED], steps=23)
    for now, stale in ((1_800_000_000.0, False), (1_800_000_700.0, True)):
        monkeypatch.setattr("hpctrain.actions.status.time.time", lambda now=now: now)
        (row,) = statuses([run], slurm)  # type: ignore[arg-type]
        assert row.stale is stale
        assert (row.step, row.target_step, row.eta_seconds) == (23, 60, 74.0)


def test_status_of_a_run_of_another_version(tmp_path: Path) -> None:
    """A supervise.json that cannot be read (any more) costs some columns, not the table."""
    run = fabricate(tmp_path, steps=3)
    run.layout.supervise_config.write_text("{}")
    (row,) = statuses([run], FakeSlurm())  # type: ignore[arg-type]
    assert (row.step, row.target_step) == (3, 60)
    run.layout.progress.write_text("torn")
    (row,) = statuses([run], FakeSlurm())  # type: ignore[arg-type]
    assert (row.step, row.target_step, row.loss) == (None, None, 2.5)
