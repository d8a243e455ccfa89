"""Shows the report about a team: `hpctrain report --week`, which `report/command.py` calls.

Belongs here: which window, and in which form it is written. Does not belong here: tables
(`week_text`), the page (`hpctrain.report.week_page`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from hpctrain.base import clock
from hpctrain.base.errors import UsageError
from hpctrain.page.output import busy, json_out
from hpctrain.page.private_file import write_private

# The value of `--week` without one.
LAST_WEEK = "last"


@dataclass(frozen=True)
class WeekRequest:
    """What the command line asks for; `-` as a file is standard output."""

    week: str | None
    since: str | None
    until: str | None
    runs: Sequence[Path]
    output: Path | None
    csv: Path | None
    as_json: bool


def show_week(request: WeekRequest) -> None:
    """Write tables, or JSON, CSV and a page as they are asked for."""
    from hpctrain.records.find import runs_directory
    from hpctrain.report.report_windows import ReportWindow, between_dates, iso_week, last_days
    from hpctrain.report.team_report import team_report
    from hpctrain.report.week_text import team_lines

    to_stdout = [
        name
        for name, wanted in (
            ("--json", request.as_json),
            ("--csv -", str(request.csv) == "-"),
            ("-o -", str(request.output) == "-"),
        )
        if wanted
    ]
    if len(to_stdout) > 1:
        raise UsageError(f"{' and '.join(to_stdout)} both write to standard output")
    now = clock.now()
    window: ReportWindow
    if request.since is not None or request.until is not None:
        if request.week is not None:
            raise UsageError("--week and --since or --until are two windows")
        window = between_dates(request.since, request.until, now)
    elif request.week in (None, LAST_WEEK):
        window = last_days(now)
    else:
        window = iso_week(str(request.week), now)
    directories = [*request.runs] or [runs_directory()]
    with busy("Reading the runs"):
        report = team_report(directories, window, now)
    if request.csv is not None:
        from hpctrain.report.team_csv import csv_text

        write_private(request.csv, csv_text(report), name_on_stderr=True)
    if request.output is not None:
        from hpctrain.report.week_page import write_week_page

        write_private(request.output, write_week_page(report), name_on_stderr=True)
    if request.as_json:
        json_out("team_report", report)
    elif request.csv is None and request.output is None:
        for line in team_lines(report):
            click.echo(line)
