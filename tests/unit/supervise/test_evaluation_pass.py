"""Passes over evaluation jobs on a stand-in for Slurm: what is submitted, found again, given up."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import SUBMITTED, fabricate, published
from virtual_clock import VirtualClock

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.records.evaluations import (
    EvaluationJob,
    EvaluationSettings,
    read_evaluations_of,
)
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.supervise_config import SubmitSettings
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import TestOnlyAnswer
from hpctrain.slurm.states import JobState
from hpctrain.supervise.evaluation_jobs import EvaluationPass, EvaluationThread
from hpctrain.supervise.evaluation_result import record


class Limited(FakeSlurm):
    """Jobs named `full` are above a limit of the moment."""

    def __init__(self, full: str) -> None:
        super().__init__()
        self.full, self.refused = full, list[str]()

    def test_only(self, script: Path | str, extra_args: Sequence[str] = ()) -> TestOnlyAnswer:
        if self.full and str(script).endswith(f"evaluation-{self.full}.sbatch"):
            self.refused.append(str(script))
            raise SlurmRefusedError("QOSMaxSubmitJobPerUserLimit")
        return super().test_only(script, extra_args)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    found = fabricate(tmp_path, "gpt-1234", SUBMITTED)
    for step in (4, 8):
        published(found, step)
    layout = found.layout
    jobs = (EvaluationJob(name="score", every_steps=None),)
    layout.evaluation_config.write_text(
        EvaluationSettings(jobs=jobs, last_step=8).model_dump_json()
    )
    (layout.directory / "evaluation-score.sbatch").write_text("#!/bin/sh\n")
    return layout


def passed(
    run: RunLayout, slurm: FakeSlurm | SlurmClient, by: str = "supervisor", silent: float = 0.0
) -> list[str]:
    one = EvaluationPass(run, slurm, by, silent)  # type: ignore[arg-type]
    one.make()
    return one.lines


def states(run: RunLayout) -> dict[int, str]:
    return {one.step: one.state for one in read_evaluations_of(run).values()}


def test_each_checkpoint_is_submitted_once_with_its_arguments(run: RunLayout) -> None:
    slurm = FakeSlurm()
    lines = passed(run, slurm)
    assert len(lines) == 2 and slurm.arguments == {1: ("4", "1", "1"), 2: ("8", "1", "1")}
    assert "--job-name=gpt-1234-score-s4e1a1" in slurm.options[1]
    assert f"--chdir={run.directory}" in slurm.options[1]
    assert passed(run, slurm) == [] and len(slurm.scripts) == 2


def test_a_relative_directory_of_runs_is_resolved_for_slurm(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` has `runs/RUN`, and Slurm would look for the log below the new work directory."""
    monkeypatch.chdir(run.directory.parent)
    slurm = FakeSlurm()
    passed(RunLayout(Path(run.run_id)), slurm, "watch")
    log = run.directory / "logs/evaluation-score-4-a1-%j.out"
    assert {f"--chdir={run.directory}", f"--output={log}"} <= set(slurm.options[1])


def test_an_announcement_without_an_answer_is_looked_up(run: RunLayout) -> None:
    slurm = FakeSlurm()
    passed(run, slurm)
    lines = run.evaluations.read_text().splitlines()
    run.evaluations.write_text("\n".join(line for line in lines if "submitting" in line) + "\n")
    del slurm.records[2]
    passed(run, slurm)
    found = {one.step: one.job_id for one in read_evaluations_of(run).values()}
    assert found[4] == 1, "found by its name"
    assert found[8] == 2 and slurm.arguments[2] == ("8", "1", "1"), "Slurm knew none: once more"


def test_a_job_that_ended_without_a_word_is_lost_and_tried_once_more(run: RunLayout) -> None:
    slurm = FakeSlurm()
    passed(run, slurm)
    slurm.records[1] = replace(slurm.records[1], state=JobState.TIMEOUT)
    passed(run, slurm, silent=1000.0)
    assert states(run) == {4: "submitted", 8: "submitted"}, "its last line may be under way"
    passed(run, slurm)
    lost = read_evaluations_of(run)["score", 4, 1]
    assert lost.state == "failed" and "ended as TIMEOUT, without a result" in lost.reason
    passed(run, slurm)
    assert slurm.arguments[3] == ("4", "1", "2")
    slurm.records[3] = replace(slurm.records[3], state=JobState.NODE_FAIL)
    passed(run, slurm)
    passed(run, slurm)
    assert len(slurm.scripts) == 3, "twice, and no more"


def test_sbatch_refuses_here_and_not_on_a_login_node(
    run: RunLayout, virtual_clock: VirtualClock
) -> None:
    slurm = FakeSlurm()
    slurm.refusal = "Access/permission denied"
    said: list[str] = []
    thread = EvaluationThread(run, slurm, 1.0, said.append)  # type: ignore[arg-type]
    thread._pass()
    thread._pass()
    assert states(run) == {4: "refused"}, "one is enough to know"
    assert sum("hpctrain watch --act" in line for line in said) == 1
    virtual_clock.advance(86400.0)
    thread._pass()
    assert len(run.evaluations.read_text().splitlines()) == 2, "not again in this attempt"
    slurm.refusal = ""
    passed(run, slurm, "watch")
    assert states(run) == {4: "submitted", 8: "submitted"}


