"""Where results of evaluation jobs are shown, and what `watch` does about those that wait."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain
from fabricated_runs import SUBMITTED, fabricate, published

from hpctrain.records.evaluations import (
    EvaluationEvent,
    EvaluationJob,
    EvaluationSettings,
    append_event,
)
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import Progress, write_record
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    return fake


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    monkeypatch.chdir(tmp_path)
    found = fabricate(tmp_path / "runs", "gpt-1234", SUBMITTED, steps=12, done=True)
    for step in (4, 8, 12):
        published(found, step)
    jobs = (EvaluationJob(name="arc", every_steps=None),)
    settings = EvaluationSettings(jobs=jobs, last_step=12)
    found.layout.evaluation_config.write_text(settings.model_dump_json())
    (found.layout.directory / "evaluation-arc.sbatch").write_text("#!/bin/sh\n")
    note(found.layout, "ended", 4, metrics={"accuracy": 0.25, "loss": 3.5})
    note(found.layout, "ended", 8, attempt=2, job_id=9, reason="exit code 3: logs/x")
    (found.layout.logs / "evaluation-arc-8-a2-9.out").write_text("boom\n")
    return found.layout


def note(run: RunLayout, kind: str, step: int, **more: object) -> None:
    fields = {"kind": kind, "name": "arc", "step": step, "epoch": 1, "attempt": 1}
    common = {"time": time.time(), "by": "job"}
    append_event(run, EvaluationEvent.model_validate({**fields, **common, **more}))


@pytest.mark.parametrize("command", ["status", "describe", "checkpoints"])
def test_results_and_failures_with_their_logs(
    slurm: FakeSlurm, run: RunLayout, command: str
) -> None:
    shown = hpctrain(command, "gpt-1234").stdout
    assert "accuracy 0.25, loss 3.5" in shown
    assert "arc of step 8, attempt 2: exit code 3" in shown
    assert "evaluation-arc-8-a2-9.out" in shown
    assert "waiting" in shown
    others = ("runs/", "newest")  # paths, and the column KEPT, which a terminal wraps
    lines = [line for line in shown.splitlines() if not any(word in line for word in others)]
    tables = [line for line in lines if "arc" in line]
    assert max(map(len, tables)) <= 80
    if command != "status":
        document = json.loads(hpctrain(command, "gpt-1234", "--json").stdout)
        rows = next(iter(v for k, v in document.items() if k != "schema_version"))["evaluations"]
        assert [(row["step"], row["state"]) for row in rows] == [
            (4, "done"),
            (8, "failed"),
            (12, "waiting"),
        ]


def test_checkpoints_say_what_keeps_them(slurm: FakeSlurm, run: RunLayout) -> None:
    rows = json.loads(hpctrain("checkpoints", "gpt-1234", "--json").stdout)["checkpoints"]["rows"]
    assert "evaluation arc waiting" in rows[0]["kept_because"]
    assert not any("evaluation" in why for row in rows[1:] for why in row["kept_because"])


def test_watch_submits_what_waits_once(slurm: FakeSlurm, run: RunLayout) -> None:
    seen = hpctrain("watch")
    assert "gpt-1234  evaluation arc of step 12: would submit" in seen.stdout
    assert not slurm.scripts
    done = hpctrain("watch", "--act")
    assert "gpt-1234  evaluation arc of step 12: job 1" in done.stdout
    assert slurm.arguments == {1: ("12", "1", "1")}
    assert not hpctrain("watch", "--act").stdout and len(slurm.scripts) == 1


def test_watch_leaves_a_living_supervisor_to_it(slurm: FakeSlurm, run: RunLayout) -> None:
    run.done.unlink()
    progress = Progress(epoch=1, phase="training", step=12, target_step=20, time=time.time())
    write_record(run.progress, progress)
    slurm.submit("#!/bin/sh\n#SBATCH --job-name=gpt-1234\n", [f"--chdir={run.directory}"])
    assert "evaluation" not in hpctrain("watch", "--act").stdout
    note(run, "refused", 12, by="supervisor", reason="not from a compute node")
    assert "evaluation arc of step 12: job 2" in hpctrain("watch", "--act").stdout


def test_watch_without_slurm_says_so(slurm: FakeSlurm, run: RunLayout) -> None:
    hpctrain("watch", "--act")
    slurm.away = True
    assert hpctrain("watch", "--act").exit_code == 5


def test_watch_of_another_cluster_leaves_evaluations_alone(
    slurm: FakeSlurm, run: RunLayout
) -> None:
    """Two clusters share the directory of runs; the jobs of one are unknown to the other."""
    RunFiles(run).ledger.append(EventKind.SUBMITTED, job_id=7, cluster="fake")
    elsewhere = {**slurm.settings, "ClusterName": "elsewhere"}
    here, slurm.settings = slurm.settings, elsewhere
    assert "evaluation" not in hpctrain("watch").stdout
    assert "evaluation" not in hpctrain("watch", "--act").stdout and not slurm.scripts
    slurm.settings = here
    assert "evaluation arc of step 12: job 1" in hpctrain("watch", "--act").stdout
    before, record = run.evaluations.read_text(), slurm.records.pop(1)
    assert '"cluster":"fake"' in before
    slurm.settings = elsewhere
    for _ in range(2):
        assert "evaluation" not in hpctrain("watch", "--act").stdout
    assert run.evaluations.read_text() == before and len(slurm.scripts) == 1

    RunFiles(run).ledger.append(EventKind.SUBMITTED, job_id=8, cluster="elsewhere")
    assert "evaluation" not in hpctrain("watch", "--act").stdout, "the run has moved, its job not"
    slurm.settings, slurm.records[1] = here, replace(record, state=JobState.TIMEOUT)
    run.evaluations.write_text(re.sub(r'"time":\d+', '"time":1', before))
    hpctrain("watch", "--act")
    assert '"kind":"lost"' in run.evaluations.read_text(), "whoever has the job sees its end"
    assert slurm.arguments == {1: ("12", "1", "1")}, "the second try: on the cluster of the run"
    slurm.settings, slurm.records = elsewhere, {}
    hpctrain("watch", "--act")
    assert slurm.arguments[1] == ("12", "1", "2")


def test_lines_without_a_cluster_are_those_of_the_run(slurm: FakeSlurm, run: RunLayout) -> None:
    RunFiles(run).ledger.append(EventKind.SUBMITTED, job_id=7, cluster="elsewhere")
    note(run, "submitting", 12, by="watch", time=1.0)
    note(run, "submitted", 12, by="watch", job_id=3, time=1.0)
    before = run.evaluations.read_text()
    hpctrain("watch", "--act")
    assert run.evaluations.read_text() == before
    slurm.settings = {**slurm.settings, "ClusterName": "elsewhere"}
    hpctrain("watch", "--act")
    assert '"kind":"lost"' in run.evaluations.read_text()
