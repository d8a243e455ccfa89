"""`profile detect`, `profile check` and `doctor`: what a site is, and what will work there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import ProfileName, Seconds, json_option, runs_option
from hpctrain.page.output import busy, json_out, say
from hpctrain.page.text import marked, paragraph
from hpctrain.page.words import counted

if TYPE_CHECKING:
    from hpctrain.site.doctor import SiteFinding
    from hpctrain.site.first_start import StartRequest


@click.group()
def profile() -> None:
    """Make a profile of a cluster by asking it, or compare a profile with it.

    `hpctrain profiles` lists the profiles that there are.

    \b
    Examples:
      hpctrain profile detect -o sites/ours.yaml
      hpctrain profile check ours
    """


@profile.command()
@click.option("--partition", help="Describe the nodes of this partition.  [default: most GPUs]")
@click.option("--gpu", "model", help="The GPU, as in the catalogue, where Slurm does not say it.")
@click.option("--in-job", is_flag=True, help="Let one short job look at a node: GPUs, network.")
@click.option("--account", help="Account that pays for that job.")
@click.option(
    "--wait",
    "patience_seconds",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds until that job must have ended; then it is cancelled.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: stdout]",
)
@runs_option
def detect(
    partition: str | None,
    model: str | None,
    in_job: bool,
    account: str | None,
    patience_seconds: float,
    output: Path | None,
    runs: Path | None,
) -> None:
    """Ask the Slurm of this machine what it is, and write a profile.

    Every value has a comment: where it was read, what it is guessed from, or what you
    are asked. Takes eight queries at most. With --in-job a job on one node reads what
    only nodes know; inside an allocation a job step does.

    \b
    Examples:
      hpctrain profile detect
      hpctrain profile detect --partition h100 --in-job --account me -o h100.yaml
    """
    from hpctrain.records.find import runs_directory
    from hpctrain.site.read_site import detect as action

    found = action(
        runs_directory(runs),
        partition=partition,
        model=model,
        in_job=in_job,
        account=account,
        patience_seconds=patience_seconds,
        output=output,
        say=say,
    )
    if output is None:
        click.echo(found.profile.text, nl=False)
    for remark in found.profile.remarks:
        say("\n".join(paragraph(remark, "- ")))
    say(f"{found.queries} queries; {len(found.profile.guessed)} values are guesses: check them")
    for path in found.profile.guessed:
        say(f"  {path}")
    asked = found.profile.asked
    if asked:
        say(f"{counted(len(asked), 'question')} to you, at the value behind `# ASK:`:")
    for path, question in asked.items():
        say("\n".join(paragraph(f"{path}: {question}", "  ")))
    if output is not None:
        say(f"Wrote {output}")


@profile.command(short_help="Compare a profile with the cluster: each difference.")
@click.argument("name", type=ProfileName())
@runs_option
@json_option
def check(name: str, runs: Path | None, as_json: bool) -> None:
    """Compare a profile with the cluster: each difference, and what it leads to.

    Exit code 0: nothing that matters; 3: the profile is wrong; 5: no answer from Slurm.

    \b
    Examples:
      hpctrain profile check ours
      hpctrain profile check sites/ours.yaml --json
    """
    from hpctrain.base.errors import InvalidInputError, Problem
    from hpctrain.records.find import runs_directory
    from hpctrain.site.read_site import check as action

    done = action(name, runs_directory(runs))
    if as_json:
        json_out("differences", done.differences)
    for one in () if as_json else done.differences:
        place = done.profile.problem(one.field, "").line
        where = f"{done.profile.file}:{place}: " if place else ""
        click.echo("\n".join(paragraph(f"{where}{one.sentence}", f"{one.severity}: ", hang=2)))
    matters = [one for one in done.differences if one.matters]
    if not done.differences:
        say(f"{done.profile.file} is what the cluster is, as far as Slurm can say")
    say(f"{done.queries} queries")
    if matters:
        message = f"{len(matters)} of {len(done.differences)} differences matter"
        hint = "correct the profile, or detect it anew: hpctrain profile detect"
        raise InvalidInputError([Problem(message, file=done.profile.file, hint=hint)])


@click.command()
@click.option("--profile", "-p", "name", type=ProfileName(), help="Judge with this profile.")
@click.option("--start", is_flag=True, help="Let one small job start as a run would; needs -p.")
@click.option("--partition", help="Partition of that job.  [default: the profile's]")
@click.option("--account", help="Account that pays for that job.")
@click.option(
    "--gpus",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="GPUs of that job, where the site refuses jobs without.",
)
@click.option(
    "--wait",
    "patience_seconds",
    type=Seconds(),
    default="10min",
    show_default=True,
    help="How long to wait for that job; then it is cancelled.",
)
@click.option("--keep", is_flag=True, help="Keep that job, and its directory, for looking.")
@runs_option
@json_option
def doctor(
    name: str | None,
    start: bool,
    partition: str | None,
    account: str | None,
    gpus: int,
    patience_seconds: float,
    keep: bool,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Say in sentences what will work here: requeue, signals, grace, who pays, limits.

    Asks Slurm in one pass and submits nothing. Ends with what will not work.

    With --start one job on one node runs with the environment that the profile gives to
    every run, and reports whether a run would start: modules, interpreter, torch,
    interfaces, file systems, signals, requeue; and which field of the profile to change.
    Exit code 0: it works; 3: the profile is wrong; 5: Slurm refused or did not answer;
    8: the job has not started in time.

    \b
    Examples:
      hpctrain doctor
      hpctrain doctor --profile ours --json
      hpctrain doctor --start --profile ours
      hpctrain doctor --start -p ours --partition debug --account me --wait 1h
    """
    from hpctrain.base.errors import UsageError
    from hpctrain.records.find import runs_directory
    from hpctrain.site.read_site import examine

    directory = runs_directory(runs)
    if start and name is None:
        raise UsageError("--start needs a profile", hint="hpctrain doctor --start -p PROFILE")
    if not start and (partition or account or gpus or keep):
        raise UsageError("--partition, --account, --gpus and --keep are for --start")
    if name is not None and start:
        from hpctrain.site.first_start import StartRequest

        wanted = StartRequest(partition, account, gpus, patience_seconds, keep)
        _check_start(name, directory, wanted, as_json=as_json)
        return
    done = examine(directory, name)
    if as_json:
        json_out("findings", done.findings)
    else:
        for line in _lines(done.findings, complete=done.unreachable is None):
            click.echo(line)
    say(f"{done.queries} queries")
    if done.unreachable is not None:
        raise done.unreachable


