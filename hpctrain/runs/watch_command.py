"""Command `watch`: one pass over all runs, for cron and monitoring."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from hpctrain.base.errors import HpctrainError
from hpctrain.base.units import short_duration
from hpctrain.page.options import json_option, runs_option
from hpctrain.page.output import json_out, say

_HINT = """\
# One pass every two minutes. A pass queries Slurm once, whatever the number of runs, and prints
# problems only, so that cron mails only then. Without --act it only reports.

# crontab -e, on a login node:
PATH={path}
*/2 * * * *  {program} watch --act --runs {runs}

# scrontab -e, where the site has it (scrontab(1)): a small job instead of a login node.
#SCRON --time=5
#SCRON --mem=1G
#SCRON --open-mode=append
#SCRON --output={runs}/.watch/scrontab.log
*/5 * * * *  {program} watch --act --runs {runs}

# In the monitoring of the site, on another host: non-zero when no recent pass was complete.
{program} watch --check-heartbeat 15min --runs {runs}
"""


@click.command()
@click.option("--act", is_flag=True, help="Apply remedies; without this only report them.")
@click.option(
    "--heartbeat",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File written after a complete pass.  [default: RUNS/.watch/heartbeat.json]",
)
@click.option(
    "--grace",
    default="2min",
    show_default=True,
    metavar="DURATION",
    help="How long after its end a job without a final record counts as lost.",
)
@click.option(
    "--check-heartbeat",
    "max_age",
    metavar="DURATION",
    help="Only check that the heartbeat is no older; exit code 1 if it is.",
)
@click.option("--install-hint", is_flag=True, help="Print lines for crontab and scrontab.")
@runs_option
@json_option
def watch(
    act: bool,
    heartbeat: Path | None,
    grace: str,
    max_age: str | None,
    install_hint: bool,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Check all runs once: submit lost ones again, release those that a fault has held.

    Never touches runs that their user has cancelled, held or stopped. Does nothing, and ends
    with exit code 5, when Slurm does not answer.

    \b
    Examples:
      hpctrain watch
      hpctrain watch --act
      hpctrain watch --check-heartbeat 15min
      hpctrain watch --install-hint
    """
    from hpctrain.base.errors import SlurmError, SlurmUnreachableError
    from hpctrain.records.find import runs_directory
    from hpctrain.records.watch_heartbeat import heartbeat_age_seconds, heartbeat_path
    from hpctrain.runs import watch as action
    from hpctrain.slurm.client import SlurmClient

    directory = runs_directory(runs)
    if install_hint:
        # cron's own PATH is short, so the hint contains the one with Slurm's commands
        squeue = shutil.which("squeue")
        directories = [os.path.dirname(squeue)] if squeue else []
        path = os.pathsep.join(dict.fromkeys([*directories, "/usr/bin", "/bin"]))
        program = shutil.which("hpctrain") or os.path.abspath(sys.argv[0])
        hint = _HINT.format(program=program, path=path, runs=directory.absolute())
        click.echo(hint, nl=False)
        return
    if max_age is not None:
        most_seconds = _seconds(max_age)
        file = heartbeat or heartbeat_path(directory)
        age_seconds = heartbeat_age_seconds(file)
        if age_seconds is None:
            raise HpctrainError(f"no heartbeat in {file}", hint="`hpctrain watch` writes it")
        age = short_duration(max(0.0, age_seconds))
        if age_seconds > most_seconds:
            raise HpctrainError(f"the heartbeat is {age} old: {file}")
        say(f"the heartbeat is {age} old")
        return
    seconds = _seconds(grace)
    result = action.watch(
        directory, SlurmClient(), act=act, heartbeat=heartbeat, grace_seconds=seconds
    )
    if as_json:
        json_out("watch", result)
    else:
        for one in result.seen:
            deed = {
                "would": f"would {one.remedy}",
                "done": f"{one.remedy}: {one.answer}",
                "failed": f"{one.remedy} FAILED: {one.answer}",
                "told": one.answer or "nothing is done",
            }[one.outcome]
            click.echo(f"{one.run_id}  {one.symptom}: {one.reason}  [{deed}]")
        for notice in result.notices:
            if notice.problem is not None:
                kinds = ", ".join(notice.kinds)
                click.echo(
                    f"{notice.run_id}  not told: {kinds}  [{notice.channel} FAILED: "
                    f"{notice.problem}]"
                )
        for line in result.evaluations:
            click.echo(line)
    if not result.complete:
        reasons = "; ".join(result.blind_because)
        kind = SlurmUnreachableError if result.slurm_silent else HpctrainError
        raise kind(f"this pass is incomplete: {reasons}", hint="no heartbeat was written")
    if result.failed:
        raise SlurmError("not everything could be done")
    if not (result.seen or result.evaluations) and sys.stderr.isatty():  # cron would mail the line
        elsewhere = f", {result.elsewhere} on other clusters" if result.elsewhere else ""
        say(f"{result.runs} runs, {result.open_runs} of them not over{elsewhere}: nothing to do")


def _seconds(text: str) -> float:
    from hpctrain.base.units import Duration

    try:
        return float(Duration.parse(text))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
