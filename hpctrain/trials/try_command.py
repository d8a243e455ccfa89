"""Command `try`: rehearse a run on few nodes before it is trusted with a night."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from hpctrain.page.options import (
    Seconds,
    confirm,
    json_option,
    profile_option,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.page.output import json_out, say, table


@click.command("try")
@click.argument("spec", type=click.Path(path_type=Path))
@profile_option
@set_option
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Nodes to rehearse on, where the layout needs more than one.",
)
@click.option(
    "--limit",
    "limit_seconds",
    type=Seconds(),
    default="15min",
    show_default=True,
    help="Time limit of each job, and the longest wait for one thing while it runs.",
)
@click.option(
    "--wait",
    "patience_seconds",
    type=Seconds(),
    default="30min",
    show_default=True,
    help="How long a job may wait in the queue; then it is cancelled.",
)
@click.option("--keep", is_flag=True, help="Keep the runs, for looking, also if all is proved.")
@runs_option
@yes_option
@json_option
def try_(
    spec: Path,
    profile: str,
    overrides: tuple[str, ...],
    nodes: int,
    limit_seconds: float,
    patience_seconds: float,
    keep: bool,
    runs: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Rehearse a run: do to a short one what a bad night does, and say what was proved.

    Two jobs of a few minutes on one node, submitted as the run would be: one ends at its
    target; the other is warned as before a time limit, resumes, loses a rank, and finds its
    newest checkpoint truncated. The losses after each resume are compared with those of the
    launch that went on. Nothing of other runs is touched. Ctrl-C cancels the jobs.

    Exit code 0: all that the run promises was proved; 7: something was not.

    \b
    Examples:
      hpctrain try gpt1300m.yaml -p a100x1
      hpctrain try gpt175b.yaml -p a100x64 --set model.layers=4 --nodes 2
    """
    from hpctrain.base.errors import RunFailedError
    from hpctrain.records.find import runs_directory
    from hpctrain.records.rehearsals import rehearsals_directory
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.trials.rehearsal import RehearsalRequest, rehearse

    directory = runs_directory(runs)
    wanted = RehearsalRequest(
        spec, profile, overrides, nodes, limit_seconds, patience_seconds, keep
    )
    confirm("Submit the jobs of a rehearsal?", yes=yes)
    with _ended_by_hangup():
        done = rehearse(wanted, directory, SlurmClient(), say)
    if as_json:
        json_out("rehearsal", done)
    else:
        table(
            ("PROOF", "PROVED", "WHAT WAS SEEN"),
            [[one.topic, one.verdict, one.fact] for one in done.proofs],
        )
        click.echo(f"\nProved: {done.level_words}")
    if keep or done.missing:
        place = rehearsals_directory(directory)
        for run_id in done.run_ids:
            say(f"kept for looking: {place / run_id}; `hpctrain rm {run_id} --runs {place}`")
    if done.missing:
        message = f"not all that the run promises was proved: {done.level_words}"
        raise RunFailedError(message, hint="docs/rehearsal.md says what each proof means")


@contextlib.contextmanager
def _ended_by_hangup() -> Iterator[None]:
    """Let a lost terminal and a polite kill cancel the jobs, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