def _check_start(name: str, directory: Path, wanted: StartRequest, *, as_json: bool) -> None:
    from hpctrain.base.errors import InvalidInputError, NotConfirmedError
    from hpctrain.site.first_start import check_start
    from hpctrain.slurm.client import SlurmClient

    with busy("waiting for the job ..."):
        done = check_start(name, directory, SlurmClient(), wanted, say)
    if as_json:
        json_out("findings", done.findings, proof=done.proof)
    else:
        for line in _lines(done.findings, complete=done.outcome is not None):
            click.echo(line)
    if done.directory is not None:
        say(f"kept for looking: {done.directory}")
    if done.refusal is not None:
        raise done.refusal
    if done.failures:
        raise InvalidInputError(
            [
                done.profile.problem(one.field or "", one.sentence, one.change)
                for one in done.failures
            ]
        )
    outcome = done.outcome
    assert outcome is not None
    if not outcome.is_confirmed or outcome.task is None:
        waited = f"{wanted.patience_seconds:.0f} s"
        kept = "" if wanted.keep else "; it was cancelled"
        message = f"job {outcome.job_id} has not shown a start within {waited}{kept}"
        raise NotConfirmedError(
            message, hint="--wait gives it more time, --partition another queue"
        )
    say(f"The first start of profile {done.profile.document.name} works")


def _lines(findings: tuple[SiteFinding, ...], *, complete: bool) -> list[str]:
    lines = []
    for one in findings:
        lines += marked(one.state, one.sentence)
    for state, head in (
        ("limited", "What works with limits:"),
        ("unknown", "What could not be found out:"),
        ("fails", "What will not work:"),
    ):
        chosen = [one for one in findings if one.state == state]
        if chosen:
            lines += ["", head]
        for one in chosen:
            lines += paragraph(f"{one.sentence} [{one.source}]", "- ")
            change = [f"`{one.field}`"] if one.field else []
            change += [one.change] if one.change else []
            lines += paragraph(": ".join(change), "  -> ")
    if complete and not any(one.state == "fails" for one in findings):
        lines += ["", "What will not work: nothing was found."]
    return lines
