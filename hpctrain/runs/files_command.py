"""Commands `clean`, `archive`, `rm` and `checkpoints`: the files of runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hpctrain.base import clock
from hpctrain.base.units import short_bytes, short_duration
from hpctrain.page.options import RunName, confirm, json_option, runs_option, yes_option
from hpctrain.page.output import busy, json_out, say, table
from hpctrain.page.text import facts, or_dash
from hpctrain.records.find import find_run, runs_directory

if TYPE_CHECKING:
    from hpctrain.checkpoints.discover import Verified
    from hpctrain.runs.checkpoint_list import CheckpointReport, SaveInterval
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
    from hpctrain.runs import clean as action
    from hpctrain.slurm.client import SlurmClient

    found, slurm = find_run(runs_directory(runs), run), SlurmClient()
    action.refuse_to_remove(found, slurm)
    usage = action.size_of(found)
    amount = _amount(usage.files, usage.size_bytes)
    confirm(f"Remove run `{found.run_id}` ({amount}) for good?", yes=yes)
    action.remove(found, slurm)
    say(f"Removed run `{found.run_id}` ({amount})")


# -- Command `checkpoints`: list and verify the checkpoints of a run, and judge their interval --


_HEADERS = ("STEP", "EPOCH", "AGE", "SIZE", "FILES", "STALL", "PUBLISH", "CHECK", "KEPT")
_WIDTH, _MARGIN = 80, 12
_PROGRESS_SECONDS = 0.5


@click.command()
@click.argument("run", type=RunName())
@click.option(
    "--verify", is_flag=True, help="Read every byte and compare SHA-256; exit code 7 if one is bad."
)
@click.option(
    "--threads", type=click.IntRange(1, 64), default=8, show_default=True, help="Of --verify."
)
@runs_option
@json_option
def checkpoints(run: str, verify: bool, threads: int, runs: Path | None, as_json: bool) -> None:
    """List the checkpoints of a run, newest first: whether they are good and why they
    are kept, which are unfinished or in quarantine, free disk space, the cost of a save,
    and whether the interval between saves is a good one.

    Nothing is moved or deleted.

    \b
    Examples:
      hpctrain checkpoints gpt175b-7f3a
      hpctrain checkpoints gpt175b-7f3a --verify --threads 16
    """
    from hpctrain.runs.checkpoint_list import report_checkpoints

    found = find_run(runs_directory(runs), run)
    progress = progress_line() if verify and sys.stderr.isatty() else None
    seen = report_checkpoints(found, verify=verify, workers=threads, progress=progress)
    if as_json:
        json_out("checkpoints", seen)
    else:
        if seen.rows:
            table(
                _HEADERS,
                [
                    [
                        f"{row.step:,}",
                        or_dash(row.epoch),
                        _duration(row.age_seconds),
                        or_dash(None if row.size_bytes is None else short_bytes(row.size_bytes)),
                        or_dash(row.files),
                        _duration(row.stall_seconds),
                        _duration(row.publish_seconds),
                        "BAD" if row.problem else row.verified,
                        or_dash(", ".join(row.kept_because)),
                    ]
                    for row in seen.rows
                ],
            )
        else:
            click.echo("no checkpoint has been published yet")
        if seen.evaluations:
            from hpctrain.runs.evaluations import evaluation_lines

            click.echo()
            for line in evaluation_lines(seen.evaluations):
                click.echo(line)
        for line in _more_lines(seen):
            click.echo(line)
    if verify and seen.bad:
        from hpctrain.base.errors import CheckpointError
        from hpctrain.checkpoints.discover import AUTO_DEEP_LIMIT_BYTES

        good = next((row.step for row in seen.rows if row.problem is None), None)
        hint = "no checkpoint is good" if good is None else f"the newest good one is step {good:,}"
        if any((row.size_bytes or 0) > AUTO_DEEP_LIMIT_BYTES for row in seen.bad):
            hint += "; a launch would find it when its ranks load it, and step back"
        problems = "\n".join(f"step {row.step:,}: {row.problem}" for row in seen.bad)
        raise CheckpointError(problems, hint=hint)


def progress_line() -> Callable[[Verified], None]:
    """Make a callback that overwrites one line of the terminal, at most twice a second."""
    began_at, shown_at = clock.monotonic(), 0.0

    def show(verified: Verified) -> None:
        nonlocal shown_at
        now, last = clock.monotonic(), verified.files == verified.total_files
        if now - shown_at < _PROGRESS_SECONDS and not last:
            return
        shown_at = now
        rate = verified.read_bytes / max(now - began_at, 1e-6)
        text = (
            f"verifying: {short_bytes(verified.read_bytes)} of "
            f"{short_bytes(verified.total_bytes)}, {short_bytes(rate)}/s"
        )
        click.echo(
            f"\r{text:<{_WIDTH - 1}}" + ("\r" + " " * (_WIDTH - 1) + "\r" if last else ""),
            err=True,
            nl=False,
        )

    return show


def _duration(seconds: float | None) -> str:
    return or_dash(None if seconds is None else short_duration(seconds))


def _more_lines(seen: CheckpointReport) -> list[str]:
    """Format what the table does not show: bad and unfinished checkpoints, disk, interval."""
    named = [("Bad", f"step {row.step:,}: {row.problem}") for row in seen.bad]
    layouts = dict.fromkeys(row.layout for row in seen.rows if row.layout)
    named += [("Layout", layout) for layout in layouts]
    for one in seen.unfinished:
        state = "left by an older launch" if one.stale else "being written"
        ago = short_duration(one.changed_seconds_ago)
        text = f"{one.name}: {short_bytes(one.size_bytes)}, {state}, changed {ago} ago"
        named.append(("Unfinished", text))
    for bad in seen.quarantined:
        named.append(("Quarantine", f"{bad.name} ({short_bytes(bad.size_bytes)}): {bad.reason}"))
    fits = "" if seen.room.fits is None else f", room for {seen.room.fits:,} more"
    named.append(("Disk", f"{short_bytes(seen.room.free_bytes)} free{fits}"))
    if seen.interval is not None:
        named += _interval(seen.interval)
    return ["", *facts(*named, margin=_MARGIN)]


def _interval(interval: SaveInterval) -> list[tuple[str, str]]:
    seconds = interval.used_seconds
    used = "" if seconds is None else f", about {short_duration(seconds)}"
    named = [("Interval", f"{interval.configured}{used}")]
    if interval.stall_seconds is not None and interval.publish_seconds is not None:
        stall = short_duration(interval.stall_seconds)
        text = f"training stands still for {stall} a save, which counts after "
        named.append(("  measured", text + short_duration(interval.publish_seconds)))
    if interval.best_seconds is not None and interval.mttf_seconds is not None:
        steps = "" if interval.best_steps is None else f" ({interval.best_steps:,} steps)"
        text = f"{short_duration(interval.best_seconds)}{steps} by Young and Daly, with a failure "
        named.append(("  best", f"{text}every {short_duration(interval.mttf_seconds)}"))
    return [*named, ("  advice", interval.advice)]
