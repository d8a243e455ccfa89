"""`diagnose`: why a run is as fast as it is."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.options import RunName, json_option, runs_option
from hpctrain.page.output import json_out


@click.command()
@click.argument("run", type=RunName())
@click.option("--no-prices", is_flag=True, help="Do not predict the effect of changes.")
@runs_option
@json_option
def diagnose(run: str, no_prices: bool, runs: Path | None, as_json: bool) -> None:
    """Say what a run's steps and its memory go into, what stands out, and what to change
    first, by gain: data loading, communication, slow ranks, the pipeline, gradient
    buckets, memory, saves, starts.

    Reads the run directory only: times of all ranks, metrics, saves, plan, and traces
    where the spec asked for some, as with  --set 'profile.steps=[50, 51]'

    \b
    Examples:
      hpctrain diagnose gpt175b-7f3a
      hpctrain diagnose gpt175b-7f3a --json
    """
    from hpctrain.diagnose.diagnose_text import diagnosis_lines
    from hpctrain.diagnose.of_run import diagnose as judge
    from hpctrain.records.find import find_run, runs_directory

    diagnosis = judge(find_run(runs_directory(runs), run), price=not no_prices)
    if as_json:
        json_out("diagnose", diagnosis)
        return
    for line in diagnosis_lines(diagnosis):
        click.echo(line)
