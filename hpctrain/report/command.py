"""Command `report`: an HTML page about runs, a service, a team's GPU-hours, or dashboards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.page.options import RunName, Seconds, json_option
from hpctrain.page.output import busy, json_out, write_private

# The value of `--week` without one.
_LAST_WEEK = "last"
_FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command()
@click.argument("names", metavar="[RUN]...", type=RunName(), nargs=-1)
@click.option(
    "--output",
    "-o",
    type=_FILE,
    help="The file; - is stdout.  [default: RUN.html in this directory]",
)
@click.option("--offline", is_flag=True, help="Do not ask Slurm.")
@click.option(
    "--week",
    is_flag=False,
    flag_value=_LAST_WEEK,
    metavar="[WEEK]",
    help="All runs in an ISO week such as 2026-W47, or in the last seven full days.",
)
@click.option("--since", metavar="DATE", help="All runs from this day on.")
@click.option("--until", metavar="DATE", help="All runs up to the end of this day.")
@click.option("--csv", type=_FILE, help="With --week: write rows by run, category and cause.")
@json_option
@click.option(
    "--dashboards", is_flag=True, help="The panels of the Grafana dashboards, of all runs or RUN."
)
@click.option("--prometheus", "url", metavar="URL", help="Where --dashboards asks.")
@click.option(
    "--range",
    "range_seconds",
    type=Seconds(),
    metavar="DURATION",
    help="The time that --dashboards shows.  [default: as in Grafana]",
)
@click.option(
    "--require-data", is_flag=True, help="Fail if hpctrain's own metrics leave a panel empty."
)
@click.option(
    "--runs",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the runs; several with --week.  [default: $HPCTRAIN_RUNS or ./runs]",
)
def report(
    names: tuple[str, ...],
    output: Path | None,
    offline: bool,
    week: str | None,
    since: str | None,
    until: str | None,
    csv: Path | None,
    as_json: bool,
    dashboards: bool,
    url: str | None,
    range_seconds: float | None,
    require_data: bool,
    runs: tuple[Path, ...],
) -> None:
    """Write one HTML page about a run: plan and reality, loss, time and its losses, nodes,
    memory, messages, checkpoints, events, software. Several runs are shown side by side. About a
    service: promise and measurement, latency through all events, lives of replicas, costs.

    With --week (or --since and --until): what the GPU-hours of all runs have bought, and what
    ate them, by user, project, cluster, cause and day. With --dashboards: the panels of
    docs/dashboards.md, from the same queries.

    The page is one private file that loads nothing and runs no script: it can be kept, sent
    and printed. It is dark where the browser is.

    \b
    Examples:
      hpctrain report gpt175b-7f3a
      hpctrain report gpt175b-7f3a gpt175b-91c0 -o both.html
      hpctrain report gpt175b-7f3a --offline -o - > page.html
      hpctrain report --week --runs /scratch/ada/runs --runs /scratch/bob/runs
      hpctrain report --week 2026-W47 -o week.html --csv week.csv
      hpctrain report --dashboards --prometheus http://127.0.0.1:9090
    """
    of_team = week is not None or since is not None or until is not None
    if dashboards != (url is not None):
        raise UsageError("--dashboards and --prometheus need each other")
    if of_team and (names or dashboards):
        raise UsageError("a window of time is about all runs: name no run, and no --dashboards")
    if not dashboards and (range_seconds is not None or require_data):
        raise UsageError("--range and --require-data go with --dashboards")
    if not of_team and (csv is not None or as_json):
        raise UsageError("--csv and --json go with --week, --since or --until")
    if not of_team and len(runs) > 1:
        raise UsageError("several --runs go with --week, --since or --until")
    if of_team:
        _write_week(week, since, until, runs, output, csv, as_json)
    elif url is not None:
        file = output or Path("dashboards.html")
        _write_dashboards(url, names, file, range_seconds, require_data)
    elif names:
        _write_runs(names, runs[0] if runs else None, output, offline)
    else:
        raise UsageError("no run is named", hint="`--week` is about the runs of the last week")


def _write_runs(
    names: tuple[str, ...], runs: Path | None, output: Path | None, offline: bool
) -> None:
    """Write the page about one run, about several side by side, or about one service."""
    from hpctrain.records.find import find_run, find_service, runs_directory
    from hpctrain.report.collect import collect_reports
    from hpctrain.report.run_page import write_page
    from hpctrain.report.service_page import write_service_page
    from hpctrain.report.service_report import collect_service_report
    from hpctrain.serve.service_files import ServiceFiles, is_meant_as_service
    from hpctrain.slurm.client import SlurmClient

    directory = runs_directory(runs)
    if any(is_meant_as_service(directory, name) for name in names):
        if len(names) > 1:
            raise UsageError("a page is about one service alone, or about runs")
        service = ServiceFiles(find_service(directory, names[0]))
        with busy("Reading the service"):
            page = write_service_page(collect_service_report(service))
        write_private(output or Path(f"{service.service_id}.html"), page)
        return
    found = [find_run(directory, name) for name in dict.fromkeys(names)]
    with busy("Reading the run" if len(found) == 1 else "Reading the runs"):
        page = write_page(collect_reports(found, None if offline else SlurmClient()))
    write_private(output or Path(f"{found[0].run_id}.html"), page)


def _write_week(
    week: str | None,
    since: str | None,
    until: str | None,
    runs: Sequence[Path],
    output: Path | None,
    csv: Path | None,
    as_json: bool,
) -> None:
    """Write tables about a window, or JSON, CSV and a page as they are asked for."""
    from hpctrain.records.find import runs_directory
    from hpctrain.report.report_windows import between_dates, iso_week, last_days
    from hpctrain.report.team_report import team_report
    from hpctrain.report.week_page import csv_text, team_lines, write_week_page

    wanted = {"--json": as_json, "--csv -": str(csv) == "-", "-o -": str(output) == "-"}
    to_stdout = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(to_stdout) > 1:
        raise UsageError(f"{' and '.join(to_stdout)} both write to standard output")
    now = clock.now()
    if since is not None or until is not None:
        if week is not None:
            raise UsageError("--week and --since or --until are two windows")
        window = between_dates(since, until, now)
    else:
        window = last_days(now) if week in (None, _LAST_WEEK) else iso_week(str(week), now)
    with busy("Reading the runs"):
        report = team_report([*runs] or [runs_directory()], window, now)
    if csv is not None:
        write_private(csv, csv_text(report), name_on_stderr=True)
    if output is not None:
        write_private(output, write_week_page(report), name_on_stderr=True)
    if as_json:
        json_out("team_report", report)
    elif csv is None and output is None:
        for line in team_lines(report):
            click.echo(line)


def _write_dashboards(
    url: str,
    names: tuple[str, ...],
    output: Path,
    range_seconds: float | None,
    require_data: bool,
) -> None:
    """Write the page of dashboards; fail for a refused query, and for an empty panel if wished."""

    from hpctrain.observe.dashboard_data import (
        PrometheusServer,
        collect_dashboards,
        packaged_dashboards,
    )
    from hpctrain.observe.dashboard_page import write_dashboards

    with busy("Asking Prometheus"):
        found = collect_dashboards(
            PrometheusServer(url), packaged_dashboards(), clock.now(), names, range_seconds
        )
    write_private(output, write_dashboards(found))
    panels = [(one.dashboard.short_name, panel) for one in found for panel in one.panels()]
    faults = [
        f"{name}, {one.panel.title}: {one.refusals[0]}" for name, one in panels if one.refusals
    ]
    if require_data:
        lacking = [(name, one) for name, one in panels if one.lacks_data and not one.refusals]
        faults += [f"{name}, {one.panel.title}: no data" for name, one in lacking]
    if faults:
        raise HpctrainError("Panels that are not complete:\n" + "\n".join(faults))
