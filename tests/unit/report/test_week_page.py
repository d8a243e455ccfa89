"""The page and the command about a team: in a parser, in a browser, on 80 columns."""

from __future__ import annotations

import json
import time
from datetime import UTC
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.base.errors import UsageError
from hpctrain.cli.main import cli
from hpctrain.report.report_windows import last_days
from hpctrain.report.team_report import TeamReport, UnreadRun, team_report
from hpctrain.report.week_page import team_lines, write_week_page
from tests.chromium import PROGRAM, Chromium
from tests.team_runs import NOW, team
from tests.unit.page.markup_reader import read
from tests.unit.report.test_in_chromium import OUTSIDE, OVERLAPPING, TOO_WIDE

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return team(tmp_path_factory.mktemp("team"), step_seconds=1200.0)


@pytest.fixture(scope="module")
def week(directories: tuple[Path, Path]) -> TeamReport:
    return team_report(directories, last_days(NOW, UTC), NOW)


@pytest.fixture(scope="module")
def hostile(week: TeamReport) -> TeamReport:
    """Every text that comes from a run is markup, and there are two currencies."""
    run = week.runs[0].model_copy(
        update={"user": EVIL, "project": EVIL, "cluster": EVIL, "run_id": EVIL, "gpus": None}
    )
    group = week.by_user[0].model_copy(update={"name": EVIL})
    cause = week.by_cause[0].model_copy(update={"cause": EVIL})
    euros = week.total.costs[0].model_copy(update={"currency": "EUR"})
    spent = week.total.model_copy(
        update={"costs": (euros, *week.total.costs), "unpriced_gpu_hours": 7.0, "images": 9}
    )
    return week.model_copy(
        update={
            "runs": (run, *week.runs[1:]), "by_user": (group,), "by_project": (group,),
            "by_cluster": (group,), "by_cause": (cause, *week.by_cause[1:]), "total": spent,
            "unreadable": (UnreadRun(run_id=EVIL, directory=EVIL, reason=EVIL),),
        }
    )  # fmt: skip


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    return CliRunner().invoke(cli, ["report", *words])


def runs_words(directories: tuple[Path, Path]) -> list[str]:
    return [word for one in directories for word in ("--runs", str(one))]


def test_the_page_has_charts_and_every_run(week: TeamReport) -> None:
    text = write_week_page(week)
    page = read(text)
    assert len(page.all("svg", "chart")) == 5
    for run in week.runs:
        assert run.run_id in text
    assert not page.all("script") and "http" not in text.replace("http-equiv", "")
    titles = {one.text for one in page.all("h2")}
    assert titles == {"Overview", "Losses", "Users and projects", "Runs"}


def test_texts_of_runs_are_no_markup(hostile: TeamReport) -> None:
    text = write_week_page(hostile)
    assert not read(text).all("script") and text.count("&lt;script&gt;") > 8
    assert "Not counted" in text and "no price" in text and "unknown of" in text


def test_a_page_without_any_time_says_so(week: TeamReport, directories: tuple[Path, Path]) -> None:
    empty = team_report(directories, last_days(NOW - 90 * 86400, UTC), NOW)
    text = write_week_page(empty)
    assert "no values are known" in text and read(text).all("section")
    assert list(team_lines(empty))[1:] == ["No run had nodes or waited for them in this time"]


@pytest.mark.nightly("a real Chromium")
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
def test_in_a_browser_at_every_width(week: TeamReport, hostile: TeamReport, tmp_path: Path) -> None:
    pages = [tmp_path / "week.html", tmp_path / "hostile.html"]
    for path, content in zip(pages, (week, hostile), strict=True):
        path.write_text(write_week_page(content))
    colours = set()
    with Chromium(tmp_path / "profile") as browser:
        for page in pages:
            for width, dark in ((400, True), (768, False), (1400, False)):
                browser.open(page, width=width, dark=dark)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert browser.evaluate(TOO_WIDE) == []
                assert browser.evaluate(OUTSIDE) == []
                assert browser.evaluate(OVERLAPPING) == []
                colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


def test_tables_are_at_most_80_columns_wide(week: TeamReport, hostile: TeamReport) -> None:
    for content in (week, hostile):
        lines = list(team_lines(content))
        assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = "\n".join(team_lines(week))
    assert all(run.run_id in text for run in week.runs)
    assert "EUR" in "\n".join(team_lines(hostile)) and "EUR" not in text


def test_the_command_prints_tables(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], week: TeamReport
) -> None:
    result = run_command(monkeypatch, "--week", *runs_words(directories))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == list(team_lines(week))


def test_the_command_prints_json(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], week: TeamReport
) -> None:
    result = run_command(monkeypatch, "--week", "2026-W47", "--json", *runs_words(directories))
    document = json.loads(result.stdout)["team_report"]
    assert document["begin"] == "2026-11-16T00:00:00Z"
    assert document["total"]["gpu_hours"] > 0


def test_the_command_writes_private_files(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    page, table = tmp_path / "week.html", tmp_path / "week.csv"
    words = ["--week", "-o", str(page), "--csv", str(table), *runs_words(directories)]
    result = run_command(monkeypatch, *words)
    assert result.exit_code == 0 and result.stdout == ""
    assert page.read_text().startswith("<!doctype html>")
    assert table.read_text().startswith("begin,end,run,")
    assert {path.stat().st_mode & 0o777 for path in (page, table)} == {0o600}
    printed = run_command(monkeypatch, "--week", "--csv", "-", *runs_words(directories))
    assert printed.stdout == table.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--week", "2026-W47", "--since", "2026-11-01"], "two windows"),
        (["--week", "--json", "--csv", "-"], "both write"),
        (["--week", "-o", "-", "--csv", "-"], "both write"),
        (["--week", "2027-W01"], "in the future"),
        (["--week", "47"], "no week"),
        (["--since", "2026-13-01"], "no date"),
        (["--csv", "-", "a-run"], "go with --week"),
        (["--since", "2026-11-01", "a-run"], "name no run"),
        ([], "no run is named"),
    ],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    directories: tuple[Path, Path],
    words: list[str],
    message: str,
) -> None:
    result = run_command(monkeypatch, *words, *runs_words(directories)[:2])
    assert isinstance(result.exception, UsageError) and message in str(result.exception)


def test_a_file_in_a_missing_directory_is_one_error(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ["--week", "--csv", str(tmp_path / "no" / "week.csv"), *runs_words(directories)]
    assert isinstance(run_command(monkeypatch, *words).exception, OSError)
