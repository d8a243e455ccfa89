"""Sweeps on a stand-in for Slurm: checked, submitted once, continued, read, cancelled."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import hpctrain as command
from command_line import on_terminal
from step_rows import trained_step
from trained_trials import SPEC
from virtual_clock import VirtualClock

import hpctrain
from hpctrain.base.errors import (
    InvalidInputError,
    NoSuchRunError,
    RefusedPlanError,
    SlurmRefusedError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.records.evaluations import (
    EvaluationEvent,
    EvaluationJob,
    EvaluationSettings,
    append_event,
)
from hpctrain.records.find import all_runs
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind, Ledger
from hpctrain.records.run_records import append_metrics
from hpctrain.records.sweeps import SweepLayout, all_sweeps, find_sweep
from hpctrain.runs.goodput import goodput
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import SubmittedJob
from hpctrain.slurm.states import JobState
from hpctrain.trials import sweep_plans
from hpctrain.trials.sweep import Sweep, cancel_sweep, submit_sweep
from hpctrain.trials.sweep_plans import SweepPlan, SweepRequest, plan_sweep
from hpctrain.trials.sweep_table import runs_of_sweep, sweep_table

GRID = ("optimizer.lr=1e-4,3e-4", "seed=1,2")
RUNS = Path("runs")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPEC + "data: {made_up: true}\n")
    return tmp_path


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    return fake


def planned(*grid: str, **more: object) -> SweepPlan:
    request = SweepRequest(Path("tiny.yaml"), "sandbox", grid or GRID, **more)  # type: ignore[arg-type]
    return plan_sweep(request, RUNS)


def submitted(plan: SweepPlan, slurm: FakeSlurm, at_a_time: int | None = None) -> SweepLayout:
    return submit_sweep(plan, slurm, at_a_time).layout  # type: ignore[arg-type]


def dependencies(slurm: FakeSlurm) -> list[str]:
    return [
        next((o.partition("=")[2] for o in options if o.startswith("--dependency")), "")
        for options in slurm.options.values()
    ]


def test_each_point_is_a_run_with_its_values(slurm: FakeSlurm) -> None:
    layout = submitted(planned(), slurm)
    runs = all_runs(RUNS)
    assert {run.run_id.rpartition("-")[0] for run in runs} == {
        f"tiny-lr{lr}-seed{seed}" for lr in ("1e-4", "3e-4") for seed in (1, 2)
    }
    specs = [run.layout.spec.read_text() for run in runs]
    assert all("lr: 0.0001" in text or "lr: 0.0003" in text for text in specs)
    assert len(slurm.scripts) == 4 and dependencies(slurm) == [""] * 4
    assert all(run.layout.data_identity.exists() for run in runs)
    assert not (layout.directory / "ledger.jsonl").exists(), "the sweep itself is no run"
    assert (layout.directory.stat().st_mode & 0o777) == 0o700


def test_at_a_time_makes_lanes_of_jobs_that_wait(slurm: FakeSlurm) -> None:
    submitted(planned("seed=1,2,3,4,5", at_a_time=2), slurm, 2)
    assert dependencies(slurm) == ["", "", "afterany:1", "afterany:2", "afterany:3"]


def test_a_run_of_several_jobs_is_waited_for_to_its_last(slurm: FakeSlurm, here: Path) -> None:
    sandbox = (Path(__file__).parents[3] / "cluster_profiles/sandbox.yaml").read_text()
    (here / "single.yaml").write_text(sandbox + "continuation: singleton\ncontinuation_jobs: 3\n")
    request = SweepRequest(Path("tiny.yaml"), "single.yaml", ("seed=1,2",), at_a_time=1)
    submitted(plan_sweep(request, RUNS), slurm, 1)
    assert dependencies(slurm) == ["", "", "", "afterany:1:2:3", "", ""]
    (here / "chain.yaml").write_text(sandbox + "continuation: chain\n")
    chain = replace(request, profile="chain.yaml")
    with pytest.raises(UsageError, match="Slurm knows no job whose end is the end of the run"):
        plan_sweep(chain, RUNS)
    assert len(plan_sweep(replace(chain, at_a_time=None), RUNS).new) == 2


def test_all_problems_of_all_points_at_once_and_nothing_is_written(slurm: FakeSlurm) -> None:
    with pytest.raises(InvalidInputError) as caught:
        planned("optimizer.lr=1e-4,hot", "batch.global=8,7", "engine.name=ddp,none")
    text = str(caught.value)
    assert "--grid optimizer.lr=hot: `optimizer.lr`: expected a number" in text
    assert "--grid engine.name=none" in text
    assert "[optimizer.lr=1e-4 batch.global=7 engine.name=ddp]" in text
    assert text.count("optimizer.lr=hot:") == 1, "each problem once"
    with pytest.raises(InvalidInputError, match=r"--grid optimizer\.lrr=1: `optimizer\.lrr`: un"):
        planned("optimizer.lrr=1,2")
    assert not RUNS.exists()


def test_points_that_cannot_run_are_left_out_only_on_request(slurm: FakeSlurm) -> None:
    with pytest.raises(RefusedPlanError) as caught:
        planned("batch.global=8,7", "seed=1,2")
    assert "[batch.global=7 seed=1; batch.global=7 seed=2]" in str(caught.value)
    assert "`--skip-refused` submits the other 2 of 4 points" in str(caught.value.hint)
    layout = submitted(planned("batch.global=8,7", "seed=1,2", skip_refused=True), slurm)
    assert len(slurm.scripts) == 2
    rows = sweep_table(layout, slurm).rows  # type: ignore[arg-type]
    assert [row.state for row in rows].count("REFUSED") == 2
    assert "global batch 7" in next(row.reason for row in rows if row.state == "REFUSED")
    again = planned("batch.global=8,7", "seed=1,2")
    assert not again.new and len(again.refused) == 2, "as it was begun"
    with pytest.raises(RefusedPlanError, match="global batch 7"):
        planned("batch.global=7,9", skip_refused=True)


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ("optimizer.lr=1e-4,0.0001", "optimizer.lr=1e-4 and optimizer.lr=0.0001 are the same"),
        ("optimizer.lr=1e-4,3e-4,1.0e-4", "optimizer.lr=1e-4 and optimizer.lr=1.0e-4 are the same"),
    ],
)
def test_equal_points_are_refused_however_they_are_written(grid: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"--grid: {words}"):
        planned(grid, skip_refused=True)


class Dying(FakeSlurm):
    """Dies at a submission: before sbatch, or after it, before anybody has read its answer."""

    def __init__(self, at: int, *, accepted: bool) -> None:
        super().__init__()
        self.dies_at, self.accepted, self.calls = at, accepted, 0

    def submit(
        self,
        script: Path | str,
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        self.calls += 1
        if self.calls == self.dies_at and not self.accepted:
            raise KeyboardInterrupt
        job = super().submit(script, extra_args, variables=variables)
        if self.calls == self.dies_at:
            raise KeyboardInterrupt
        return job


@pytest.mark.parametrize("accepted", [False, True])
def test_a_crash_between_two_submissions_submits_no_point_twice(accepted: bool) -> None:
    slurm = Dying(2, accepted=accepted)
    with pytest.raises(KeyboardInterrupt):
        submitted(planned(at_a_time=2), slurm, 2)
    assert len(slurm.scripts) == (2 if accepted else 1)
    again = planned()
    assert not again.new, "all run directories were there before the first sbatch"
    layout = submitted(again, slurm)
    assert len(slurm.scripts) == 4 and len(set(slurm.scripts.values())) == 4
    assert dependencies(slurm) == ["", "", "afterany:1", "afterany:2"], "as it was requested"
    assert submit_sweep(planned(), slurm).new == 0  # type: ignore[arg-type]
    assert {row.state for row in sweep_table(layout, slurm).rows} == {"PENDING"}  # type: ignore[arg-type]


def test_a_crash_within_a_run_directory_is_healed(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain.trials import sweep as module

    made: list[str] = []
    real = module.write_run_directory

    def dies(prepared: object, runs: Path) -> RunLayout:
        if len(made) == 1:
            (runs / prepared.run_id).mkdir()  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        made.append("")
        return real(prepared, runs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_run_directory", dies)
    with pytest.raises(KeyboardInterrupt):
        submitted(planned(), slurm)
    monkeypatch.setattr(module, "write_run_directory", real)
    ids = [point.run_id for point in all_sweeps(RUNS)[0].read().points]
    layout = submitted(planned(), slurm)
    assert [point.run_id for point in layout.read().points] == ids
    assert len(slurm.scripts) == 4 and {run.run_id for run in all_runs(RUNS)} == set(ids)


def test_what_an_interrupted_submission_has_written_is_written_anew(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain.job import run_directory as module

    def dies(layout: RunLayout) -> str:
        real(layout)
        (layout.directory / ".data.json.node.7.7.tmp").touch()
        raise KeyboardInterrupt

    real = module.keep_code
    monkeypatch.setattr(module, "keep_code", dies)
    with pytest.raises(KeyboardInterrupt):
        submitted(planned(), slurm)
    monkeypatch.setattr(module, "keep_code", real)
    submitted(planned(), slurm)
    assert len(slurm.scripts) == 4 and not list(RUNS.rglob("*.tmp"))


def forget_submissions(layout: SweepLayout) -> None:
    """As older versions have written the record."""
    record = json.loads(layout.record.read_text())
    for point in record["points"]:
        del point["submitted"]
    layout.record.write_text(json.dumps(record))


def test_a_point_that_was_removed_is_left_alone(slurm: FakeSlurm) -> None:
    layout = submitted(planned(at_a_time=1), slurm, 1)
    forget_submissions(layout)
    assert submit_sweep(planned(), slurm).new == 0  # type: ignore[arg-type]
    gone = RUNS / str(layout.read().points[1].run_id)
    slurm.records[2] = replace(slurm.records[2], state=JobState.COMPLETED)
    (gone / "ledger.jsonl").rename(gone / "moved")
    with pytest.raises(UsageError, match=r"has no ledger\.jsonl, and its run has had a job"):
        planned()
    shutil.rmtree(gone)
    again = planned()
    assert not again.new and [one.removed for one in again.points] == [False, True, False, False]
    done = submit_sweep(again, slurm)  # type: ignore[arg-type]
    assert (done.new, done.submitted) == (0, 3) and len(slurm.scripts) == 4 and not gone.exists()
    rows = {row.run_id: row.state for row in sweep_table(layout, slurm).rows}  # type: ignore[arg-type]
    assert rows[gone.name] == "REMOVED"
    assert "1 removed" in command("sweep", "status").stdout
    dry = command("sweep", "tiny.yaml", "-p", "sandbox", "--grid", GRID[0], "--grid", GRID[1], "-y")
    assert f"{gone.name}  removed" in dry.stderr and "0 of 3 runs submitted now" in dry.stderr


@pytest.mark.parametrize(
    "left", ["checkpoints/iter_0000012/rank-0.pt", "metrics.jsonl", "logs/slurm-1.out", "notes.txt"]
)
def test_a_run_without_its_ledger_is_not_removed(left: str, slurm: FakeSlurm, here: Path) -> None:
    layout = submitted(planned(), slurm)
    run = RUNS / str(layout.read().points[1].run_id)
    forget_submissions(layout)
    (run / "data.json").unlink()
    (run / "ledger.jsonl").rename(here / "ledger.jsonl")
    (run / left).parent.mkdir(exist_ok=True)
    (run / left).touch()
    with pytest.raises(UsageError, match=f"{run.name} has no ledger.jsonl") as caught:
        submitted(planned(), slurm)
    assert "nothing was removed" in str(caught.value) and (run / left).exists()
    assert caught.value.hint == "put ledger.jsonl back, or move the directory away"
    assert len(slurm.scripts) == 4, "and nothing is submitted"
    (here / "ledger.jsonl").rename(run / "ledger.jsonl")
    assert submit_sweep(planned(), slurm).new == 0  # type: ignore[arg-type]


def test_a_run_id_that_another_submission_takes_is_left_to_it(slurm: FakeSlurm) -> None:
    plan = planned("seed=1,2")
    taken = plan.new[0].run_id
    (RUNS / str(taken)).mkdir(parents=True)
    layout = submitted(plan, slurm)
    ids = [point.run_id for point in layout.read().points]
    assert taken not in ids and len(slurm.scripts) == 2
    assert not list((RUNS / str(taken)).iterdir())


def test_sbatch_refuses_one_and_the_same_command_continues(slurm: FakeSlurm) -> None:
    plan = planned(at_a_time=1)
    slurm.refusal = "QOSMaxSubmitJobPerUserLimit"
    with pytest.raises(SlurmRefusedError, match=r"0 of 4 runs are submitted, `tiny-lr1e-4-seed1-"):
        submitted(plan, slurm, 1)
    slurm.refusal = ""
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        submitted(planned(), slurm)
    slurm.away = False
    submitted(planned(), slurm)
    assert len(slurm.scripts) == 4
    assert dependencies(slurm) == ["", "afterany:1", "afterany:2", "afterany:3"]


def test_a_lane_continues_behind_the_last_live_run(slurm: FakeSlurm) -> None:
    layout = submitted(planned("seed=1,2,3", at_a_time=1), slurm, 1)
    runs = [RUNS / str(point.run_id) for point in layout.read().points]
    for run in runs[1:]:  # as if the client had died before them
        lines = (run / "ledger.jsonl").read_text().splitlines()
        (run / "ledger.jsonl").write_text(lines[0] + "\n")
    del slurm.records[2], slurm.records[3]
    slurm.records[1] = replace(slurm.records[1], state=JobState.COMPLETED)
    slurm.options.clear()
    submitted(planned("seed=1,2,3"), slurm)
    assert dependencies(slurm) == ["", "afterany:2"], "the first is over, nobody waits for it"


def test_the_name_of_a_sweep_is_that_of_its_request(slurm: FakeSlurm, here: Path) -> None:
    assert (
        planned().record.sweep_id
        == planned().record.sweep_id
        != planned("seed=1,2").record.sweep_id
    )
    submitted(planned(name="lr"), slurm)
    with pytest.raises(UsageError, match="is there already, of another spec, profile or grid"):
        planned("seed=1,2", name="lr")
    (RUNS / "something").mkdir()
    with pytest.raises(UsageError, match="exists already and is no sweep"):
        planned(name="something")
    for wrong in ("a/b", ".hidden"):
        with pytest.raises(UsageError, match="is named like a directory"):
            planned(name=wrong)
    with pytest.raises(UsageError, match="can be read only once"):
        plan_sweep(SweepRequest(Path("-"), "sandbox", GRID), RUNS)


def test_two_processes_do_not_submit_one_sweep(slurm: FakeSlurm) -> None:
    layout = submitted(planned(), slurm)
    lock = layout.try_lock()
    assert lock is not None
    with pytest.raises(UsageError, match="another process submits"):
        submitted(planned(), slurm)


# The budget -------------------------------------------------------------------------------------


def test_the_sum_of_the_forecasts_and_the_nearest_smaller_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hours = {"lr1e-4": 1.0, "lr3e-4": 3.0}
    monkeypatch.setattr(
        sweep_plans, "run_facts", lambda job: SimpleNamespace(model_dump_json=lambda: job.spec.name)
    )
    monkeypatch.setattr(
        sweep_plans,
        "forecast_run",
        lambda job, facts: SimpleNamespace(
            gpu_hours=hours[job.spec.name.split("-seed")[0].removeprefix("tiny-")]
        ),
    )
    assert planned().gpu_hours == 8.0
    assert planned(most_gpu_hours=8.0).gpu_hours == 8.0
    with pytest.raises(RefusedPlanError) as caught:
        planned(most_gpu_hours=7.0)
    assert "4 runs are forecast to take 8 GPU-hours" in str(caught.value)
    assert caught.value.hint == "--grid optimizer.lr=3e-4 --grid seed=1,2 takes 6 GPU-hours"
    with pytest.raises(RefusedPlanError) as caught:
        planned(most_gpu_hours=0.5)
    assert "not even one run is within it: the smallest takes 1 GPU-hours" in str(caught.value.hint)


def test_a_budget_needs_a_forecast() -> None:
    with pytest.raises(UsageError, match="needs a predicted step time"):
        planned(most_gpu_hours=1.0)


def test_points_that_differ_in_numbers_only_share_a_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    real = sweep_plans.forecast_run
    monkeypatch.setattr(
        sweep_plans, "forecast_run", lambda *args: calls.append(args) or real(*args)
    )
    grid = ("optimizer.lr=1e-4,3e-4", "budget.steps=100000,200000")
    more = ("resources.gpus=64", "batch.global=128", "resources.walltime=12:00:00")
    request = SweepRequest(Path("tiny.yaml"), "a100x64", grid, more)
    plan = plan_sweep(request, RUNS)
    assert len(calls) == 2, "one for each number of steps"
    first, second, third, _ = (one.gpu_hours for one in plan.points)
    assert first == third and first and second and second > 1.5 * first


# The table --------------------------------------------------------------------------------------


def trained(
    run: Path, losses: Sequence[float], evaluations: dict[int, float] | None = None
) -> None:
    for step, loss in enumerate(losses, 1):
        evaluated = (evaluations or {}).get(step)
        append_metrics(RunLayout(run), trained_step(step, loss, eval_loss=evaluated))


def test_the_table_is_sorted_by_the_best_evaluation(slurm: FakeSlurm) -> None:
    layout = submitted(planned(at_a_time=2), slurm, 2)
    runs = [RUNS / str(point.run_id) for point in layout.read().points]
    trained(runs[0], [3.0, 2.0, 1.0])
    trained(runs[1], [3.0, 2.5])
    table = sweep_table(layout, slurm)  # type: ignore[arg-type]
    assert [row.run_id for row in table.rows][:2] == [runs[0].name, runs[1].name]
    assert table.sorted_by == "training loss" and table.rows[0].loss == 1.0
    trained(runs[3], [3.0, 2.9, 2.8], {2: 2.0, 3: 2.2})
    table = sweep_table(layout, slurm)  # type: ignore[arg-type]
    assert (table.rows[0].run_id, table.rows[0].eval_loss, table.rows[0].eval_step) == (
        runs[3].name,
        2.0,
        2,
    )
    assert table.sorted_by == "evaluation loss"
    assert [row.values for row in table.rows][:2] == [("3e-4", "2"), ("1e-4", "1")]


def test_what_was_used_is_what_the_account_of_the_run_says(slurm: FakeSlurm) -> None:
    layout = submitted(planned(), slurm)
    run = next(iter(runs_of_sweep(layout, layout.read()).values()))
    since = run.ledger.events()[-1].time
    for after_seconds, kind, more in (
        (10, EventKind.ATTEMPT_STARTED, {"job_id": 1, "restart_count": 0}),
        (30, EventKind.ACTION, {"job_id": 1, "restart_count": 0, "action": "requeue"}),
        (100, EventKind.ATTEMPT_STARTED, {"job_id": 1, "restart_count": 1}),
        (110, EventKind.LAUNCH_STARTED, {"job_id": 1, "restart_count": 1, "epoch": 1}),
        (900, EventKind.ATTEMPT_LOST, {"job_id": 1, "restart_count": 1}),
    ):
        fields = {"event": kind, "time": since + after_seconds, **more}
        run.ledger.write(Event.model_validate(fields))
    spent = goodput(run)
    table = sweep_table(layout, slurm)  # type: ignore[arg-type]
    used = next(row.gpu_hours for row in table.rows if row.run_id == run.run_id)
    assert spent.gpus and used == spent.gpu_hours == spent.gpus * (20 + 10) / 3600


def test_names_are_whole_at_80_columns(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = submitted(planned(name="lr"), slurm)
    runs = [str(point.run_id) for point in layout.read().points]
    trained(RUNS / runs[0], [3.0], {1: 2.0})
    for columns in (120, 80, 50):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = on_terminal(columns, "sweep", "status", "lr")
        lines = shown.splitlines()
        assert all(any(run_id in line for line in lines) for run_id in runs), shown
        assert max(map(len, lines)) <= columns, shown
        assert "2.0000" in shown and "4 pending" in shown
    assert on_terminal(50, "sweep", "status", "lr").splitlines()[1].startswith("  LR")


def test_csv_and_json(slurm: FakeSlurm) -> None:
    layout = submitted(planned(name="lr"), slurm)
    runs = [str(point.run_id) for point in layout.read().points]
    trained(RUNS / runs[2], [3.0], {1: 2.0})
    rows = list(csv.DictReader(io.StringIO(command("sweep", "status", "lr", "--csv").stdout)))
    assert len(rows) == 4 and rows[0]["run_id"] == runs[2] and rows[0]["eval_loss"] == "2.0"
    assert rows[0]["optimizer.lr"] == "3e-4" and rows[0]["seed"] == "1"
    found = json.loads(command("sweep", "status", "lr", "--json").stdout)["sweep"]
    assert found["rows"][0]["eval_loss"] == 2.0 and found["sweep_id"] == "lr"
    listed = json.loads(command("sweep", "status", "--json").stdout)["sweeps"]
    assert listed == [
        {
            "sweep_id": "lr",
            "points": 4,
            "fields": ["optimizer.lr", "seed"],
            "states": {"PENDING": 4},
        }
    ]


def test_a_failed_point_is_named_with_its_cause(slurm: FakeSlurm) -> None:
    layout = submitted(planned(name="lr"), slurm)
    run_id = str(layout.read().points[0].run_id)
    ledger = Ledger(RunLayout(RUNS / run_id).ledger)
    ledger.append(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=0)
    ledger.append(EventKind.LAUNCH_ENDED, cause="crash", reason="boom")
    ledger.append(EventKind.ACTION, action="stop", cause="crash", reason="crash: boom", exit_code=1)
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    shown = command("sweep", "status", "lr").stdout
    assert f"{run_id}: FAILED: crash: boom" in shown
    assert "1 failed, 3 pending" in shown


def test_one_squeue_for_all(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = submitted(planned(), slurm)
    calls: list[object] = []
    real = slurm.jobs_of_users
    monkeypatch.setattr(slurm, "jobs_of_users", lambda ids: calls.append(ids) or real(ids))
    sweep_table(layout, slurm)  # type: ignore[arg-type]
    assert len(calls) == 1


# Cancelling, and the rest of the command line -----------------------------------------------------


def test_cancel_ends_those_that_wait_first_and_stays(slurm: FakeSlurm) -> None:
    layout = submitted(planned(at_a_time=1), slurm, 1)
    ids = [str(point.run_id) for point in layout.read().points]
    slurm.records[1] = replace(slurm.records[1], state=JobState.COMPLETED)
    RunLayout(RUNS / ids[0]).done.write_text('{"step": 1, "epoch": 1, "time": 1}')
    done = cancel_sweep(layout, slurm)  # type: ignore[arg-type]
    assert done.cancelled == (ids[3], ids[2], ids[1]) and done.over == (ids[0],)
    assert {slurm.records[n].state for n in (2, 3, 4)} == {JobState.CANCELLED}
    with pytest.raises(UsageError, match="was cancelled"):
        planned(at_a_time=1)
    assert cancel_sweep(layout, slurm).cancelled == ()  # type: ignore[arg-type]


def test_a_submission_in_progress_stops_when_the_sweep_is_cancelled(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock
) -> None:
    plan, cancelled = planned(), virtual_clock.pauses
    real = slurm.submit

    def cancelled_meanwhile(*args: object, **more: object) -> SubmittedJob:
        if len(slurm.scripts) == 1:
            with pytest.raises(UsageError, match="another process submits a run of sweep"):
                cancel_sweep(plan.layout, slurm)  # type: ignore[arg-type]
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(slurm, "submit", cancelled_meanwhile)
    with pytest.raises(UsageError, match=r"was cancelled: 2 of 4 runs were submitted"):
        submitted(plan, slurm)
    assert len(slurm.scripts) == 2 and set(cancelled) == {1.0}
    with pytest.raises(UsageError, match="was cancelled: nothing was submitted"):
        submitted(plan, slurm)
    with pytest.raises(UsageError, match="was cancelled"):
        planned()
    done = cancel_sweep(plan.layout, slurm)  # type: ignore[arg-type]
    assert len(done.cancelled) == 2 and len(done.over) == 2
    assert plan.layout.read().cancelled_time is not None


def test_a_cancel_waits_for_the_submission_in_progress(
    slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    layout = submitted(planned("seed=1,2"), slurm)
    lock = layout.try_lock()
    assert lock is not None
    virtual_clock.at(5.0, lambda: os.close(lock))
    done = cancel_sweep(layout, slurm)  # type: ignore[arg-type]
    assert len(done.cancelled) == 2


def test_the_command_line(slurm: FakeSlurm) -> None:
    grid = ["--grid", "optimizer.lr=1e-4,3e-4", "--grid", "seed=1,2"]
    dry = command("sweep", "tiny.yaml", "-p", "sandbox", *grid, "--dry-run")
    assert dry.exit_code == 0 and not RUNS.exists() and "4 runs, GPU-hours unknown" in dry.stderr
    asked = command("sweep", "tiny.yaml", "-p", "sandbox", *grid)
    assert asked.exit_code == 2 and "no terminal" in asked.stderr and not slurm.scripts
    done = command("sweep", "-p", "sandbox", *grid, "tiny.yaml", "-y", "--at-a-time", "3")
    name = done.stdout.strip()
    assert done.exit_code == 0 and name.startswith("sweep-tiny-") and len(slurm.scripts) == 4
    assert "job 4, after 1" in done.stderr and "4 of 4 runs submitted now" in done.stderr
    again = command("sweep", "submit", "tiny.yaml", "-p", "sandbox", *grid, "-y", "--json")
    assert "0 of 4 runs submitted now" in again.stderr
    assert json.loads(again.stdout)["sweep"]["at_a_time"] == 3
    listed = command("sweep", "status")
    assert name in listed.stdout and "4 pending" in listed.stdout
    assert command("sweep", "status", name[:8]).exit_code == 0
    assert command("sweep", "status", "nothing").exit_code == 6
    assert command("sweep", "status", "--csv").exit_code == 2
    cancelled = command("sweep", "cancel", name, "-y")
    assert len(cancelled.stdout.split()) == 4 and cancelled.exit_code == 0
    assert "4 cancelled" in command("sweep", "status", name).stdout


def test_the_python_api(slurm: FakeSlurm) -> None:
    found = hpctrain.sweep(
        "tiny.yaml",
        "sandbox",
        {"optimizer.lr": [1e-4, 3e-4]},
        at_a_time=1,
        slurm=slurm,  # type: ignore[arg-type]
    )
    assert dependencies(slurm) == ["", "afterany:1"]
    opened = hpctrain.open_sweep(found.name, slurm=slurm)  # type: ignore[arg-type]
    assert isinstance(opened, Sweep) and len(opened.table().rows) == 2
    assert len(opened.cancel()) == 2


def test_records_that_cannot_be_read(slurm: FakeSlurm) -> None:
    layout = submitted(planned(name="one"), slurm)
    text = layout.record.read_text()
    layout.record.write_text(text.replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(InvalidInputError, match="this hpctrain knows versions up to 1"):
        layout.read()
    layout.record.write_text("{")
    with pytest.raises(InvalidInputError, match="is no record of a sweep"):
        layout.read()
    assert command("sweep", "status").exit_code == 0, "one bad record hides no other sweep"
    submitted(planned(name="two"), slurm)
    submitted(planned(name="twofold"), slurm)
    assert find_sweep(RUNS, "two").directory.name == "two"
    with pytest.raises(UsageError, match="start of several sweeps"):
        find_sweep(RUNS, "tw")
    with pytest.raises(NoSuchRunError):
        find_sweep(RUNS, "")


def test_results_of_evaluation_jobs_are_columns(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = submitted(planned(name="lr"), slurm)
    runs = [RunLayout(RUNS / str(point.run_id)) for point in layout.read().points]
    settings = EvaluationSettings(jobs=(EvaluationJob(name="arc", every_steps=None),), last_step=9)
    for number, run in enumerate(runs[:2]):
        run.evaluation_config.write_text(settings.model_dump_json())
        for step in (4, 8):
            append_event(
                run,
                EvaluationEvent(
                    kind="ended",
                    name="arc",
                    step=step,
                    epoch=1,
                    attempt=1,
                    time=1.0,
                    by="job",
                    metrics={"accuracy": step / 10 + number / 100},
                ),
            )
    monkeypatch.setenv("COLUMNS", "120")
    shown = on_terminal(120, "sweep", "status", "lr")
    assert "arc/accuracy" in shown.splitlines()[0] and "0.81" in shown and "0.4" not in shown
    monkeypatch.setenv("COLUMNS", "60")
    narrow = on_terminal(60, "sweep", "status", "lr")
    assert max(map(len, narrow.splitlines())) <= 60
    rows = list(csv.DictReader(io.StringIO(command("sweep", "status", "lr", "--csv").stdout)))
    assert sorted(row["arc/accuracy"] for row in rows) == ["", "", "0.8", "0.81"]
    page = command("status", runs[0].run_id).stdout
    assert "arc" in page and "accuracy 0.8" in page


def test_all_points_wait_for_the_run_of_after(slurm: FakeSlurm) -> None:
    first = hpctrain.submit("tiny.yaml", "sandbox", runs=RUNS, slurm=slurm)  # type: ignore[arg-type]
    grid = ("seed=1,2,3",)
    more = {"overrides": (f"after={first.run_id}",), "at_a_time": 2}
    submitted(planned(*grid, **more), slurm, 2)
    assert dependencies(slurm) == ["", "afterok:1", "afterok:1", "afterok:1,afterany:2"]
    with pytest.raises(UsageError, match="all runs of a sweep wait for the same run"):
        planned("after=a,b")
