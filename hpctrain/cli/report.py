"""Command `report`: one HTML page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import RunName, Seconds, runs_option
from hpctrain.cli.output import busy


@click.command()
@click.argument("names", metavar="[RUN]...", type=RunName(), nargs=-1)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="The file; - is stdout.  [default: RUN.html in this directory]",
)
@click.option("--offline", is_flag=True, help="Do not ask Slurm.")
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
@runs_option
def report(
    names: tuple[str, ...],
    output: Path | None,
    offline: bool,
    dashboards: bool,
    url: str | None,
    range_seconds: float | None,
    require_data: bool,
    runs: Path | None,
) -> None:
    """Write one HTML page about a run: plan and reality, loss, time and its losses, nodes,
    memory, messages, checkpoints, events, software. Several runs are shown side by side.

    The page is one private file that loads nothing and runs no script: it can be kept, sent
    and printed. It is dark where the browser is.

    \b
    Examples:
      hpctrain report gpt175b-7f3a
      hpctrain report gpt175b-7f3a gpt175b-91c0 -o both.html
      hpctrain report gpt175b-7f3a --offline -o - > page.html
      hpctrain report --dashboards --prometheus http://127.0.0.1:9090
    """
    if dashboards != (url is not None):
        raise click.UsageError("--dashboards and --prometheus need each other")
    if url is not None:
        _write_dashboards(
            url, names, output or Path("dashboards.html"), range_seconds, require_data
        )
        return
    if range_seconds is not None or require_data:
        raise click.UsageError("--range and --require-data belong to --dashboards")
    if not names:
        raise click.UsageError("Missing argument 'RUN...'.")
    from hpctrain.actions.report import collect_reports
    from hpctrain.actions.runs import find_run, runs_directory
    from hpctrain.report.page import write_page
    from hpctrain.slurm.client import SlurmClient

    found = [find_run(runs_directory(runs), name) for name in dict.fromkeys(names)]
    with busy("Reading the run" if len(found) == 1 else "Reading the runs"):
        page = write_page(collect_reports(found, None if offline else SlurmClient()))
    _write(page, output or Path(f"{found[0].run_id}.html"))


def _write(page: str, output: Path) -> None:
    """Write the page to its private file and print the name, or to stdout."""
    from hpctrain.durable import replace_text

    if str(output) == "-":
        click.echo(page, nl=False)
        return
    replace_text(output, page, mode=0o600)
    click.echo(output)


def _write_dashboards(
    url: str,
    names: tuple[str, ...],
    output: Path,
    range_seconds: float | None,
    require_data: bool,
) -> None:
    """Write the page of dashboards; fail for a refused query, and for an empty panel if wished."""
    import time

    from hpctrain.actions.dashboards import collect_dashboards
    from hpctrain.errors import HpctrainError
    from hpctrain.observe.panels import DASHBOARDS
    from hpctrain.observe.prometheus_api import PrometheusServer
    from hpctrain.report.dashboard_page import write_dashboards

    with busy("Asking Prometheus"):
        found = collect_dashboards(
            PrometheusServer(url), DASHBOARDS, time.time(), names, range_seconds
        )
    _write(write_dashboards(found), output)
    panels = [(one.plan.short_name, panel) for one in found for panel in one.panels()]
    faults = [
        f"{name}, {one.panel.title}: {one.refusals[0]}" for name, one in panels if one.refusals
    ]
    if require_data:
        lacking = [(name, one) for name, one in panels if one.lacks_data and not one.refusals]
        faults += [f"{name}, {one.panel.title}: no data" for name, one in lacking]
    if faults:
        raise HpctrainError("Panels that are not complete:\n" + "\n".join(faults))
