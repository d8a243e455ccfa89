"""Commands `top`, `exporter` and `monitoring`: runs watched on a terminal, and by Prometheus."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base import clock
from hpctrain.observe.metrics_outlets import DEFAULT_ADDRESS
from hpctrain.page.options import RunName, Seconds, runs_option
from hpctrain.page.output import say

if TYPE_CHECKING:
    pass


# squeue(1), PERFORMANCE: no queries in a tight loop.
_EVERY_SECONDS = 10.0
# Linux's own console has no braille in its font (console_codes(4)).
_WITHOUT_BRAILLE = ("linux",)


@click.command()
@click.argument("names", nargs=-1, type=RunName(), metavar="[RUN]...")
@click.option("--all", "-a", "over", is_flag=True, help="Finished runs as well.")
@click.option(
    "--every",
    type=Seconds(),
    metavar="DURATION",
    help="Time between two looks; at least what the site allows.  [default: 10s]",
)
@runs_option
def top(names: tuple[str, ...], over: bool, every: float | None, runs: Path | None) -> None:
    """Show runs live: states, steps, loss, what is wrong; keys explain, save and stop.

    `?` lists the keys. Slurm is asked once per look, whatever the number of runs.

    \b
    Examples:
      hpctrain top
      hpctrain top gpt175b-7f3a --every 1min
    """
    from hpctrain.base.errors import HpctrainError, UsageError
    from hpctrain.records.find import all_runs, find_run, runs_directory
    from hpctrain.runs.status import poll_interval
    from hpctrain.slurm.client import SlurmClient

    # Textual draws on stderr.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("`top` needs a terminal", hint="`hpctrain status` prints the same once")
    if os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError(
            "this terminal cannot move its cursor (TERM=dumb)",
            hint="`hpctrain status -f` needs no cursor",
        )
    directory = runs_directory(runs)
    found = [find_run(directory, name) for name in names] if names else all_runs(directory)
    if every is not None:
        poll_interval(found, every)  # refuses what is too often

    from hpctrain.observe.top_screen import TopApp, TopOptions
    from hpctrain.runs.run_page import can_print_dots

    options = TopOptions(
        runs=directory,
        names=tuple(run.run_id for run in found) if names else (),
        wanted_seconds=_EVERY_SECONDS if every is None else every,
        over=over,
        dots=can_print_dots() and os.environ["TERM"] not in _WITHOUT_BRAILLE,
        colours=not os.environ.get("NO_COLOR"),
    )
    # The terminal knows its size, also when it changes; an exported variable would be believed.
    os.environ.pop("COLUMNS", None)
    os.environ.pop("LINES", None)
    app = TopApp(SlurmClient(), options)
    app.run(mouse=False)
    if app.return_code:
        raise HpctrainError(
            "the live view has ended by an error", hint="`hpctrain status` does not"
        )


# -- `exporter`: the metrics of runs for Prometheus, over HTTP or as a file for node_exporter ---


@click.command()
@click.option(
    "--runs",
    "directories",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of runs, several times for several.  [default: $HPCTRAIN_RUNS, else ./runs]",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where to serve /metrics; `:PORT` for every address of this host.  "
    f"[default: {DEFAULT_ADDRESS}, unless --textfile is given]",
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory of node_exporter's textfile collector, for one file with all runs.",
)
@click.option("--once", is_flag=True, help="One pass, to stdout or into --textfile; for cron.")
@click.option(
    "--every",
    type=Seconds(),
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="Time between two passes, each of which asks Slurm once for all runs.",
)
@click.option(
    "--since",
    type=Seconds(),
    default="2d",
    show_default=True,
    metavar="DURATION",
    help="Leave out runs that were done before.",
)
def exporter(
    directories: tuple[Path, ...],
    listen: str | None,
    textfile: Path | None,
    once: bool,
    every: float,
    since: float,
) -> None:
    """Export the metrics of runs in Prometheus' format: steps, loss, speed, goodput, money.

    Runs until it is interrupted. A scrape shows the last pass, so scrapes cost Slurm nothing.

    \b
    Examples:
      hpctrain exporter
      hpctrain exporter --runs /project/llm/runs --listen :9847
      hpctrain exporter --once --textfile /var/lib/prometheus/node-exporter
    """
    from hpctrain.observe.exporter import Exporter, ExporterSlurm
    from hpctrain.observe.metrics_outlets import MetricsServer, Textfile, parse_address
    from hpctrain.observe.samples import exposed
    from hpctrain.records.find import all_runs, runs_directory
    from hpctrain.records.requests import user_name
    from hpctrain.runs.status import poll_interval

    chosen = directories or (runs_directory(),)
    # Raises if the site asks for more time between two queries.
    poll_interval([run for one in chosen for run in all_runs(one)], every)
    source = Exporter(chosen, ExporterSlurm(), since)
    file = None if textfile is None else Textfile(textfile, user_name())
    if once:
        samples = source.samples()
        if file is None:
            click.echo(exposed(samples, open_metrics=True).decode(), nl=False)
        else:
            file.replace(samples)
        return
    server = None
    if listen is not None or file is None:
        server = MetricsServer(*parse_address(listen or DEFAULT_ADDRESS))
        host = (listen or DEFAULT_ADDRESS).rpartition(":")[0] or "0.0.0.0"
        say(f"Serving http://{host}:{server.port}/metrics every {every:g} s anew; Ctrl-C ends it")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while True:
        samples = source.samples()
        if server is not None:
            server.replace(samples)
        if file is not None:
            try:
                file.replace(samples)
            except OSError as error:  # a full disk ends no outlet
                say(f"{file.path}: {error.strerror or os.strerror(error.errno or 0)}")
        if clock.wait(ended, every):
            break
    if server is not None:
        server.close()
    if file is not None:
        file.remove()


# -- Command `monitoring`: files for administrators of Prometheus, Alertmanager and Grafana -----


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--list", "only_list", is_flag=True, help="Print what would be written.")
@click.option("--force", is_flag=True, help="Replace files that have another text.")
def monitoring(directory: Path | None, only_list: bool, force: bool) -> None:
    """Write what a site needs to watch runs: alert rules, Grafana dashboards with provisioning,
    and examples for Prometheus and Alertmanager, with a README of the steps.

    \b
    Examples:
      hpctrain monitoring --list
      hpctrain monitoring monitoring
      hpctrain monitoring /etc/hpctrain-monitoring --force
    """
    from hpctrain.observe import monitoring as action

    if only_list:
        for file in action.monitoring_files():
            click.echo(directory / file.path if directory else file.path)
        return
    if directory is None:
        raise click.UsageError("Missing argument 'DIRECTORY'.")
    written = action.write_monitoring(directory, force=force)
    say(f"Wrote {len(written)} files into {directory}; README.md has the steps")
