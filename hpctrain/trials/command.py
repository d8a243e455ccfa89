"""Commands `sweep`, `sweep status` and `sweep cancel`: one run for each point of a grid."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from hpctrain.page.options import (
    FieldName,
    confirm,
    json_option,
    profile_option,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.page.output import busy, json_out, say, table, terminal_width

if TYPE_CHECKING:
    from hpctrain.trials.sweep_plans import SweepPlan


class SweepGroup(click.Group):
    """A group whose default command is `submit`: `hpctrain sweep SPEC --grid ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["submit", *args]
        return super().parse_args(ctx, args)


class SweepName(click.ParamType[str]):
    """The name of a sweep or the start of one."""

    name = "sweep"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from hpctrain.records.find import runs_directory
        from hpctrain.records.sweeps import all_sweeps

        names = [one.directory.name for one in all_sweeps(runs_directory())]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.group(cls=SweepGroup)
def sweep() -> None:
    """Run a spec for all combinations of some values, and compare the results.

    `hpctrain sweep SPEC` is short for `hpctrain sweep submit SPEC`.

    \b
    Examples:
      hpctrain sweep gpt.yaml -p a100x64 --grid batch.global=256,512 --at-a-time 2
      hpctrain sweep status
      hpctrain sweep status sweep-gpt-7f3a
      hpctrain sweep cancel sweep-gpt-7f3a
    """


@sweep.command(short_help="Plan and check all points, and submit a run for each.")
@click.argument("spec", type=click.Path(path_type=Path))
@profile_option
@click.option(
    "--grid",
    "grid",
    type=FieldName(),
    multiple=True,
    required=True,
    metavar="FIELD=VALUE,VALUE",
    help="Values of one field, as --set takes them. May be repeated: all combinations are run.",
)
@set_option
@click.option("--name", metavar="NAME", help="Name of the sweep.  [default: sweep-NAME-xxxx]")
@click.option(
    "--at-a-time",
    type=click.IntRange(1),
    metavar="N",
    help="Runs that may hold nodes at the same time.  [default: all]",
)
@click.option(
    "--max-gpu-hours",
    type=click.FloatRange(0, min_open=True),
    metavar="HOURS",
    help="Refuse a sweep whose forecasts add up to more.",
)
@click.option(
    "--skip-refused", is_flag=True, help="Leave out points that cannot run, instead of refusing."
)
@click.option(
    "--template-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Templates of the site, as for `submit`.",
)
@click.option("--dry-run", is_flag=True, help="Show the points and stop; nothing is written.")
@runs_option
@yes_option
@json_option
def submit(
    spec: Path,
    profile: str,
    grid: tuple[str, ...],
    overrides: tuple[str, ...],
    name: str | None,
    at_a_time: int | None,
    max_gpu_hours: float | None,
    skip_refused: bool,
    template_dir: Path | None,
    dry_run: bool,
    runs: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan and check all points, show their forecasts, and submit a run for each.

    Given again, it submits the points that have no job yet, and no point twice.

    \b
    Examples:
      hpctrain sweep gpt.yaml -p a100x64 --grid optimizer.lr=1e-4,3e-4 --dry-run
      hpctrain sweep gpt.yaml -p a100x1 --grid batch.global=64,128 --grid seed=1,2
      hpctrain sweep gpt.yaml -p a100x64 --grid seed=1,2,3 --max-gpu-hours 500
    """
    from hpctrain.records.find import command_in, runs_directory
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.trials.sweep import submit_sweep
    from hpctrain.trials.sweep_plans import SweepRequest, plan_sweep

    request = SweepRequest(
        spec=spec,
        profile=profile,
        grid=grid,
        overrides=overrides,
        name=name,
        at_a_time=at_a_time,
        most_gpu_hours=max_gpu_hours,
        skip_refused=skip_refused,
        template_directory=template_dir,
    )
    directory = runs_directory(runs)
    with busy("planning all points ..."):
        plan = plan_sweep(request, directory)
    _show_plan(plan, at_a_time)
    if dry_run:
        if as_json:
            json_out("sweep", plan.record)
        return
    count = sum(one.runs for one in plan.points)
    confirm(f"Submit {count} runs to partition `{plan.partition}`?", yes=yes)
    done = submit_sweep(plan, SlurmClient(), at_a_time, say)
    if as_json:
        json_out("sweep", done.record)
    else:
        click.echo(plan.layout.directory.name)
    sweep_name = plan.layout.directory.name
    say(f"Sweep `{sweep_name}`: {done.new} of {done.submitted} runs submitted now")
    say(f"To see results  {command_in(directory, 'sweep status', sweep_name)}")


def _show_plan(plan: SweepPlan, at_a_time: int | None) -> None:
    from hpctrain.trials.sweep_text import plan_lines

    for line in plan_lines(plan, at_a_time, terminal_width()):
        say(line)


@sweep.command(short_help="Show the points of a sweep, the best result first.")
@click.argument("name", required=False, type=SweepName())
@click.option("--csv", "as_csv", is_flag=True, help="The table as comma-separated values.")
@runs_option
@json_option
def status(name: str | None, as_csv: bool, runs: Path | None, as_json: bool) -> None:
    """Show the points of a sweep, the best result first; without a name, list the sweeps.

    Sorted by the best evaluation loss, or by the training loss where nothing is evaluated.

    \b
    Examples:
      hpctrain sweep status
      hpctrain sweep status sweep-gpt-7f3a
      hpctrain sweep status sweep-gpt-7f3a --csv > results.csv
    """
    from hpctrain.records.find import runs_directory
    from hpctrain.records.sweeps import find_sweep
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.trials.sweep_table import sweep_summaries, sweep_table
    from hpctrain.trials.sweep_text import csv_text, summary_cells, table_lines

    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    directory = runs_directory(runs)
    if name is None:
        if as_csv:
            raise click.UsageError("--csv is the table of one sweep: give its name")
        found = sweep_summaries(directory, SlurmClient())
        if as_json:
            json_out("sweeps", found)
        elif not found:
            say("no sweeps here yet; `hpctrain sweep --help` shows how to start one")
        else:
            table(("SWEEP", "POINTS", "FIELDS", "STATES"), [summary_cells(one) for one in found])
        return
    shown = sweep_table(find_sweep(directory, name), SlurmClient())
    if as_json:
        json_out("sweep", shown)
    elif as_csv:
        click.echo(csv_text(shown), nl=False)
    else:
        for line in table_lines(shown, terminal_width()):
            click.echo(line)


@sweep.command(short_help="Cancel all runs of a sweep that are not over.")
@click.argument("name", type=SweepName())
@runs_option
@yes_option
def cancel(name: str, runs: Path | None, yes: bool) -> None:
    """Cancel all runs of a sweep that are not over, and submit none of its points any more.

    \b
    Examples:
      hpctrain sweep cancel sweep-gpt-7f3a
    """
    from hpctrain.base.errors import SlurmUnreachableError
    from hpctrain.records.find import runs_directory
    from hpctrain.records.sweeps import find_sweep
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.trials.sweep import cancel_sweep

    layout = find_sweep(runs_directory(runs), name)
    confirm(f"Cancel sweep `{layout.directory.name}`?", yes=yes)
    done = cancel_sweep(layout, SlurmClient())
    for run_id in done.cancelled:
        click.echo(run_id)
    say(f"{len(done.cancelled)} runs cancelled, {len(done.over)} were over")
    if done.failed:
        text = "\n".join(f"{run_id}: {reason}" for run_id, reason in done.failed)
        raise SlurmUnreachableError(text, hint="the same command tries again")
