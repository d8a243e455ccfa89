"""Command `why`: the supervisor's last decision about a run, and its next ones."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base import clock
from hpctrain.page.options import RunName, json_option, runs_option
from hpctrain.page.output import json_out


@click.command()
@click.argument("run", type=RunName())
@runs_option
@json_option
def why(run: str, runs: Path | None, as_json: bool) -> None:
    """Explain the state of a run: the last cause and the action taken, the budget of
    each cause, why it waits, and what happens at the next failure.

    The last part applies the policy that the supervisor itself uses.

    \b
    Examples:
      hpctrain why gpt175b-7f3a
      hpctrain why gpt175b-7f3a --json
    """

    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs.why import why as explain
    from hpctrain.runs.why_text import why_lines
    from hpctrain.slurm.client import SlurmClient

    now = clock.now()
    explained = explain(find_run(runs_directory(runs), run), SlurmClient(), now)
    if as_json:
        json_out("why", explained)
        return
    for line in why_lines(explained, now):
        click.echo(line)
