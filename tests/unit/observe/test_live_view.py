"""Looks that follow each other: what is asked, what is read again, and what is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, said

from hpctrain.observe.live_view import ChosenRun, GrowingCurve, LiveRuns, LiveView, shown_rows
from hpctrain.records.jobs import run_comment
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import (
    EvaluationMetrics,
    Progress,
    StepMetrics,
    append_metrics,
    write_record,
)
from hpctrain.runs.logs import LogTail
from hpctrain.runs.run_page import loss_curve
from hpctrain.runs.state import RunState
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

BEGUN = (*SUBMITTED, STARTED, LAUNCHED)


class Slurm(FakeSlurm):
    """Counts the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
        self.questions += 1
        return super().jobs_of_users(user_ids)


@pytest.fixture
def slurm() -> Slurm:
    fake = Slurm()
    fake.records[1] = JobRecord(
        1,
        state=JobState.RUNNING,
        name="gpt-tiny-7f3a",
        comment=run_comment("gpt-tiny-7f3a"),
        start_time=time.time(),
        restart_count=0,
    )
    return fake


def states(view: LiveView) -> dict[str, RunState]:
    return {row.status.run_id: row.status.state for row in view.rows}


def test_a_look_without_slurm_keeps_its_last_answer(tmp_path: Path, slurm: Slurm) -> None:
    fabricate(tmp_path, entries=BEGUN, steps=10)
    live = LiveRuns(tmp_path, cast(SlurmClient, slurm))
    assert states(live.look(ask_slurm=False)) == {"gpt-tiny-7f3a": RunState.UNKNOWN}
    first = live.look()
    assert (slurm.questions, first.slurm_silent) == (1, False) and first.slurm_time is not None
    slurm.away = True
    later = live.look()
    assert states(later) == {"gpt-tiny-7f3a": RunState.RUNNING} and later.slurm_silent
    assert later.slurm_time == first.slurm_time, "its age is known"
    assert slurm.questions == 2
    slurm.away = False
    assert not live.look().slurm_silent


