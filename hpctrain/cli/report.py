"""Command `report`: one HTML page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import RunName, runs_option
from hpctrain.cli.output import busy


@click.command()
@click.argument("names", metavar="RUN...", type=RunName(), nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="The file; - is stdout.  [default: RUN.html in this directory]",
)
@click.option("--offline", is_flag=True, help="Do not ask Slurm.")
@runs_option
def report(names: tuple[str, ...], output: Path | None, offline: bool, runs: Path | None) -> None:
    """Write one HTML page about a run: plan and reality, loss, time and its losses, nodes,
    memory, messages, checkpoints, events, software. Several runs are shown side by side.

    The page is one private file that loads nothing and runs no script: it can be kept, sent
    and printed. It is dark where the browser is.

    \b
    Examples:
      hpctrain report gpt175b-7f3a
      hpctrain report gpt175b-7f3a gpt175b-91c0 -o both.html
      hpctrain report gpt175b-7f3a --offline -o - > page.html
    """
    from hpctrain.actions.report import collect_reports
    from hpctrain.actions.runs import find_run, runs_directory
    from hpctrain.durable import replace_text
    from hpctrain.report.page import write_page
    from hpctrain.slurm.client import SlurmClient

    found = [find_run(runs_directory(runs), name) for name in dict.fromkeys(names)]
    with busy("Reading the run" if len(found) == 1 else "Reading the runs"):
        page = write_page(collect_reports(found, None if offline else SlurmClient()))
    if output is not None and str(output) == "-":
        click.echo(page, nl=False)
        return
    path = output or Path(f"{found[0].run_id}.html")
    replace_text(path, page, mode=0o600)
    click.echo(path)
