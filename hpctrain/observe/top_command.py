"""Command `top`: a live view of runs on a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hpctrain.page.options import RunName, Seconds, runs_option

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
