"""Commands `compare` and `scale`: several short runs of one spec, or predictions of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.job.plan_command import GpuCounts
from hpctrain.page.options import ProfileName, json_option, runs_option, set_option, yes_option
from hpctrain.page.output import json_out, say, table

if TYPE_CHECKING:
    from hpctrain.base.units import Duration
    from hpctrain.records.sweeps import ComparisonLayout
    from hpctrain.trials.documents import Comparison
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
    """Start a new comparison, or continue the one in the directory `spec`.

    `asked`: whether an option says what to compare, `wanted` names these options.
    """
    if spec.is_dir():
        if asked or options["profile"] or options["overrides"] or options["predict"]:
            raise click.UsageError("a comparison that exists has its variants, profile and fields")
        from hpctrain.records.sweeps import ComparisonLayout
        from hpctrain.trials.run_trials import read_record_of

        _check_plot(options)
        read_record_of(spec)  # reports a directory without a comparison before anything is printed
        _run(ComparisonLayout(spec.absolute()), options)
        return
    if options["profile"] is None or not asked:
        if options["profile"] is None:
            raise click.UsageError("a spec needs a cluster: --profile NAME")
        raise click.UsageError(f"say what to compare: {wanted}, as in the examples of --help")
    from hpctrain.trials.compare import predict
    from hpctrain.trials.trial_plans import subject_of

    _check_plot(options)
    subject = subject_of(spec, options["profile"], options["overrides"])
    if options["predict"]:
        _show(predict(subject, request(subject)), options)
        return
    from hpctrain.page.options import confirm
    from hpctrain.records.find import runs_directory
    from hpctrain.trials import run_trials as trials

    layout = trials.start(subject, request(subject), runs_directory(options["runs"]))
    record = trials.read_record_of(layout.directory)
    for one in record.trials:
        say(f"{one.name}: {'refused: ' + one.refusal if one.refusal else one.run_id}")
    jobs = sum(one.run_id is not None for one in record.trials)
    if jobs:
        confirm(f"Submit {jobs} jobs?", yes=options["yes"])
    _run(layout, options)


def _run(layout: ComparisonLayout, options: dict[str, Any]) -> None:
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.trials.run_trials import TrialRunner

    limit, wait = options["at_a_time"], not options["no_wait"]
    runner = TrialRunner(layout, SlurmClient(), say, limit, wait, options["keep_checkpoints"])
    try:
        found = runner.run()
    except KeyboardInterrupt:
        say(f"the trials continue in Slurm; `hpctrain compare {_short(layout)}` shows them")
        raise
    _show(found, options, layout)


def _short(layout: ComparisonLayout) -> str:
    """Shorten the directory to how a user would type it here."""
    here = Path.cwd()
    inside = layout.directory.is_relative_to(here)
    return str(layout.directory.relative_to(here) if inside else layout.directory)


def _show(
    found: Comparison, options: dict[str, Any], layout: ComparisonLayout | None = None
) -> None:
    """Print a comparison and draw its plot.

    Raises RunFailedError if no trial has worked, DoesNotFitError if none can be planned.
    """
    if options["as_json"]:
        json_out("comparison", found)
    else:
        _print(found)
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
        assert layout is not None
        say(f"not finished yet; `hpctrain compare {_short(layout)}` continues")
        return
    from hpctrain.base.errors import DoesNotFitError, RunFailedError

    if found.measured and not any(trial.succeeded for trial in found.trials):
        raise RunFailedError("no trial has worked: see the reasons above")
    if not found.measured and all(trial.record.refusal for trial in found.trials):
        raise DoesNotFitError("no variant can be planned: see the reasons above")


def _check_plot(options: dict[str, Any]) -> None:
    if options["plot"] is not None:
        from hpctrain.trials.comparison_plot import check_plot

        check_plot(options["plot"])


def _print(found: Comparison) -> None:
    from hpctrain.trials import compare_text as text

    click.echo(f"{text.heading(found)}\n")
    sized = found.record.kind == "sizes"
    tables = [text.scale_rows(found)] if sized else [text.predicted_rows(found)]
    if found.measured:
        tables = [text.scale_rows(found), text.share_rows(found)]
        tables = tables if sized else [text.measured_rows(found), text.outcome_rows(found)]
    for headers, rows in tables:
        table(headers, rows)
        click.echo()
    for lines in (text.reason_lines(found), text.note_lines(found)):
        if lines:
            click.echo("\n".join(lines) + "\n")
    if found.over:
        click.echo("\n".join(text.recommendation_lines(found)))
