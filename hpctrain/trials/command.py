"""Commands `compare`, `scale` and `sweep`: several runs of one spec, or predictions of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hpctrain.job.plan_command import GpuCounts
from hpctrain.page.options import (
    FieldName,
    ProfileName,
    confirm,
    json_option,
    profile_option,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.page.output import busy, json_out, say, table, terminal_width

if TYPE_CHECKING:
    from hpctrain.base.units import Duration
    from hpctrain.trials.trial_plans import Subject, TrialRequest


MakeRequest = Callable[["Subject"], "TrialRequest"]


class Walltime(click.ParamType[Any]):
    """`20min`, `00:20:00`"""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Duration:
        from hpctrain.base.units import Duration

        try:
            limit = Duration.accept(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if limit <= 0:
            self.fail("must be above 0", param, ctx)
        return limit


_OPTIONS = (
    click.option(
        "--profile", "-p", type=ProfileName(), help="Cluster profile: name or file. For a new one."
    ),
    set_option,
    click.option(
        "--predict", is_flag=True, help="Predictions of the planner only: no job, no file."
    ),
    click.option(
        "--steps",
        type=click.IntRange(3),
        default=20,
        show_default=True,
        metavar="N",
        help="Optimizer steps of each trial.",
    ),
    click.option("--walltime", type=Walltime(), help="Limit of each trial.  [default: 30min]"),
    click.option(
        "--at-a-time",
        type=click.IntRange(1),
        metavar="N",
        help="Jobs in the queue.  [default: all]",
    ),
    click.option("--no-wait", is_flag=True, help="Submit, show the present results, and return."),
    click.option(
        "--keep-checkpoints", is_flag=True, help="Otherwise those of finished trials are deleted."
    ),
    click.option(
        "--plot",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="File of the plot.  [default: in the directory of the comparison]",
    ),
    runs_option,
    yes_option,
    json_option,
)


def trial_options(function: Any) -> Any:
    """Add the options of both commands."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command()
@click.argument("spec", metavar="SPEC|DIRECTORY", type=click.Path(path_type=Path))
@click.option(
    "--engines",
    default="",
    metavar="ENGINE[:WORD][+WORD],...",
    help="Such as fsdp,deepspeed:zero2,deepspeed:zero3+offload.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="'NAME: FIELD=VALUE,...'",
    help="Anything else to try. May be repeated.",
)
@trial_options
def compare(spec: Path, engines: str, variants: tuple[str, ...], **options: Any) -> None:
    """Run variants of one spec for a few steps each, as Slurm jobs; then one table and one plot.

    Compares memory, speed, spread, agreement of losses, stability and costs, and recommends one.
    Failed trials are rows with their reason. With the DIRECTORY of a comparison: show it, and
    continue its unfinished trials.

    \b
    Examples:
      hpctrain compare gpt1300m.yaml -p a100x1 --engines fsdp,ddp --predict
      hpctrain compare gpt1300m.yaml -p a100x1 --engines fsdp,deepspeed:zero3
      hpctrain compare llama.yaml -p a100x1 --variant 'large: fsdp, batch.micro=4'
      hpctrain compare runs/compare-gpt1300m-52c1
    """
    from hpctrain.trials.compare import engines_request

    def request(subject: Subject) -> TrialRequest:
        return engines_request(subject, engines, variants, options["steps"], options["walltime"])

    _carry_out(spec, request, bool(engines or variants), "--engines or --variant", options)


@click.command()
@click.argument("spec", metavar="SPEC|DIRECTORY", type=click.Path(path_type=Path))
@click.option("--gpus", type=GpuCounts(), help="Numbers of GPUs: 1,2,4.")
@click.option("--weak", is_flag=True, help="Let the batch grow with the GPUs; the lr does not.")
@trial_options
def scale(spec: Path, gpus: tuple[int, ...] | None, weak: bool, **options: Any) -> None:
    """Run one spec on several numbers of GPUs for a few steps: speed-up, and shares of the time.

    The global batch stays the same (strong scaling), so that every size trains the same steps and
    the losses must agree with those of the smallest one.

    \b
    Examples:
      hpctrain scale gpt1300m.yaml -p a100x1 --gpus 2,4,8 --predict
      hpctrain scale gpt1300m.yaml -p a100x1 --gpus 1,2,4,8
      hpctrain scale gpt1300m.yaml -p a100x1 --gpus 1,2,4,8 --weak
    """
    from hpctrain.trials.compare import sizes_request

    def request(subject: Subject) -> TrialRequest:
        steps, walltime = options["steps"], options["walltime"]
        return sizes_request(subject, gpus or (), steps, walltime, weak=weak)

    _carry_out(spec, request, gpus is not None, "--gpus 1,2,4", options)