def test_runs_that_are_over_are_read_again_only_when_their_ledger_changes(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabricate(tmp_path, entries=BEGUN, steps=10)
    over = fabricate(tmp_path, "over-1111", (*BEGUN, *ended("crash", "boom", "stop")), steps=5)
    fabricate(tmp_path, "done-2222", BEGUN, steps=60, done=True)
    read: list[str] = []
    events = Ledger.events

    def counted(self: Ledger) -> object:
        read.append(self.path.parent.name)
        return events(self)

    monkeypatch.setattr(Ledger, "events", counted)
    live = LiveRuns(tmp_path, cast(SlurmClient, slurm))
    live.look()
    assert {"over-1111", "done-2222"} <= set(read)
    read.clear()
    assert states(live.look())["over-1111"] is RunState.FAILED
    assert set(read) == {"gpt-tiny-7f3a"}
    over.ledger.append(EventKind.SUBMITTING)
    os.utime(over.layout.ledger, (1, 1))
    read.clear()
    live.look()
    assert "over-1111" in read and "done-2222" not in read


def test_a_run_whose_job_still_ends_is_not_over_yet(tmp_path: Path, slurm: Slurm) -> None:
    """Its ledger has the last word already, and Slurm shows the job for another moment."""
    fabricate(tmp_path, entries=(*BEGUN, *ended("yielded", "asked to stop", "stop")), steps=10)
    live = LiveRuns(tmp_path, cast(SlurmClient, slurm))
    assert states(live.look()) == {"gpt-tiny-7f3a": RunState.RUNNING}
    slurm.records[1] = replace(slurm.records[1], state=JobState.COMPLETED, end_time=time.time())
    assert states(live.look()) == {"gpt-tiny-7f3a": RunState.STOPPED}


def test_an_orphan_is_told_and_shown_before_finished_runs(tmp_path: Path, slurm: Slurm) -> None:
    lost_run = fabricate(tmp_path, entries=BEGUN, steps=10)
    now = Progress(epoch=1, phase="training", step=10, target_step=60, time=time.time())
    write_record(lost_run.layout.progress, now)
    for number in (1, 2, 3):
        fabricate(tmp_path, f"done-{number}", BEGUN, steps=60, done=True)
    lost = JobRecord(1, state=JobState.NODE_FAIL, start_time=1.0, end_time=100.0, restart_count=0,
                     name="gpt-tiny-7f3a", comment=run_comment("gpt-tiny-7f3a"))  # fmt: skip
    slurm.records[1] = lost
    live = LiveRuns(tmp_path, cast(SlurmClient, slurm))
    [row] = [row for row in live.look().rows if row.status.run_id == "gpt-tiny-7f3a"]
    assert (row.status.state, row.alerts) == (RunState.FAILED, ()), "its last words may be late"
    long_ago = now.model_copy(update={"time": time.time() - 3600})
    write_record(lost_run.layout.progress, long_ago)
    for _ in range(2):
        view = live.look()
        [alert] = view.rows[0].alerts
        assert (view.rows[0].status.state, alert.name) == (RunState.FAILED, "orphaned")
        assert alert.remedy == "resubmit"
        shown = shown_rows(view.rows, over=False, user=None, words="")
        assert [row.status.run_id for row in shown] == ["gpt-tiny-7f3a", "done-3"]


def test_rows_are_selected_by_user_words_and_whether_they_are_over(
    tmp_path: Path, slurm: Slurm
) -> None:
    fabricate(tmp_path, entries=BEGUN, steps=10)
    fabricate(tmp_path, "prepared-1", (SUBMITTED[0],))
    for number in (1, 2):
        fabricate(tmp_path, f"done-{number}", BEGUN, steps=60, done=True)
    rows = LiveRuns(tmp_path, cast(SlurmClient, slurm)).look().rows

    def names(**chosen: object) -> set[str]:
        given = {"over": False, "user": None, "words": "", **chosen}
        return {row.status.run_id for row in shown_rows(rows, **given)}  # type: ignore[arg-type]

    assert names() == {"gpt-tiny-7f3a", "prepared-1", "done-2"}
    assert names(over=True) == names() | {"done-1"}
    assert names(words="DONE") == {"done-1", "done-2"}
    assert names(words="tiny running") == {"gpt-tiny-7f3a"} and not names(words="tiny done")
    assert not names(user="nobody-else")


def test_a_curve_grows_as_if_it_was_read_whole(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=(said(EventKind.SUBMITTED, job_id=1),), steps=30)
    curve = GrowingCurve(run.layout)
    assert curve.read(400) == loss_curve(run)
    row = StepMetrics.model_validate_json(run.layout.metrics.read_text().splitlines()[0])
    for step in range(21, 41):  # the next launch begins before the end of the last one
        append_metrics(run.layout, row.model_copy(update={"step": step, "epoch": 2, "loss": 1.0}))
    late = EvaluationMetrics(step=40, epoch=2, time=1.0, eval_loss=2.0, eval_accuracy=None)
    append_metrics(run.layout, late)
    grown = curve.read(400)
    assert grown == loss_curve(run) and (len(grown), grown[-1].loss) == (40, 1.0)
    whole = run.layout.metrics.read_bytes()
    line = row.model_copy(update={"step": 41, "epoch": 2}).model_dump_json().encode() + b"\n"
    run.layout.metrics.write_bytes(whole + line[:20])
    assert curve.read(400) == grown, "a torn line"
    run.layout.metrics.write_bytes(whole + line)
    assert curve.read(400)[-1].step == 41
    assert len(curve.read(10)) <= 10
    run.layout.metrics.unlink()
    assert curve.read(400) == ()
    append_metrics(run.layout, row)
    assert [point.step for point in curve.read(400)] == [1], "another file"


def test_the_chosen_run_is_read_on_until_another_one_is(tmp_path: Path) -> None:
    one = fabricate(tmp_path, "one-1111", BEGUN, steps=10)
    two = fabricate(tmp_path, "two-2222", BEGUN, steps=20)
    chosen = ChosenRun()
    for run, steps in ((one, 10), (two, 20), (one, 10)):
        details = chosen.read(run)
        assert (details.run_id, len(details.curve)) == (run.run_id, steps)


def test_a_tail_moves_on_to_the_next_log(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)
    tail = LogTail(run)
    assert tail.read() == ()
    log = run.layout.logs / "slurm-1.out"
    log.write_bytes(b"x" * 70 + b"\n" + b"".join(b"%070d\n" % n for n in range(5000)))
    lines = tail.read()
    assert len(lines) < 2001 and lines[-1].endswith("4999") and len(lines[0]) == 70
    with log.open("ab") as stream:
        stream.write("half \N{SNOWMAN}".encode()[:-1])
    assert tail.read()[-1].startswith("half ")
    with log.open("ab") as stream:
        stream.write("\N{SNOWMAN}".encode()[-1:] + b" line\n")
    assert tail.read()[-1] == "half \N{SNOWMAN} line"
    (run.layout.logs / "slurm-2.out").write_text("the next job\n")
    assert tail.read() == ("the next job",)
