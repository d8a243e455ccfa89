"""Command `upgrade`: move a run to the hpctrain that is installed."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.options import RunName, confirm, runs_option, yes_option
from hpctrain.page.output import say
from hpctrain.runs.control_command import reason_option


@click.command()
@click.argument("run", type=RunName())
@reason_option
@runs_option
@yes_option
def upgrade(run: str, reason: str, runs: Path | None, yes: bool) -> None:
    """Move a run to the hpctrain that is installed, and accept the software it then finds.

    A run keeps the hpctrain with which it was submitted, whatever is installed meanwhile. After
    this its next attempt imports the installed one, and what that attempt finds (Python, packages,
    driver, image) becomes the software of the run (`supervise.software`). The attempt that runs
    goes on as it began.

    \b
    Examples:
      hpctrain upgrade gpt175b-7f3a
      hpctrain upgrade gpt175b-7f3a -y --reason "new driver on all nodes"
    """
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs import upgrade as action

    found = find_run(runs_directory(runs), run)
    confirm(f"Move run `{found.run_id}` to the installed hpctrain?", yes=yes)
    done = action.upgrade(found, reason)
    if done.moved:
        say(f"Run `{done.run_id}`: its next attempt imports {done.after} instead of {done.before}")
    else:
        say(f"Run `{done.run_id}` has {done.after} already")
    say("What its next launch finds installed becomes the software of the run")