def _carry_out(
    spec: Path, request: MakeRequest, asked: bool, wanted: str, options: dict[str, Any]
) -> None:
    """Start a new comparison, or continue the one in the directory `spec`, and print it.

    `asked`: whether an option says what to compare, `wanted` names these options. Raises
    RunFailedError if no trial has worked, DoesNotFitError if none can be planned.
    """
    if spec.is_dir():
        if asked or options["profile"] or options["overrides"] or options["predict"]:
            raise click.UsageError("a comparison that exists has its variants, profile and fields")
    elif options["profile"] is None:
        raise click.UsageError("a spec needs a cluster: --profile NAME")
    elif not asked:
        raise click.UsageError(f"say what to compare: {wanted}, as in the examples of --help")
    from hpctrain.base.errors import DoesNotFitError, RunFailedError
    from hpctrain.records.find import runs_directory
    from hpctrain.records.sweeps import ComparisonLayout
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.trials.run_trials import TrialRunner, predict, read_record_of, start
    from hpctrain.trials.trial_plans import subject_of

    if options["plot"] is not None:
        from hpctrain.trials.comparison_plot import check_plot

        check_plot(options["plot"])
    layout, shown = None, ""
    if spec.is_dir():
        read_record_of(spec)  # reports a directory without a comparison before anything is printed
        layout = ComparisonLayout(spec.absolute())
    else:
        subject = subject_of(spec, options["profile"], options["overrides"])
        if options["predict"]:
            found = predict(subject, request(subject))
        else:
            layout = start(subject, request(subject), runs_directory(options["runs"]))
            trials = read_record_of(layout.directory).trials
            for one in trials:
                say(f"{one.name}: {'refused: ' + one.refusal if one.refusal else one.run_id}")
            jobs = sum(one.run_id is not None for one in trials)
            if jobs:
                confirm(f"Submit {jobs} jobs?", yes=options["yes"])
    if layout is not None:
        limit, wait = options["at_a_time"], not options["no_wait"]
        runner = TrialRunner(layout, SlurmClient(), say, limit, wait, options["keep_checkpoints"])
        here = Path.cwd()  # the directory as a user would type it here
        inside = layout.directory.is_relative_to(here)
        shown = (
            f"hpctrain compare {layout.directory.relative_to(here) if inside else layout.directory}"
        )
        try:
            found = runner.run()
        except KeyboardInterrupt:
            say(f"the trials continue in Slurm; `{shown}` shows them")
            raise
    if options["as_json"]:
        json_out("comparison", found)
    else:
        from hpctrain.trials import compare_text as text

        click.echo(f"{text.heading(found)}\n")
        for headers, rows in text.tables(found):
            table(headers, rows)
            click.echo()
        for lines in (text.reason_lines(found), text.note_lines(found)):
            if lines:
                click.echo("\n".join(lines) + "\n")
        if found.over:
            click.echo("\n".join(text.recommendation_lines(found)))
    plot = options["plot"] or (layout.plot if layout and found.over else None)
    drawable = any(t.measured if found.measured else t.peak_bytes for t in found.trials)
    if plot is not None and drawable:
        from hpctrain.trials.comparison_plot import can_plot, draw

        if can_plot():
            draw(found, plot)
            say(f"Plot  {plot}")
        else:
            say("no plot without matplotlib: pip install 'hpctrain[plots]'")
    if not found.over:
        say(f"not finished yet; `{shown}` continues")
    elif found.measured and not any(trial.succeeded for trial in found.trials):
        raise RunFailedError("no trial has worked: see the reasons above")
    elif not found.measured and all(trial.record.refusal for trial in found.trials):
        raise DoesNotFitError("no variant can be planned: see the reasons above")


# -- Commands `sweep`, `sweep status` and `sweep cancel`: one run for each point of a grid ------


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
    from hpctrain.trials.sweep_table import plan_lines

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
    for line in plan_lines(plan, at_a_time, terminal_width()):
        say(line)
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
    from hpctrain.trials.sweep_table import (
        csv_text,
        states_text,
        sweep_summaries,
        sweep_table,
        table_lines,
    )

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
            rows = [
                [one.sweep_id, str(one.points), ",".join(one.fields), states_text(one.states)]
                for one in found
            ]
            table(("SWEEP", "POINTS", "FIELDS", "STATES"), rows)
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
