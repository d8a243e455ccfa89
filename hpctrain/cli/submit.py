"""Commands `submit` and `resubmit`: pass a run to Slurm, or show exactly what would be passed."""

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
    help="Templates of the site: job.sbatch.j2, which replaces or extends the packaged one.",
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
    from hpctrain.actions import submit as action
    from hpctrain.actions.footprint import footprint_warnings
    from hpctrain.actions.input_checks import check_inputs
    from hpctrain.actions.prepare import prepare
    from hpctrain.actions.runs import runs_directory
    from hpctrain.cli.plan_text import continuation_lines, plan_lines
    from hpctrain.slurm.client import SlurmClient

    if as_json and (dry_run or check):
        raise click.UsageError(
            "--json describes a submission: it cannot be used with --dry-run or --check"
        )
    directory = runs_directory(runs)
    prepared = prepare(spec, profile, overrides, runs=directory, template_directory=template_dir)
    continuation = continuation_lines(prepared.spec.document, prepared.profile.document)
    for line in (*plan_lines(prepared.plan), *continuation):
        say(line)
    for warning in (*prepared.plan.warnings, *footprint_warnings(prepared)):
        say(f"warning: {warning}")
    if dry_run:
        click.echo(prepared.script, nl=False)
    if check:
        say(f"Slurm accepts the script: {action.check(prepared, SlurmClient()).text}")
    if dry_run or check:
        return
    check_inputs(prepared.spec)
    partition = prepared.profile.document.slurm.partition(
        prepared.spec.document.resources.partition
    )
    assert partition is not None, "the planner has checked the partition"
    if not confirm(f"Submit to partition `{partition.name}`?", yes=yes):
        raise click.Abort
    _announce(action.submit(prepared, directory, SlurmClient()), as_json=as_json)


@click.command()
@click.argument("run", type=RunName())
@runs_option
@yes_option
@json_option
def resubmit(run: str, runs: Path | None, yes: bool, as_json: bool) -> None:
    """Submit a stopped run again; it continues from its newest verified checkpoint.

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
