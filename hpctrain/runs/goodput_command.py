"""Command `goodput`: where the time of a run went."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.options import RunName, json_option, runs_option
from hpctrain.page.output import json_out


@click.command()
@click.argument("run", type=RunName())
@runs_option
@json_option
def goodput(run: str, runs: Path | None, as_json: bool) -> None:
    """Show where the time of a run went, and what each cause of interruptions has cost.

    \b
    Every moment counts once, from the first submission to now or to the end:
      productive     steps that are in the final weights
      redone steps   steps that were lost and are trained again
      saving         training stood still for a checkpoint
      starting       from the start of a launch to its first step
      detecting      from the last sign of life to the verdict
      restarting     from the verdict to the next launch
      down           an attempt that was lost without a word
      held           stopped or held; not counted in ETTR

    \b
    Examples:
      hpctrain goodput gpt175b-7f3a
      hpctrain goodput gpt175b-7f3a --json
    """
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs.goodput import goodput as account_for
    from hpctrain.runs.goodput_text import goodput_lines

    account = account_for(find_run(runs_directory(runs), run))
    if as_json:
        json_out("goodput", account)
        return
    for line in goodput_lines(account):
        click.echo(line)
