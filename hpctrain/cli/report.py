"""Command `report`: an HTML page about a run or several, or the GPU-hours of a team."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import RunName, json_option
from hpctrain.cli.output import busy
from hpctrain.cli.week import LAST_WEEK, WeekRequest, show_week
from hpctrain.errors import UsageError

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
    flag_value=LAST_WEEK,
    metavar="[WEEK]",
    help="All runs in an ISO week such as 2026-W47, or in the last seven full days.",
)
@click.option("--since", metavar="DATE", help="All runs from this day on.")
@click.option("--until", metavar="DATE", help="All runs up to the end of this day.")
@click.option("--csv", type=_FILE, help="With --week: write rows by run, category and cause.")
@json_option
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
    runs: tuple[Path, ...],
) -> None:
    """Write one HTML page about a run: plan and reality, loss, time and its losses, nodes,
    memory, messages, checkpoints, events, software. Several runs are shown side by side.

    With --week (or --since and --until): what the GPU-hours of all runs have bought, and what
    ate them, by user, project, cluster, cause and day.

    The page is one private file that loads nothing and runs no script: it can be kept, sent
    and printed. It is dark where the browser is.

    \b
    Examples:
      hpctrain report gpt175b-7f3a
      hpctrain report gpt175b-7f3a gpt175b-91c0 -o both.html
      hpctrain report gpt175b-7f3a --offline -o - > page.html
      hpctrain report --week --runs /scratch/ada/runs --runs /scratch/bob/runs
      hpctrain report --week 2026-W47 -o week.html --csv week.csv
    """
    of_team = week is not None or since is not None or until is not None
    if of_team and names:
        raise UsageError("a window of time is about all runs: name no run")
    if of_team:
        show_week(WeekRequest(week, since, until, runs, output, csv, as_json))
        return
    if not names:
        raise UsageError("no run is named", hint="`--week` is about the runs of the last week")
    if csv is not None or as_json:
        raise UsageError("--csv and --json go with --week, --since or --until")
    if len(runs) > 1:
        raise UsageError("several --runs go with --week, --since or --until")

    from hpctrain.actions.report import collect_reports
    from hpctrain.actions.runs import find_run, runs_directory
    from hpctrain.durable import replace_text
    from hpctrain.report.page import write_page
    from hpctrain.slurm.client import SlurmClient

    directory = runs_directory(runs[0] if runs else None)
    found = [find_run(directory, name) for name in dict.fromkeys(names)]
    with busy("Reading the run" if len(found) == 1 else "Reading the runs"):
        page = write_page(collect_reports(found, None if offline else SlurmClient()))
    if output is not None and str(output) == "-":
        click.echo(page, nl=False)
        return
    path = output or Path(f"{found[0].run_id}.html")
    replace_text(path, page, mode=0o600)
    click.echo(path)
