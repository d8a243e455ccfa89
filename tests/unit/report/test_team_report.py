"""What the GPU-hours of a team have bought: sums, borders, money, and what is not counted."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from datetime import UTC
from pathlib import Path

import pandas  # type: ignore[import-untyped]
import pytest
from old_runs import NOVEMBER_2026, unpack

from hpctrain.base.errors import NoSuchRunError, UsageError
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.report import team_report as module
from hpctrain.report.report_windows import ReportWindow, between_dates, last_days
from hpctrain.report.team_report import NO_PROJECT, TeamReport, team_report
from hpctrain.report.team_tally import Spending
from hpctrain.report.week_page import COLUMNS, csv_text
from hpctrain.runs.goodput import goodput
from hpctrain.telemetry.goodput import OCCUPYING
from tests.team_runs import A100, DAY, H100, NOW, TeamRun, make, team

HOUR = 3600.0
# The begin of the last seven full days, and their end.
BEGIN, END = last_days(NOW, UTC).bounds[0], last_days(NOW, UTC).bounds[-1]
OWNERS = {"llama7b-base": "ada", "llama7b-code": "bob", "vision-probe": "bob"}


def owner_of(run: RunFiles) -> str:
    return OWNERS.get(run.run_id.rpartition("-")[0], "eve")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return team(tmp_path_factory.mktemp("team"), step_seconds=1200.0)


@pytest.fixture(scope="module")
def whole(directories: tuple[Path, Path]) -> TeamReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFiles, "owner_name", property(owner_of))
        return team_report(directories, last_days(NOW, UTC), NOW)


def week_of(*directories: Path, now: float = NOW) -> TeamReport:
    return team_report(directories, last_days(now, UTC), now)


def added_up(spendings: list[Spending]) -> dict[str, float]:
    names = [name for name in Spending.model_fields if name not in ("costs", "runs")]
    return {name: math.fsum(getattr(one, name) for one in spendings) for name in names}


def test_every_division_adds_up_to_the_total(whole: TeamReport) -> None:
    expected = pytest.approx(added_up([whole.total]), rel=1e-12)
    for groups in (whole.by_user, whole.by_project, whole.by_cluster, whole.by_period, whole.runs):
        assert added_up([one.spending for one in groups]) == expected
    lost = math.fsum(one.gpu_hours for one in whole.by_cause)
    assert lost == pytest.approx(whole.total.lost_gpu_hours, rel=1e-12)
    spent = whole.total
    assert spent.productive_gpu_hours + spent.lost_gpu_hours == pytest.approx(spent.gpu_hours)
    parts = (spent.redone_gpu_hours, spent.saving_gpu_hours, spent.between_gpu_hours,
             spent.starting_gpu_hours, spent.restarting_gpu_hours)  # fmt: skip
    assert math.fsum(parts) == pytest.approx(spent.lost_gpu_hours)
    (cost,) = spent.costs
    assert cost.productive + cost.lost == pytest.approx(cost.total)
    assert cost.lost == pytest.approx(math.fsum(c.total for o in whole.by_cause for c in o.costs))


def test_groups_are_named_and_the_largest_is_first(whole: TeamReport) -> None:
    assert {one.name for one in whole.by_user} == {"ada", "bob", "eve"}
    names = [one.name for one in whole.by_project]
    assert set(names) == {"nlp", "biology", "climate", "speech", "alignment"}
    assert names[0] == "nlp"
    assert [one.name for one in whole.by_cluster] == ["aurora", "borealis"]
    causes = [one.gpu_hours for one in whole.by_cause]
    assert causes == sorted(causes, reverse=True) and len(causes) > 5


@pytest.mark.parametrize("border", ["2026-11-18", "2026-11-20", "2026-11-25"])
def test_neighbouring_windows_add_up(directories: tuple[Path, Path], border: str) -> None:
    day_after = f"2026-11-{int(border[-2:]) + 1}"
    first, second, both = (
        team_report(directories, between_dates(since, until, NOW, UTC), NOW).total
        for since, until in (
            ("2026-11-12", border), (day_after, "2026-11-26"), ("2026-11-12", "2026-11-26"),
        )
    )  # fmt: skip
    assert added_up([first, second]) == pytest.approx(added_up([both]), rel=1e-12)
    assert first.gpu_hours > 0 and second.gpu_hours > 0


def test_what_was_before_is_the_report_of_that_time(directories: tuple[Path, Path]) -> None:
    now = team_report(directories, last_days(NOW, UTC), NOW)
    earlier = team_report(directories, last_days(NOW - 7 * DAY, UTC), NOW)
    assert now.previous == earlier.total
    known = {one.cause: one.gpu_hours for one in earlier.by_cause}
    assert {o.cause: o.gpu_hours_before for o in now.by_cause if o.cause in known} == known
    groups = {one.name: one.spending.gpu_hours for one in earlier.by_project}
    assert {o.name: o.gpu_hours_before for o in now.by_project if o.name in groups} == groups


def test_an_old_run_has_the_same_account_as_by_goodput(tmp_path: Path) -> None:
    run = unpack(NOVEMBER_2026, tmp_path)
    known = goodput(run, NOW)
    begin = known.start_time
    window = ReportWindow("all", "UTC", (begin - 10, begin + 9, begin + DAY), (), (0.0, 1.0), False,
                          UTC)  # fmt: skip
    (row,) = team_report([run.layout.directory.parent], window, NOW).runs
    hours: Counter[str] = Counter()
    by_cause: Counter[str] = Counter()
    for part in row.parts:
        hours[part.category] += part.hours
        if part.cause is not None and part.category in OCCUPYING:
            by_cause[part.cause] += part.gpu_hours
    seconds = {category: hours[category] * HOUR for category in known.seconds}
    assert seconds == pytest.approx(known.seconds, rel=1e-12, abs=1e-9)
    assert row.spending.gpu_hours == pytest.approx(known.gpu_hours)
    assert (row.spending.steps, row.spending.redone_steps) == (known.kept_steps, known.lost_steps)
    for loss in known.causes:
        assert by_cause[loss.cause] == pytest.approx(loss.lost_gpu_hours)


def test_made_up_runs_have_the_same_accounts_as_by_goodput(
    directories: tuple[Path, Path], whole: TeamReport
) -> None:
    window = between_dates("2026-11-01", "2026-11-26", NOW, UTC)
    for row in team_report(directories, window, NOW).runs:
        run = next(d / row.run_id for d in directories if (d / row.run_id).exists())
        known = goodput(RunFiles(module.RunLayout(run)), NOW)
        assert row.spending.gpu_hours == pytest.approx(known.gpu_hours, rel=1e-12)
        assert row.spending.steps == known.kept_steps
        assert row.spending.queue_hours * HOUR == pytest.approx(known.seconds["queueing"])


def test_a_run_across_the_border_counts_on_both_sides(tmp_path: Path) -> None:
    """40 steps of 100 s on 32 GPUs, half of them before the window."""
    run = make(tmp_path, "border", BEGIN - 2240, H100)
    run.starts(240.0).trains(40, 100.0)
    run.ends("done", "finish", detected=0.0)
    report = week_of(tmp_path)
    assert report.total.productive_gpu_hours == pytest.approx(2000 * 32 / HOUR)
    # The step that ends at midnight belongs to the day that begins then.
    assert (report.previous.steps, report.total.steps) == (19, 21)
    plan_tokens = report.total.tokens // 21
    assert report.previous.tokens == 19 * plan_tokens > 0


def test_a_running_run_is_counted_until_now_or_the_end(tmp_path: Path) -> None:
    make(tmp_path, "running", END - 1240, H100).starts(240.0).trains(20, 100.0)
    so_far = END - 500
    window = between_dates("2026-11-25", None, so_far, UTC)
    early = team_report([tmp_path], window, so_far)
    assert early.in_progress and not early.runs[0].over
    # Nothing after `now` is known yet: the whole time until then is occupied.
    assert early.total.gpu_hours == pytest.approx(740 * 32 / HOUR)
    assert week_of(tmp_path).total.gpu_hours == pytest.approx(1240 * 32 / HOUR)


def test_a_stopped_run_costs_nothing_and_a_waiting_one_no_gpus(tmp_path: Path) -> None:
    stopped = make(tmp_path, "stopped", BEGIN + HOUR, H100).starts(100.0).trains(10, 10.0)
    stopped.ends("stop_requested", "stop", detected=0.0)
    make(tmp_path, "waiting", END - 5 * HOUR, H100)
    report = week_of(tmp_path)
    assert report.total.gpu_hours == pytest.approx(200 * 32 / HOUR)
    assert report.total.queue_hours == pytest.approx(5.0)
    assert [run.over for run in report.runs] == [True, False]


def test_a_run_that_was_held_between_has_hours_without_gpus(tmp_path: Path) -> None:
    run = make(tmp_path, "held", BEGIN + HOUR, H100).starts(100.0).trains(10, 10.0)
    run.ends("crash", "hold", detected=0.0).waits(3 * HOUR)
    run._say(EventKind.SUBMITTED, job_id=5)
    run.waits(HOUR)
    run._job, run._restarts = 5, 0
    run.starts(100.0).trains(10, 10.0).ends("done", "finish", detected=0.0)
    spent = week_of(tmp_path).total
    assert (spent.held_hours, spent.queue_hours) == pytest.approx((3.0, 1.0))
    assert spent.gpu_hours == pytest.approx(400 * 32 / HOUR)


def test_two_currencies_are_never_added_up(tmp_path: Path) -> None:
    for name, currency in (("h1", "EUR"), ("h2", "USD")):
        profile = tmp_path / f"{name}.yaml"
        profile.write_text(f"extends: h100x16\nname: {name}\n"
                           f"prices: {{currency: {currency}, on_demand: 2.0}}\n")  # fmt: skip
        run = make(tmp_path / "runs", name, BEGIN + HOUR, ("llama7b", str(profile), H100[2]))
        run.starts(0.0).trains(9, 400.0).ends("done", "finish", detected=0.0)
    report = week_of(tmp_path / "runs")
    assert [(cost.currency, cost.total) for cost in report.total.costs] == [
        ("EUR", pytest.approx(64.0)), ("USD", pytest.approx(64.0)),
    ]  # fmt: skip


@pytest.mark.parametrize(("partition", "price"), [("preemptible", 0.90), ("main", 1.79)])
def test_preemptible_partitions_have_the_price_of_spot(
    tmp_path: Path, partition: str, price: float
) -> None:
    changes = () if partition == "main" else (f"resources.partition={partition}",)
    make(tmp_path, "spot", BEGIN + HOUR, A100, *changes).starts(0.0).trains(5, 100.0)
    (run,) = week_of(tmp_path).runs
    assert (run.price_per_gpu_hour, run.currency) == (price, "USD")


def test_a_project_is_the_account_or_that_of_wandb(tmp_path: Path) -> None:
    wandb = "tracking.wandb.project=curves"
    for name, changes in (
        ("both", (wandb, "resources.account=nlp")), ("wandb", (wandb,)), ("none", ()),
    ):  # fmt: skip
        make(tmp_path, name, BEGIN + HOUR, H100, *changes).starts(0.0).trains(5, 100.0)
    found = {
        run.run_id.rpartition("-")[0]: (run.project, run.project_from)
        for run in week_of(tmp_path).runs
    }
    assert found == {
        "both": ("nlp", "account"), "wandb": ("curves", "wandb"), "none": (NO_PROJECT, None),
    }  # fmt: skip


def test_runs_of_other_times_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def over(name: str, begin: float) -> TeamRun:
        run = make(tmp_path, name, begin, H100).starts(0.0).trains(5, 100.0)
        return run.ends("done", "finish")

    old = over("old", BEGIN - 30 * DAY)
    os.utime(old.run.layout.metrics, (old.clock, old.clock))
    over("later", END + HOUR)
    monkeypatch.setattr(module, "read_step_times", None)  # reading would fail
    report = week_of(tmp_path)
    assert (report.quiet_runs, report.runs, report.unreadable) == (2, (), ())
    assert report.total.runs == 0 and len(report.by_period) == 7


def test_a_run_that_trained_after_a_torn_ledger_is_read(tmp_path: Path) -> None:
    """The ledger has lost all since the last end, and metrics were written in the window."""
    run = make(tmp_path, "torn", BEGIN - 20 * DAY, H100).starts(0.0).trains(5, 100.0)
    run.ends("crash", "stop")
    run.clock, run._epoch = BEGIN + HOUR, 2
    run.trains(5, 100.0)
    assert week_of(tmp_path).total.steps == 5


def test_unreadable_runs_are_named_and_the_others_counted(tmp_path: Path) -> None:
    make(tmp_path, "good", BEGIN + HOUR, H100).starts(0.0).trains(5, 100.0)
    newer = make(tmp_path, "newer", BEGIN + HOUR, H100).run.layout
    with newer.ledger.open("a") as stream:
        stream.write('{"schema_version": 9, "event": "action", "time": 1}\n')
    (tmp_path / "damaged" / "ledger.jsonl").mkdir(parents=True)
    report = week_of(tmp_path)
    assert report.total.runs == 1
    reasons = {one.run_id.rpartition("-")[0] or one.run_id: one.reason for one in report.unreadable}
    assert set(reasons) == {"newer", "damaged"}
    assert "format version 9" in reasons["newer"] and "no file" in reasons["damaged"]


def test_a_run_without_a_plan_has_steps_and_no_gpu_hours(tmp_path: Path) -> None:
    run = make(tmp_path, "lost", BEGIN + HOUR, H100).starts(0.0).trains(5, 100.0).run
    run.layout.plan.unlink()
    run.layout.profile.unlink()
    report = week_of(tmp_path)
    assert (report.total.gpu_hours, report.total.steps) == (0.0, 5)
    assert report.runs_without_gpus == (run.run_id,)
    row = pandas.read_csv(io.StringIO(csv_text(report)))
    assert row["gpu_hours"].isna().all() and row["gpus"].isna().all()


def test_a_directory_that_is_named_twice_counts_once(directories: tuple[Path, Path]) -> None:
    one = directories[1]
    again = one / ".." / one.name
    assert week_of(one, again).total == week_of(one).total


def test_what_is_no_directory_and_what_has_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory"):
        week_of(tmp_path / "missing")
    with pytest.raises(NoSuchRunError, match="no runs in"):
        week_of(tmp_path)


def test_the_csv_adds_up_to_the_document(whole: TeamReport) -> None:
    table = pandas.read_csv(io.StringIO(csv_text(whole)), keep_default_na=False, na_values=[""])
    assert tuple(table.columns) == COLUMNS
    assert table["gpu_hours"].sum() == pytest.approx(whole.total.gpu_hours, rel=1e-12)
    assert table["cost"].sum() == pytest.approx(whole.total.costs[0].total, rel=1e-12)
    by_user = table.groupby("user")["gpu_hours"].sum().to_dict()
    assert by_user == pytest.approx({o.name: o.spending.gpu_hours for o in whole.by_user})
    lost = table[(table["category"] != "productive") & (table["gpu_hours"] > 0)]
    by_cause = lost.groupby("cause")["gpu_hours"].sum().to_dict()
    assert by_cause == pytest.approx({one.cause: one.gpu_hours for one in whole.by_cause})
    assert set(table["begin"]) == {"2026-11-19T00:00:00+00:00"}


def test_a_cell_is_never_a_formula(whole: TeamReport) -> None:
    evil = whole.runs[0].model_copy(update={"project": '=HYPERLINK("http://x")', "user": "@sum"})
    table = pandas.read_csv(io.StringIO(csv_text(whole.model_copy(update={"runs": (evil,)}))))
    assert set(table["project"]) == {'\'=HYPERLINK("http://x")'} and set(table["user"]) == {"'@sum"}


def test_without_pandas_the_error_says_so(
    whole: TeamReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="not installed") as refused:
        csv_text(whole)
    assert "pip install pandas" in (refused.value.hint or "")
