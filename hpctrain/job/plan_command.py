"""Command `plan`: the layout of a run, its speed and its cost, without Slurm."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import (
    json_option,
    pace_options,
    profile_option,
    runs_option,
    set_option,
)
from hpctrain.page.output import busy, json_out, line_width, say, table, warn
from hpctrain.page.text import paragraph

if TYPE_CHECKING:
    from hpctrain.engines.verification import Verification
    from hpctrain.job.plan import Inputs, Option
    from hpctrain.job.trainer_forecast import KnownPace
    from hpctrain.job.trainer_run import PreparedTrainerRun
    from hpctrain.plan.documents import Explanation, Goal
    from hpctrain.plan.forecast.documents import Budget, BudgetDecision


class GpuCounts(click.ParamType[tuple[int, ...]]):
    """`64,128,256`"""

    name = "N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"`{value}` is no list of GPU counts such as `64,128,256`", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.command()
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@profile_option
@set_option
@click.option("--explain", is_flag=True, help="Why this layout wins, and what others lose.")
@click.option(
    "--top",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    metavar="N",
    help="Other layouts that --explain shows.",
)
@click.option(
    "--by",
    "goal",
    type=click.Choice(["time", "gpu-hours", "memory"]),
    default="time",
    show_default=True,
    help="What the best layout is.",
)
@click.option("--gpus", "sizes", type=GpuCounts(), help="Compare these numbers of GPUs.")
@click.option("--budget", "money", metavar="AMOUNT", help="Cheapest plan within it: 200000usd.")
@click.option("--deadline", metavar="DURATION", help="Cheapest plan that ends by then: 30d.")
@click.option(
    "--apply",
    "write",
    is_flag=True,
    help="Choose layout and micro-batch, and the GPUs of --gpus or --budget; write them into SPEC.",
)
@click.option("--verify", is_flag=True, help="Compare with what megatron-core really builds.")
@pace_options
@runs_option
@json_option
def plan(
    spec: Path,
    profile: str,
    overrides: tuple[str, ...],
    explain: bool,
    top: int,
    goal: Goal,
    sizes: tuple[int, ...] | None,
    money: str | None,
    deadline: str | None,
    write: bool,
    verify: bool,
    step_time: float | None,
    like: str | None,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Show how a run would be laid out, whether it fits, how fast it is and what it costs.

    \b
    Examples:
      hpctrain examples gpt175b > gpt175b.yaml
      hpctrain plan --profile a100x64 gpt175b.yaml
      hpctrain plan -p a100x64 gpt175b.yaml --set parallel=auto --explain
      hpctrain plan -p a100x64 gpt175b.yaml --apply
      hpctrain plan -p a100x64 gpt175b.yaml --gpus 128,256,512 --by gpu-hours
      hpctrain plan -p a100x64 gpt175b.yaml --budget 1100000usd --deadline 70d
      hpctrain plan -p a100x64 my-trainer.yaml --step-time 1.9s
    """
    from hpctrain.job import plan as action
    from hpctrain.job.plan_text import answer_lines, decision_lines
    from hpctrain.job.preflight import input_words, ready_sentence, unplanned
    from hpctrain.job.prepare import load_any_inputs, load_knowledge
    from hpctrain.job.trainer_forecast import known_pace, refuse_pace
    from hpctrain.plan.forecast.options import check_currency, parse_budget
    from hpctrain.records.find import runs_directory
    from hpctrain.spec.trainer import TrainerRunSpec

    budget = parse_budget(money, deadline) if money or deadline else None
    loaded, site = load_any_inputs(spec, profile, overrides)
    named = spec.is_file()  # what was piped in has no name for another command
    directory = runs_directory(runs)
    if isinstance(loaded.document, TrainerRunSpec):
        from hpctrain.job.trainer_run import prepare_trainer

        _refuse_layout_options()
        prepared = prepare_trainer(
            loaded, site, spec.absolute().parent, runs=directory, template_directory=None
        )
        pace = known_pace(prepared.job, directory, step_time, like)
        ready = ready_sentence(spec, profile, overrides, directory) if named else None
        _plan_trainer(prepared, pace, budget, ready, as_json=as_json)
        return
    refuse_pace(step_time, like)
    inputs = action.Inputs(loaded.document, site.document, load_knowledge(site), loaded)
    if write:
        given = [override.partition("=")[0] for override in overrides]
        inputs = replace(inputs, spec=action.freed(inputs.spec, given))
    if budget is not None:
        check_currency(budget, inputs.profile)
    with busy("planning, and playing runs with failures ..."):
        options, option, decision = _decided(inputs, goal, sizes, budget)
        if option.refusal is not None:
            refusal = inputs.placed(option.refusal)
            if not write:
                unplanned(refusal, loaded, site).refuse("plan")
            raise refusal
        advice = None
        if not options and option.forecast is not None:
            words = input_words(spec, profile, overrides) if named else None
            advice = action.advise(inputs, option, goal, words)
    written = None
    if write and (decision is None or decision.chosen is not None):
        written = action.apply_plan(
            spec, profile, option, overrides
        )  # a closed pipe must not prevent it
    explained = action.explanation(inputs, option, goal, top) if explain else None
    built = None
    if verify:
        from hpctrain.job.verify import verify_plan

        assert option.decision is not None
        with busy("building the stages with megatron-core ..."):
            built = verify_plan(option.decision.job)
    if as_json:
        assert option.plan is not None
        json_out(
            "plan",
            option.plan,
            forecast=option.forecast,
            advice=advice,
            spot=action.spot_comparison(inputs, option, budget),
            budget=decision,
            explanation=explained,
            verification=built,
        )
    else:
        if options:
            from hpctrain.job.plan_text import option_rows

            table(*option_rows(options))
            click.echo()
        for line in decision_lines(decision, line_width(sys.stdout)) if decision else []:
            click.echo(line)
        ready = None
        if named and not options:
            ready = ready_sentence(spec, profile, overrides, directory)
        click.echo("\n".join(answer_lines(option, advice, ready, line_width(sys.stdout))))
        _print_option(inputs, option, budget)
        _print_more(option, explained, built)
    if written is not None:
        say(written)
    if decision is not None and decision.chosen is None:
        from hpctrain.base.errors import DoesNotFitError

        raise DoesNotFitError("no plan meets the budget: see what is missing above")
    if built is not None and not built.equal:
        from hpctrain.base.errors import HpctrainError

        raise HpctrainError("megatron-core builds other numbers of parameters than planned")


