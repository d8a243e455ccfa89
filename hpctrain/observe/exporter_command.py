"""`exporter`: the metrics of runs for Prometheus, over HTTP or as a file for node_exporter."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base import clock
from hpctrain.observe.metrics_outlets import DEFAULT_ADDRESS
from hpctrain.page.options import Seconds
from hpctrain.page.output import say

if TYPE_CHECKING:
    from hpctrain.observe.metrics_outlets import MetricsServer, Textfile
    from hpctrain.observe.samples import Sample


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
    from hpctrain.observe.exposition import exposed
    from hpctrain.observe.metrics_outlets import MetricsServer, Textfile, parse_address
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
        _hand_out(source.samples(), server, file)
        if clock.wait(ended, every):
            break
    if server is not None:
        server.close()
    if file is not None:
        file.remove()


def _hand_out(samples: list[Sample], server: MetricsServer | None, file: Textfile | None) -> None:
    """Give the samples of a pass to all outlets; a full disk ends none of them."""
    if server is not None:
        server.replace(samples)
    if file is not None:
        try:
            file.replace(samples)
        except OSError as error:
            say(f"{file.path}: {error.strerror or os.strerror(error.errno or 0)}")