@pytest.mark.parametrize("by", ["supervisor", "watch"])
def test_a_refusal_is_of_one_job_and_for_a_while(
    run: RunLayout, virtual_clock: VirtualClock, by: str
) -> None:
    """The limit of one QOS: the other job goes on, and the refused one is tried again later."""
    two = tuple(EvaluationJob(name=name, every_steps=None) for name in ("score", "other"))
    run.evaluation_config.write_text(EvaluationSettings(jobs=two, last_step=8).model_dump_json())
    run.evaluation_script("other").write_text("#!/bin/sh\n")
    slurm, tried = Limited("score"), list[float]()
    for _ in range(200):
        before = len(slurm.refused)
        passed(run, slurm, by, silent=1e9)
        tried += [virtual_clock.passed_seconds] * (len(slurm.refused) - before)
        virtual_clock.advance(30.0)
    assert len([job for job in slurm.records.values() if "-other-" in str(job.name)]) == 2
    assert tried == [0.0, 60.0, 180.0, 420.0, 900.0, 1860.0, 3660.0, 5460.0], "once, ever rarer"
    slurm.full = ""
    for _ in range(60):
        passed(run, slurm, by, silent=1e9)
        virtual_clock.advance(30.0)
    assert {one.state for one in read_evaluations_of(run).values()} == {"submitted"}


def test_nothing_reaches_the_training(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, said = FakeSlurm(), list[str]()
    thread = EvaluationThread(run, slurm, 1.0, said.append)  # type: ignore[arg-type]
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        passed(run, slurm)
    thread._pass()
    thread._pass()
    assert len(said) == 1, "said once"
    slurm.away = False
    monkeypatch.setattr(EvaluationPass, "make", lambda self: 1 / 0)
    thread._pass()
    thread._pass()
    assert len(said) == 2 and "unexpected ZeroDivisionError" in said[1]


def test_a_run_without_evaluation_jobs_has_no_thread(tmp_path: Path) -> None:
    run = fabricate(tmp_path, "gpt-1234", SUBMITTED).layout
    thread = EvaluationThread(run, FakeSlurm(), 1.0)  # type: ignore[arg-type]
    thread.start()
    assert thread._thread is None
    thread.stop(last_pass=True)
    assert not (run.evaluations_lock).exists()


def test_the_job_records_its_own_end(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", "4", "1", "1"]
    assert record(["started", *words], run, 7) == 0
    assert states(run) == {4: "running"}
    assert record(["ended", *words, "0"], run, 7) == 1
    assert "it wrote no {output}: logs/evaluation-score-4-a1-7.out" in capsys.readouterr().err
    (run.directory / "evaluations").mkdir()
    (run.directory / "evaluations/score-4-a2.json").write_text('{"loss": 2}')
    words[3] = "2"
    assert record(["ended", *words, "3"], run, 8) == 1, "an exit code counts more than a file"
    assert read_evaluations_of(run)["score", 4, 1].reason.startswith("exit code 3: logs/")
    (run.directory / "evaluations/score-8-a1.json").write_text('{"loss": 2}')
    assert record(["ended", "score", "8", "1", "1", "0"], run, 9) == 0
    assert read_evaluations_of(run)["score", 8, 1].metrics == {"loss": 2.0}


@pytest.mark.parametrize("when", ["before it starts", "while it runs"])
def test_a_checkpoint_that_was_saved_again_is_not_evaluated_as_the_old_one(
    run: RunLayout, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    passed(run, FakeSlurm())
    words = ["score", "4", "1", "1"]
    if when == "while it runs":
        assert record(["started", *words], run, 1) == 0
    shutil.rmtree(run.checkpoints / "iter_0000004")
    published(RunFiles(run), 4, epoch=2)
    (run.directory / "evaluations").mkdir()
    run.evaluation_output("score", 4, 1).write_text('{"loss": 2}')
    told = ["ended", *words, "0"] if when == "while it runs" else ["started", *words]
    assert record(told, run, 1) == 1
    reason = "launch 2 has saved step 4 again: this job was for launch 1"
    assert reason in capsys.readouterr().err
    old = read_evaluations_of(run)["score", 4, 1]
    assert (old.state, old.reason, old.metrics) == ("failed", reason, None)
    slurm = FakeSlurm()
    passed(run, slurm, silent=1e9)
    assert slurm.arguments == {1: ("4", "2", "1")}, "the new one, and the old one no more"


def test_an_evaluation_is_submitted_by_the_sites_command(run: RunLayout) -> None:
    settings = EvaluationSettings.model_validate_json(run.evaluation_config.read_text())
    words = ("site_sbatch",)
    run.evaluation_config.write_text(
        settings.model_copy(update={"submission": SubmitSettings(words=words)}).model_dump_json()
    )
    slurm = FakeSlurm()
    passed(run, slurm)
    assert slurm.commands == [words, words]