# Options about layouts, and why they say nothing of a trainer of its own.
_LAYOUT_OPTIONS = {
    "explain": "hpctrain chooses no layout for this trainer: there is nothing to explain",
    "goal": "hpctrain chooses no layout for this trainer: there is one plan",
    "sizes": "how fast this trainer is on other numbers of GPUs is not known",
    "write": "hpctrain chooses no layout for this trainer: there is nothing to write",
    "verify": "hpctrain builds no model for this trainer",
}


def _refuse_layout_options() -> None:
    """Raise UsageError for an option that was given and says nothing of a trainer of its own."""
    context = click.get_current_context()
    names = {one.name: one.opts[0] for one in context.command.params}
    for name, reason in _LAYOUT_OPTIONS.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{names[name]}: {reason}")


def _plan_trainer(
    prepared: PreparedTrainerRun,
    pace: KnownPace | None,
    budget: Budget | None,
    ready: str | None,
    *,
    as_json: bool,
) -> None:
    """Show the plan of a run with a trainer of its own: what is known, and what is not."""
    from hpctrain.base.errors import DoesNotFitError, UsageError
    from hpctrain.base.units import short_duration
    from hpctrain.job.plan import compared_tariffs
    from hpctrain.job.plan_text import (
        decision_lines,
        forecast_lines,
        run_lines,
        spot_lines,
        trainer_answer_lines,
    )
    from hpctrain.job.trainer_forecast import trainer_facts, unknown_time
    from hpctrain.plan.forecast.options import cheapest_plan, check_currency
    from hpctrain.simulate.forecasts import forecast_run
    from hpctrain.spec.trainer import LEVELS

    job = prepared.job
    if budget is not None:
        check_currency(budget, job.profile)
    facts, forecast, unknown = trainer_facts(job, pace), None, unknown_time(job)
    if facts is not None:
        try:
            with busy("playing runs with failures ..."):
                forecast = forecast_run(job, facts)
        except DoesNotFitError as error:
            unknown = f"{error}; {error.hint}"
    spot = decision = None
    if facts is not None and forecast is not None:
        spot = compared_tariffs(job, facts, forecast, budget)
        decision = None if budget is None else cheapest_plan([forecast], budget)
    elif budget is not None:
        raise UsageError("--budget and --deadline need a forecast, and there is none", hint=unknown)
    if as_json:
        json_out(
            "plan",
            prepared.plan,
            forecast=forecast,
            spot=spot,
            budget=decision,
            pace=pace,
            levels=LEVELS,
        )
    else:
        width = line_width(sys.stdout)
        lines = decision_lines(decision, width) if decision else []
        lines += trainer_answer_lines(forecast, unknown, ready, width)
        lines += run_lines(prepared, width)
        if forecast is not None and pace is not None:
            pace_text = f"{short_duration(pace.step_seconds)} a step, {pace.source}"
            lines += paragraph(pace_text, "Step      ", width=width)
            lines += forecast_lines(forecast, width)
        if spot is not None:
            lines += ["", *spot_lines(spot, width)]
        click.echo("\n".join(lines))
        for warning in prepared.plan.warnings:
            warn(warning)
    if decision is not None and decision.chosen is None:
        raise DoesNotFitError("no plan meets the budget: see what is missing above")


