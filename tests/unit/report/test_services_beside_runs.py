"""Service directories below `runs/`: what lists runs passes them by, and what counts them does."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate
from fabricated_services import GPUS_PER_REPLICA, LIVES, NOW, fabricate_service
from virtual_clock import VirtualClock

from hpctrain.base.durable import replace_text
from hpctrain.observe.live_view import LiveRuns
from hpctrain.records.find import all_runs, all_services
from hpctrain.records.ledger import Ledger
from hpctrain.records.service_layout import ReplicaName
from hpctrain.report.report_windows import ReportWindow
from hpctrain.report.team_report import team_report
from hpctrain.runs.watch import watch
from hpctrain.slurm.fake import FakeSlurm

PRICE = 0.80  # the spot price of a100x1, whose partition preempts


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run and a service."""
    fabricate(tmp_path, "gpt-0001", (*SUBMITTED, STARTED, LAUNCHED), steps=3)
    fabricate_service(tmp_path)
    return tmp_path


# -- what lists runs -------------------------------------------------------------------------------


def test_a_service_is_no_run(runs: Path) -> None:
    assert [run.run_id for run in all_runs(runs)] == ["gpt-0001"]
    assert [one.service_id for one in all_services(runs)] == ["chat-7f3a"]


def test_watch_and_top_look_at_runs(runs: Path) -> None:
    found = watch(runs, FakeSlurm())
    assert (found.runs, found.open_runs) == (1, 1) and found.complete
    view = LiveRuns(runs, FakeSlurm()).look()
    assert [row.status.run_id for row in view.rows] == ["gpt-0001"]


def test_clean_does_not_touch_a_service(runs: Path) -> None:
    before = sorted(str(path) for path in (runs / "chat-7f3a").rglob("*"))
    outcome = hpctrain("clean", "chat-7f3a", "--runs", str(runs), "--yes")
    assert outcome.exit_code == 6 and "is a service, not a run" in outcome.stderr
    assert sorted(str(path) for path in (runs / "chat-7f3a").rglob("*")) == before


def test_a_private_directory_of_somebody_else_hides_no_service(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root every directory can be read, so the refusal is played."""
    fabricate_service(runs, "private-0001")
    real = os.stat

    def refusing(path: object, **more: Any) -> os.stat_result:
        if "private-0001/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", refusing)
    assert [one.service_id for one in all_services(runs)] == ["chat-7f3a"]


# -- status ----------------------------------------------------------------------------------------


def test_status_shows_services_below_runs(runs: Path, virtual_clock: VirtualClock) -> None:
    virtual_clock.begins_at = NOW
    outcome = hpctrain("status", "--runs", str(runs))
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("RUN ") and lines[1].startswith("gpt-0001") and lines[2] == ""
    assert lines[3].split()[:5] == ["SERVICE", "STATE", "READY", "REQ/S", "P99"]
    cells = lines[4].split("  ")
    found = [cell.strip() for cell in cells if cell.strip()]
    assert found[:6] == [
        *("chat-7f3a", "SERVING", "2/3", "97.4", "ttft 380 ms of 450 ms"),
        "http://n900:8080",
    ]
    assert found[6] == "r002-g001 has failed: its job is gone"


def test_services_alone_need_no_word_about_runs(tmp_path: Path) -> None:
    fabricate_service(tmp_path)
    outcome = hpctrain("status", "--runs", str(tmp_path))
    assert outcome.exit_code == 0 and outcome.stderr == ""
    assert outcome.stdout.startswith("SERVICE ")


def test_an_ended_service_is_shown_with_all(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path, lives=())
    service.layout.down_request.touch()
    assert "chat-7f3a" not in hpctrain("status", "--runs", str(tmp_path)).stdout
    assert "DOWN" in hpctrain("status", "-a", "--runs", str(tmp_path)).stdout


def test_a_service_that_cannot_be_read_has_a_line_with_the_reason(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path)
    replace_text(service.layout.settings, "{")
    outcome = hpctrain("status", "--runs", str(tmp_path))
    assert outcome.exit_code == 0
    assert "UNKNOWN" in outcome.stdout and "not a service.json" in outcome.stdout


def test_names_and_json_are_about_runs(runs: Path) -> None:
    for words in (("gpt-0001",), ("--json",)):
        assert "chat-7f3a" not in hpctrain("status", *words, "--runs", str(runs)).stdout


def test_status_of_services_is_light(tmp_path: Path) -> None:
    """Neither arrays nor YAML nor the planner are loaded to print a line."""
    fabricate_service(tmp_path)
    program = (
        "import sys\nfrom hpctrain.cli.main import cli\n"
        f"try:\n    cli(['status', '--runs', {str(tmp_path)!r}])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'numpy', 'torch', 'pandas', 'ruamel', 'rich'} & set(sys.modules)\n"
        "heavy |= {one for one in sys.modules if one.startswith('hpctrain.plan')}\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "chat-7f3a" in done.stdout and done.stdout.endswith("heavy: []\n"), done.stdout


# -- the report about a team -----------------------------------------------------------------------


def window(begin: float, end: float) -> ReportWindow:
    bounds = (begin, begin + (end - begin) / 2, end)
    days = tuple(datetime.fromtimestamp(moment, UTC).date() for moment in bounds[:-1])
    return ReportWindow("made up", "UTC", bounds, days, (begin - 86400, begin), False, UTC)


def test_gpu_hours_of_services_are_counted(runs: Path) -> None:
    report = team_report([runs], window(NOW - 7200, NOW), NOW)
    (row,) = (one for one in report.runs if one.run_id == "chat-7f3a")
    held = sum((one.ended or 7200) - (one.started or 0) for one in LIVES)
    working = sum((one.ended or 7200) - one.ready for one in LIVES if one.ready is not None)
    hours = GPUS_PER_REPLICA / 3600
    assert row.spending.gpu_hours == pytest.approx(held * hours)
    assert row.spending.productive_gpu_hours == pytest.approx(working * hours)
    assert row.spending.starting_gpu_hours == pytest.approx((held - working) * hours)
    assert (row.engine, row.currency, row.gpus) == ("vllm", "USD", 3 * GPUS_PER_REPLICA)
    (cost,) = row.spending.costs
    assert cost.total == pytest.approx(held * hours * PRICE)


def test_windows_of_a_service_add_up(runs: Path) -> None:
    halves = [
        team_report([runs], window(*bounds), NOW).runs
        for bounds in ((NOW - 7200, NOW - 3600), (NOW - 3600, NOW))
    ]
    whole = team_report([runs], window(NOW - 7200, NOW), NOW).runs
    parts, total = (
        [row.spending.gpu_hours for row in rows if row.run_id == "chat-7f3a"]
        for rows in ([*halves[0], *halves[1]], whole)
    )
    assert len(parts) == 2 and sum(parts) == pytest.approx(total[0])


def test_a_service_that_cannot_be_read_is_named(runs: Path) -> None:
    layout = next(iter(all_services(runs)))
    Ledger(layout.replica(ReplicaName(1, 1)).ledger).path.write_text(
        '{"event": "watch", "schema_version": 99, "time": 1}\n'
    )
    report = team_report([runs], window(NOW - 7200, NOW), NOW)
    assert [one.run_id for one in report.unreadable] == ["chat-7f3a"]


def test_a_quiet_service_is_counted_as_one(runs: Path) -> None:
    begin = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
    report = team_report([runs], window(begin, begin + 86400), NOW)
    assert not report.runs and report.quiet_runs == 2
