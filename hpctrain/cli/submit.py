"""`submit` and `resubmit`: handing a run to Slurm, or showing exactly what would be handed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import (
    RunName,
    confirm,
    json_option,
    profile_option,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.cli.output import say

if TYPE_CHECKING:
    from hpctrain.actions.prepare import Prepared
    from hpctrain.actions.submit import Submitted


@click.command()
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@profile_option
@set_option
@runs_option
@click.option("--dry-run", is_flag=True, help="Print the script on stdout and stop.")
@click.option("--check", is_flag=True, help="Have Slurm validate the script (sbatch --test-only).")
@click.option(
    "--template-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Templates of the site; they win over the packaged ones.",
)
@yes_option
@json_option
def submit(
    spec: Path,
    profile: str,
    overrides: tuple[str, ...],
    runs: Path | None,
    dry_run: bool,
    check: bool,
    template_dir: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan a run, render its job script and submit it.

    \b
    Examples:
      hpctrain submit --profile a100x64 examples/gpt175b.yaml --dry-run
      hpctrain submit --profile a100x64 examples/gpt175b.yaml --check
      hpctrain submit --profile a100x64 examples/gpt175b.yaml -y
    """
    from hpctrain.actions.prepare import prepare
    from hpctrain.actions.runs import runs_directory
    from hpctrain.cli.plan_text import continuation_lines, plan_lines

    if as_json and (dry_run or check):
        raise click.UsageError("--json tells what was submitted: not with --dry-run or --check")
    directory = runs_directory(runs)
    prepared = prepare(spec, profile, overrides, runs=directory, template_directory=template_dir)
    goes_on = continuation_lines(prepared.spec.document, prepared.profile.document)
    for line in (*plan_lines(prepared.plan), *goes_on):
        say(line)
    for warning in prepared.plan.warnings:
        say(f"warning: {warning}")
    if dry_run:
        click.echo(prepared.script, nl=False)
    if check:
        _check(prepared)
    if dry_run or check:
        return
    _submit(prepared, directory, yes=yes, as_json=as_json)


def _check(prepared: Prepared) -> None:
    from hpctrain.actions import submit as action
    from hpctrain.slurm.client import SlurmClient

    answer = action.check(prepared, SlurmClient())
    say(f"Slurm accepts the script: {answer.text}")


def _submit(prepared: Prepared, directory: Path, *, yes: bool, as_json: bool) -> None:
    from hpctrain.actions import submit as action
    from hpctrain.slurm.client import SlurmClient

    action.check_data(prepared)
    if not confirm(f"Submit to partition `{_partition(prepared)}`?", yes=yes):
        raise click.Abort
    submitted = action.submit(prepared, directory, SlurmClient())
    _announce(submitted, as_json=as_json)


def _partition(prepared: Prepared) -> str:
    """The partition that the script asks for; the planner has made sure that it exists."""
    wanted = prepared.spec.document.resources.partition
    partition = prepared.profile.document.slurm.partition(wanted)
    return partition.name if partition else "-"


@click.command()
@click.argument("run", type=RunName())
@runs_option
@yes_option
@json_option
def resubmit(run: str, runs: Path | None, yes: bool, as_json: bool) -> None:
    """Submit a stopped run again; it goes on from its newest verified checkpoint.

    \b
    Examples:
      hpctrain resubmit gpt175b-7f3a
    """
    from hpctrain.actions import submit as action
    from hpctrain.actions.runs import find_run, runs_directory
    from hpctrain.slurm.client import SlurmClient

    found = find_run(runs_directory(runs), run)
    if not confirm(f"Submit run `{found.run_id}` again?", yes=yes):
        raise click.Abort
    _announce(action.resubmit(found, SlurmClient()), as_json=as_json)


def _announce(submitted: Submitted, *, as_json: bool) -> None:
    if as_json:
        import json

        content = {"run_id": submitted.run_id, "job_id": submitted.job_id}
        click.echo(json.dumps({"schema_version": 1, "submitted": content}))
        return
    click.echo(submitted.run_id)
    say(f"Submitted run `{submitted.run_id}` as job {submitted.job_id}")
    if sys.stderr.isatty():
        say()
        say(f"To follow     hpctrain logs -f {submitted.run_id}")
        say(f"To see state  hpctrain status {submitted.run_id}")
        say(f"To cancel     hpctrain cancel {submitted.run_id}")
