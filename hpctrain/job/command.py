"""Commands `submit` and `resubmit`: pass a run to Slurm, or show exactly what would be passed."""

from __future__ import annotations

import shlex
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import (
    RunName,
    confirm,
    json_option,
    profile_option,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.page.output import busy, json_out, line_width, say, warn
from hpctrain.page.text import Whole, facts

if TYPE_CHECKING:
    from hpctrain.job.job_submission import Submitted
    from hpctrain.job.prepare import PreparedRun
    from hpctrain.records.find import RunFiles


@click.command()
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@profile_option
@set_option
@runs_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the script on stdout and stop, with the exit code of `validate`.",
)
@click.option(
    "--prepare",
    "prepare_run",
    is_flag=True,
    help="Write the run directory, submit nothing: for somebody who reads it and starts it.",
)
@click.option(
    "--after",
    "after_run",
    type=RunName(),
    help="Start when this run is done; if it fails, never. Instead of `after` in the spec.",
)
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
    prepare_run: bool,
    after_run: str | None,
    check: bool,
    template_dir: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan a run, render its job script and submit it.

    \b
    Examples:
      hpctrain submit --profile a100x64 gpt175b.yaml --dry-run
      hpctrain submit --profile a100x64 gpt175b.yaml --check
      hpctrain submit --profile a100x64 gpt175b.yaml --prepare
      hpctrain submit --profile a100x64 gpt175b.yaml -y
      hpctrain submit --profile a100x64 fine-tune.yaml --after gpt175b-7b02
    """
    from hpctrain.job import submit as action
    from hpctrain.job.footprint import footprint_warnings
    from hpctrain.job.plan_text import run_lines
    from hpctrain.job.preflight import examine, input_words
    from hpctrain.job.prepare import Prepared
    from hpctrain.job.trainer_run import PreparedTrainerRun
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.slurm.client import SlurmClient

    if as_json and (dry_run or check or prepare_run):
        raise click.UsageError(
            "--json describes a submission: it cannot be used with --dry-run, --prepare or --check"
        )
    if after_run is not None and (dry_run or check or prepare_run):
        raise click.UsageError("--after is about a submission, and nothing would be submitted")
    if prepare_run and dry_run:
        raise click.UsageError("--dry-run writes nothing, and --prepare writes: give one of them")
    directory = runs_directory(runs)
    after = find_run(directory, after_run) if after_run is not None else None
    with busy("planning, and checking all that could end the run ..."):
        found = examine(spec, profile, overrides, runs=directory, template_directory=template_dir)
    prepared = found.prepared
    if prepared is None or not (dry_run or check):
        found.refuse()
    assert isinstance(prepared, Prepared | PreparedTrainerRun), "it has been refused"
    for line in run_lines(prepared, line_width(sys.stderr)):
        say(line)
    for warning in (*prepared.plan.warnings, *footprint_warnings(prepared)):
        warn(warning)
    if dry_run:
        click.echo(prepared.script, nl=False)
    if check:
        with busy("asking Slurm ..."):
            answer = action.check(prepared, SlurmClient())
        say(f"Slurm accepts the script: {answer.text}")
    found.refuse()
    if prepare_run:
        with busy("writing the run directory ..."):
            written = action.prepare_only(prepared, directory)
        _tell_prepared(written, prepared)
        return
    if dry_run or check:
        return
    note = action.first_start_note(prepared, directory)
    if note is not None:
        say(f"{note}: {shlex.join(['hpctrain', 'doctor', '--start', '-p', profile])}")
    rehearsed = action.rehearsal_note(prepared, directory)
    if rehearsed is not None:
        sentence, is_known = rehearsed
        say(
            sentence
            if is_known
            else f"{sentence}: hpctrain try {input_words(spec, profile, overrides)}"
        )
    confirm(f"Submit to partition `{prepared.job.partition.name}`?", yes=yes)
    with busy("writing the run directory, and submitting ..."):
        submitted = action.submit(prepared, directory, SlurmClient(), after)
    _announce(submitted, as_json=as_json)


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
    from hpctrain.job.job_submission import resubmit as submit_again
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.slurm.client import SlurmClient

    found = find_run(runs_directory(runs), run)
    confirm(f"Submit run `{found.run_id}` again?", yes=yes)
    with busy("submitting ..."):
        submitted = submit_again(found, SlurmClient())
    _announce(submitted, as_json=as_json)


def _tell_prepared(run: RunFiles, prepared: PreparedRun) -> None:
    """Print the run id, and how an administrator starts it without hpctrain."""
    from hpctrain.records.jobs import sbatch_options
    from hpctrain.records.supervise_config import read_supervise_config

    config = read_supervise_config(run.layout.supervise_config)
    options = sbatch_options(run.layout.directory, array=config.continuation == "array")
    click.echo(run.run_id)
    say(f"Prepared run `{run.run_id}`, nothing is submitted")
    say(f"To read    {run.layout.script}")
    if not run.layout.directory.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        say("           only you can read it; `run_access: group` in the profile shares runs")
    say(f"To submit  {run.command('resume')}")
    words = [*prepared.profile.document.slurm.submit_words, *options, str(run.layout.script)]
    say(f"By hand    {shlex.join(words)}")
    after = prepared.spec.document.after
    if after is not None:
        say(f"It is to wait for run `{after}`: `resume` sees to that, and sbatch by hand does not")


def _announce(submitted: Submitted, *, as_json: bool) -> None:
    from hpctrain.records.find import command_in

    if as_json:
        json_out("submitted", submitted)
        return
    click.echo(submitted.run_id)
    say(f"Submitted run `{submitted.run_id}` as job {submitted.job_id}")
    for line in submitted.answer.messages:
        say(f"The site says: {line}")
    for change in submitted.answer.changes:
        warn(change)
    if sys.stderr.isatty():
        say()
        for label, words in (("follow", "logs -f"), ("see state", "status"), ("cancel", "cancel")):
            command = command_in(submitted.directory.parent, words, submitted.run_id)
            say(*facts((f"To {label}", Whole(command)), margin=14))