def _decided(
    inputs: Inputs, goal: Goal, sizes: tuple[int, ...] | None, budget: Budget | None
) -> tuple[list[Option], Option, BudgetDecision | None]:
    """Return the options to compare, the chosen one, and the decision within the budget."""
    from hpctrain.job import plan as action

    if sizes is None and budget is None:
        return [], action.plan_option(inputs, goal), None
    tried = sizes or action.sizes_to_try(inputs) or (inputs.spec.resources.gpus,)
    options = [action.plan_option(inputs, goal, gpus) for gpus in tried]
    best = action.best_option(options, goal)
    if budget is None:
        return options, best, None
    decision, chosen = action.within_budget(inputs, options, budget)
    shown = options if sizes else [one for one in options if one.plan is not None]
    return shown, chosen, decision


def _print_option(inputs: Inputs, option: Option, budget: Budget | None) -> None:
    """Print the plan, its forecast, stages, reasons and warnings."""
    from hpctrain.job.plan import spot_comparison
    from hpctrain.job.plan_text import (
        continuation_lines,
        forecast_lines,
        plan_lines,
        spot_lines,
        stage_rows,
    )

    assert option.decision is not None
    made, width = option.decision.plan, line_width(sys.stdout)
    continuation = continuation_lines(option.decision.job, width)
    for line in (*plan_lines(made, width), *continuation):
        click.echo(line)
    for line in forecast_lines(option.forecast, width) if option.forecast else []:
        click.echo(line)
    comparison = spot_comparison(inputs, option, budget)
    if comparison is not None:
        click.echo("\n" + "\n".join(spot_lines(comparison, width)))
    click.echo()
    table(*stage_rows(made))
    click.echo()
    for reason in made.reasons:
        click.echo("\n".join(paragraph(reason, "- ", width=width)))
    for warning in (*made.warnings, *([option.remark] if option.remark else [])):
        warn(warning)


def _print_more(option: Option, explained: Explanation | None, built: Verification | None) -> None:
    from hpctrain.job.plan_text import doubt_lines, explanation_lines

    if explained is not None:
        width = line_width(sys.stdout)
        doubt = doubt_lines(option.plan.certainty, width) if option.plan else []
        click.echo("\n" + "\n".join([*doubt, *explanation_lines(explained, width)]))
    if built is not None:
        from hpctrain.job.verify import verification_lines

        click.echo("\n" + "\n".join(verification_lines(built, line_width(sys.stdout))))
