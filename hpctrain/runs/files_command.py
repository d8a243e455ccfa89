"""Commands `clean`, `archive` and `rm`: the files of runs, and getting rid of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hpctrain.page.options import RunName, confirm, runs_option, yes_option
from hpctrain.page.output import busy, say, table

if TYPE_CHECKING:
    from hpctrain.runs.clean import Cleaning


@click.command()
@click.argument("names", nargs=-1, required=True, type=RunName(), metavar="RUN...")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(
    "--keep-launches",
    type=click.IntRange(0),
    help="Keep logs and exit records of so many launches.  [default: logging.keep_launches]",
)
@click.option("--traces", is_flag=True, help="Also traces of profilers.")
@runs_option
@yes_option
def clean(
    names: tuple[str, ...],
    dry_run: bool,
    keep_launches: int | None,
    traces: bool,
    runs: Path | None,
    yes: bool,
) -> None:
    """Remove what runs do not need: remains of saves, old logs, stacks, caches.

    Never removes a checkpoint that counts, the ledger, metrics or the log of the job. While a job
    of the run is alive, what the newest launch may use stays.

    \b
    Examples:
      hpctrain clean gpt175b-7f3a --dry-run
      hpctrain clean gpt175b-7f3a --keep-launches 1 --traces -y
    """
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs import clean as action
    from hpctrain.slurm.client import SlurmClient

    slurm = SlurmClient()
    found = [find_run(runs_directory(runs), name) for name in names]
    plans = [
        action.plan_cleaning(run, slurm, keep_launches=keep_launches, traces=traces)
        for run in found
    ]
    _show(plans)
    if dry_run or not any(plan.waste for plan in plans):
        return
    confirm("Remove these files?", yes=yes)
    for run, plan in zip(found, plans, strict=True):
        if not plan.waste:
            continue
        action.clean(run, plan)
        say(f"Removed {_amount(plan.usage.files, plan.usage.size_bytes)} of run `{plan.run_id}`")


def _show(plans: list[Cleaning]) -> None:
    from hpctrain.base.units import short_bytes

    rows = [
        [plan.run_id, waste.kind, f"{waste.usage.files:,}", short_bytes(waste.usage.size_bytes)]
        for plan in plans
        for waste in plan.waste
    ]
    if rows:
        table(("RUN", "WHAT", "FILES", "SIZE"), rows)
    for plan in plans:
        if plan.in_use is not None:
            say(f"Run `{plan.run_id}`: {plan.in_use}, so what its newest launch may use stays")
        if not plan.waste:
            say(f"Run `{plan.run_id}` has nothing to remove")


def _amount(files: int, size_bytes: int) -> str:
    from hpctrain.base.units import short_bytes

    return f"{files:,} {'file' if files == 1 else 'files'}, {short_bytes(size_bytes)}"


@click.command()
@click.argument("run", type=RunName())
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write, compressed if it ends with .gz.  [default: ./RUN.tar.gz, or .tar "
    "with checkpoints]",
)
@click.option(
    "--with-checkpoints",
    type=click.Choice(["last", "none", "all"]),
    default="none",
    show_default=True,
    help="Weights to put into it: of the newest good checkpoint, of none, of all.",
)
@runs_option
def archive(
    run: str,
    output: Path | None,
    with_checkpoints: Literal["last", "none", "all"],
    runs: Path | None,
) -> None:
    """Pack a run into one tar file, with a listing and the digest of its content.

    The file is read back and compared. `tar xf FILE -C RUNS` brings the run back.

    \b
    Examples:
      hpctrain archive gpt175b-7f3a
      hpctrain archive gpt175b-7f3a --with-checkpoints last -o /archive/gpt.tar
    """
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs import archive as action
    from hpctrain.slurm.client import SlurmClient

    found = find_run(runs_directory(runs), run)
    path = output or action.default_output(found, with_checkpoints)
    with busy(f"packing run {found.run_id}, and reading it back ..."):
        made = action.archive(found, SlurmClient(), path, with_checkpoints)
    listing = made.listing
    say(f"Archived {_amount(len(listing.files), listing.size_bytes)} of run `{found.run_id}`")
    if listing.left_out_files:
        left_out = _amount(listing.left_out_files, listing.left_out_bytes)
        say(f"Left out: {left_out} of checkpoints (`--with-checkpoints`)")
    if listing.special_files:
        say(f"Left out: {len(listing.special_files)} that are no files")
    say(f"sha256 of the content, in {found.run_id}/{action.LISTING_NAME}: {listing.content_sha256}")
    click.echo(path)


@click.command()
@click.argument("run", type=RunName())
@runs_option
@yes_option
def rm(run: str, runs: Path | None, yes: bool) -> None:
    """Remove a run with its checkpoints and its history; nothing of it is kept.

    Refuses a run that has a job or is held. What its links point to stays, and so does what runs
    have recorded about nodes.

    \b
    Examples:
      hpctrain rm gpt175b-7f3a
      hpctrain rm gpt175b-7f3a -y
    """
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs import remove as action
    from hpctrain.slurm.client import SlurmClient

    found, slurm = find_run(runs_directory(runs), run), SlurmClient()
    action.refuse_to_remove(found, slurm)
    usage = action.size_of(found)
    amount = _amount(usage.files, usage.size_bytes)
    confirm(f"Remove run `{found.run_id}` ({amount}) for good?", yes=yes)
    action.remove(found, slurm)
    say(f"Removed run `{found.run_id}` ({amount})")
