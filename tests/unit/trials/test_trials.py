"""Trials on a stand-in for Slurm: submitted once, gone on with, refused, read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from trained_trials import SPEC, train
from virtual_clock import VirtualClock

from hpctrain.base.errors import InvalidInputError, NoSuchRunError, SlurmUnreachableError
from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import RankTimes, write_record
from hpctrain.records.sweeps import ComparisonLayout
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState
from hpctrain.spec.loader import load_run_spec
from hpctrain.trials import run_trials as trials
from hpctrain.trials.compare import (
    compare,
    engines_request,
    open_comparison,
)
from hpctrain.trials.documents import Comparison
from hpctrain.trials.run_trials import TrialRunner, start
from hpctrain.trials.trial_plans import Subject, TrialRequest, subject_of

ENGINES = "ddp,fsdp"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return subject_of(Path("tiny.yaml"), "sandbox")


@pytest.fixture(autouse=True)
def impatient(virtual_clock: VirtualClock) -> None:
    """Nobody sleeps; a test that would wait for ever fails."""


def asked(subject: Subject, *variants: str, engines: str = ENGINES) -> TrialRequest:
    return engines_request(subject, engines, variants, 6)


def begun(subject: Subject, *variants: str, engines: str = ENGINES) -> ComparisonLayout:
    return start(subject, asked(subject, *variants, engines=engines), Path("runs"))


def submitted(layout: ComparisonLayout, slurm: FakeSlurm, **run_options: object) -> Comparison:
    wanted = {"wait": False, **run_options}
    return TrialRunner(layout, slurm, **wanted).run()  # type: ignore[arg-type]


def run_of(found: Comparison, name: str) -> RunLayout:
    run_id = next(trial.record.run_id for trial in found.trials if trial.name == name)
    return RunLayout(Path("runs").absolute() / str(run_id))


def test_everything_is_on_disk_before_anything_is_submitted(subject: Subject) -> None:
    layout = begun(subject, "huge: model.hidden=65536")
    record = trials.read_record_of(layout.directory)
    assert [one.run_id is None for one in record.trials] == [False, False, True]
    assert "no layout fits" in str(record.trials[2].refusal)
    for one in record.trials[:2]:
        run = RunLayout(layout.runs / str(one.run_id))
        assert run.script.exists() and one.train_steps == 3600 and one.predicted is not None
        config = parse_train_config(run.train_config.read_text())
        assert config.train_steps == 6 and config.lr_decay_steps == 3600
        # the last window of two ends, and is told, before the run does
        assert 1 + 2 * config.rank_times_interval_steps < 6
    assert list(layout.runs.glob("*/ledger.jsonl")), "the trials are runs"
    assert not (layout.directory / "ledger.jsonl").exists(), "the comparison is none"


def test_traces_of_the_spec_are_left_out(subject: Subject) -> None:
    traced = subject_of(Path("tiny.yaml"), "sandbox", ["profile.steps=[30]"])
    layout = start(traced, asked(traced, "traced: profile.steps=[3]"), Path("runs"))
    record = trials.read_record_of(layout.directory)
    specs = [layout.runs / str(one.run_id) / "spec.yaml" for one in record.trials]
    profiles = [load_run_spec(spec).document.profile for spec in specs]
    assert [one and one.steps for one in profiles] == [None, None, (3,)]


def test_a_second_call_submits_nothing_twice(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject)
    first = submitted(layout, slurm)
    assert len(slurm.scripts) == 2 and not first.over
    again = submitted(layout, slurm)
    assert len(slurm.scripts) == 2 and [t.state for t in again.trials] == ["PENDING", "PENDING"]


def test_few_at_a_time(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject, engines="ddp,fsdp,ddp+recompute")
    found = submitted(layout, slurm, at_a_time=2)
    assert len(slurm.scripts) == 2
    assert not found.trials[2].over, "it has still to be submitted"
    train(run_of(found, "ddp"), 1.0)
    slurm.records[1] = replace(slurm.records[1], state=JobState.COMPLETED)
    submitted(layout, slurm, at_a_time=2)
    assert len(slurm.scripts) == 3


def test_a_crash_between_sbatch_and_the_ledger_is_healed(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject, engines="ddp")
    run = run_of(open_comparison(layout.directory, slurm), "ddp")  # type: ignore[arg-type]
    Ledger(run.ledger).append(EventKind.SUBMITTING)
    slurm.submit(run.script)
    slurm.records[1] = replace(slurm.records[1], name=run.run_id)
    found = submitted(layout, slurm)
    assert len(slurm.scripts) == 1, "the job that Slurm has is taken over"
    assert found.trials[0].state == "PENDING"


def test_one_process_submits_and_another_watches(subject: Subject) -> None:
    slurm, layout, lines = FakeSlurm(), begun(subject), list[str]()
    lock = layout.try_lock()
    assert lock is not None and layout.try_lock() is None
    submitted(layout, slurm, report=lines.append)
    assert not slurm.scripts and "another process" in lines[0]
    os.close(lock)
    submitted(layout, slurm)
    assert len(slurm.scripts) == 2


def test_a_refusal_of_slurm_is_a_row_and_its_absence_an_error(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject)
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        submitted(layout, slurm)
    slurm.away, slurm.refusal = False, "Invalid account"
    found = submitted(layout, slurm, wait=True)
    assert found.over and {trial.state for trial in found.trials} == {"NOT SUBMITTED"}
    assert "Invalid account" in found.trials[0].reason
    slurm.refusal = ""
    submitted(layout, slurm)
    assert len(slurm.scripts) == 2, "the next call asks again"


def test_results_are_read_from_the_runs(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject, engines="ddp,fsdp,ddp+recompute")
    found = submitted(layout, slurm)
    train(run_of(found, "ddp"), 1.0)
    train(run_of(found, "fsdp"), 2.0, loss=5.001)
    ranks = RankTimes(
        epoch=1, first_step=2, last_step=5, time=0, compute_seconds=(0.4, 0.6), nodes=("a", "b")
    )
    write_record(run_of(found, "ddp").rank_times, ranks)
    broken = Ledger(run_of(found, "ddp+recompute").ledger)
    broken.append(EventKind.LAUNCH_STARTED, epoch=1)
    broken.append(EventKind.LAUNCH_ENDED, epoch=1, cause="gpu_oom")
    broken.append(EventKind.ACTION, action="stop", exit_code=1, reason="out of memory")
    slurm.records[3] = replace(slurm.records[3], state=JobState.FAILED)
    over = submitted(layout, slurm, wait=True)
    ddp, fsdp, oom = over.trials
    assert [trial.state for trial in over.trials] == ["DONE", "DONE", "FAILED"]
    assert ddp.samples_per_second == 8.0 and ddp.gpu_hours == 3600 * 1.0 * 2 / 3600
    assert ddp.measured and ddp.measured.shares and ddp.measured.shares.imbalance > 0
    assert fsdp.agreement and fsdp.agreement.verdict == "other start" and fsdp.agreement.steps == 6
    assert oom.reason == "out of memory" and oom.stability
    assert oom.stability.failures == ("gpu_oom",) and oom.measured is None
    assert over.recommendation.choice == "ddp"
    for name in ("ddp", "fsdp"):
        assert not list(run_of(found, name).checkpoints.iterdir()), "nobody resumes a trial"


def test_checkpoints_are_kept_on_request(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject, engines="ddp")
    found = submitted(layout, slurm)
    train(run_of(found, "ddp"), 1.0)
    submitted(layout, slurm, wait=True, keep_checkpoints=True)
    assert list(run_of(found, "ddp").checkpoints.iterdir())


def test_a_job_that_everybody_has_forgotten_is_not_waited_for(
    subject: Subject, virtual_clock: VirtualClock
) -> None:
    slurm, layout = FakeSlurm(), begun(subject, engines="ddp")
    submitted(layout, slurm)
    del slurm.records[1]
    found = submitted(layout, slurm, wait=True)
    assert found.trials[0].state == "UNKNOWN" and not found.over
    assert 0 < virtual_clock.passed_seconds - trials._FORGOTTEN_SECONDS < 120


def test_other_batches_are_another_run(subject: Subject) -> None:
    slurm, layout = FakeSlurm(), begun(subject, "large: batch.global=16", engines="ddp")
    found = submitted(layout, slurm)
    train(run_of(found, "ddp"), 1.0)
    train(run_of(found, "large"), 1.0, loss=4.0)
    told = submitted(layout, slurm).trials[1].agreement
    assert told is not None and told.verdict == "other run"


def test_a_prediction_leaves_no_file(subject: Subject) -> None:
    found = compare("tiny.yaml", "a100x1", engines=ENGINES, predicted=True)
    assert not Path("runs").exists() and found.over
    assert all(trial.step_seconds and trial.gpu_hours for trial in found.trials)


def test_a_variant_is_predicted_for_the_partition_that_it_names(subject: Subject) -> None:
    """Partitions may have GPUs of their own."""
    Path("two.yaml").write_text(
        "extends: a100x1\nname: two\nslurm:\n  partitions:\n"
        "    - {name: spot, default: true}\n"
        "    - {name: new, gpu: {type: h100, per_node: 8, memory: 81559MiB}}\n"
    )
    spec = EXAMPLES / "gpt1300m.yaml"
    found = compare(
        spec, "two.yaml", variants=["old: seed=1", "new: resources.partition=new"], predicted=True
    )
    old, new = (trial.step_seconds for trial in found.trials)
    assert old and new and new < old


def test_mistakes_of_the_spec_itself_end_it(subject: Subject) -> None:
    with pytest.raises(InvalidInputError, match="hiden"):
        compare("tiny.yaml", "sandbox", engines=ENGINES, overrides=["model.hiden=1"])
    with pytest.raises(NoSuchRunError):
        open_comparison("nowhere", FakeSlurm())  # type: ignore[arg-type]
