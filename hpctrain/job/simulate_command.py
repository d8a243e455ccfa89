"""Command `simulate`: play a run with failures before it is submitted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.base.units import short_duration
from hpctrain.page.options import (
    ProfileName,
    Seconds,
    json_option,
    pace_options,
    runs_option,
    set_option,
)
from hpctrain.page.output import busy, json_out
from hpctrain.page.text import columns_text, facts

if TYPE_CHECKING:
    from hpctrain.job.simulation import Interval, Simulation
    from hpctrain.simulate.monte_carlo import Goal
    from hpctrain.simulate.scenario import MixName


class IntervalList(Seconds):
    """`10min,spec,auto`: the spec's own interval, and Daly's."""

    name = "duration|spec|auto,..."

    def convert(  # type: ignore[override]
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Interval, ...]:
        if isinstance(value, tuple):
            return value
        found: list[Interval] = []
        for word in (part.strip() for part in str(value).split(",")):
            if word == "auto":
                found.append("auto")
                continue
            if word == "spec":
                found.append("spec")
                continue
            seconds = self._read(word, param, ctx)
            if seconds == 0:
                self.fail("an interval must be above 0", param, ctx)
            found.append(seconds)
        return tuple(found)


class CountList(click.ParamType[tuple[int, ...]]):
    """`0,1,2,4`"""

    name = "N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() for word in words):
            self.fail(f"`{value}` is no list of numbers such as `0,1,2,4`", param, ctx)
        return tuple(int(word) for word in words)


# options whose field of a scenario has another name
_FIELDS = {
    "node_failures_per_day": "failures_per_node_day",
    "save_stall": "save_stall_seconds",
    "save_write": "save_write_seconds",
    "restart": "restart_seconds",
    "walltime": "walltime_seconds",
}
_NUMBERS = (
    ("gpus_per_node", click.IntRange(1), "GPUs of one node.  [default: 8]"),
    (
        "node_failures_per_day",
        click.FloatRange(0),
        "Failures of one node in a day, of all kinds.  [default: 0.0065]",
    ),
    ("step_seconds", click.FloatRange(0, min_open=True), "One optimizer step.  [default: 10]"),
    ("save_stall", Seconds(), "How long a save stops training.  [default: 5s]"),
    ("save_write", Seconds(), "From then until it is durable.  [default: 60s]"),
    ("restart", Seconds(), "From a launch to its first step.  [default: 10min]"),
    ("walltime", Seconds(), "Time limit of one attempt.  [default: none]"),
    ("days", click.FloatRange(0, min_open=True), "Days of undisturbed training.  [default: 30]"),
    ("cluster_nodes", click.IntRange(1), "Nodes of the cluster.  [default: no limit]"),
)


def number_options(function: Any) -> Any:
    """Add an option for each entry of `_NUMBERS`."""
    for name, kind, text in reversed(_NUMBERS):
        option = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)
        function = option(function)
    return function


@click.command()
@click.argument("spec", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--profile", "-p", type=ProfileName(), help="Cluster profile: name or file.")
@set_option
@click.option("--gpus", type=click.IntRange(1), help="Instead of a spec: GPUs that train.")
@number_options
@click.option("--requeue-wait", type=Seconds(), default=0.0, help="Mean wait in the queue.")
@click.option(
    "--causes",
    type=click.Choice(["llama3", "byterobust", "nodes", "crashes"]),
    default="llama3",
    show_default=True,
    help="What runs die of.",
)
@click.option(
    "--spares",
    type=CountList(),
    default="0,1,2,4",
    show_default=True,
    help="Numbers of spare nodes to compare.",
)
@click.option(
    "--interval",
    "intervals",
    type=IntervalList(),
    help="Times between checkpoints to compare; auto: Daly's.  [default: auto, and that of SPEC]",
)
@click.option(
    "--trials",
    type=click.IntRange(1, 100_000),
    help="Lives of the run to draw for each pair.  [default: 200, fewer of long runs]",
)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="The same seed draws the same lives."
)
@click.option(
    "--by",
    "goal",
    type=click.Choice(["gpu-hours", "time"]),
    default="gpu-hours",
    show_default=True,
    help="What the best combination is.",
)
@pace_options
@runs_option
@json_option
def simulate(
    spec: Path | None,
    profile: str | None,
    overrides: tuple[str, ...],
    gpus: int | None,
    requeue_wait: float,
    causes: MixName,
    spares: tuple[int, ...],
    intervals: tuple[Interval, ...] | None,
    trials: int | None,
    seed: int,
    goal: Goal,
    step_time: float | None,
    like: str | None,
    runs: Path | None,
    as_json: bool,
    **numbers: float | int | None,
) -> None:
    """Play a run with failures: which interval, how many spare nodes, does it reach the end?

    What follows a failure is decided by the policy that the supervisor uses in the job. Give a
    spec with --profile, or --gpus and numbers.

    \b
    Examples:
      hpctrain simulate -p a100x64 gpt175b.yaml --spares 0,1,2
      hpctrain simulate --gpus 16384 --node-failures-per-day 0.0038 --days 54
      hpctrain simulate --gpus 1024 --interval 10min,30min,1h,auto --spares 0,2
    """
    from hpctrain.job import simulation as action
    from hpctrain.job.trainer_forecast import refuse_pace
    from hpctrain.records.find import runs_directory

    given = {name: number for name, number in numbers.items() if number is not None}
    if (spec is None) == (gpus is None):
        raise click.UsageError("give either a spec with --profile, or --gpus")
    if (spec is None) != (profile is None):
        raise click.UsageError("a spec and --profile go together")
    if spec is None and overrides:
        raise click.UsageError("--set changes a spec, and there is none")
    if spec is not None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{names}: with a spec, these come from spec and profile")
    prices = None
    if spec is not None and profile is not None:
        scenario, prices, notes = action.scenario_of_spec(
            spec,
            profile,
            overrides,
            causes,
            requeue_wait,
            step_time,
            like,
            runs_directory(runs),
        )
    else:
        refuse_pace(step_time, like)
        fields = {_FIELDS.get(name, name): number for name, number in given.items()}
        if fields.get("walltime_seconds") == 0:
            fields["walltime_seconds"] = math.inf
        assert gpus is not None, "checked above"
        bare: dict[str, Any] = {**fields, "mix": causes, "queue_wait_seconds": requeue_wait}
        scenario, notes = action.scenario_of_numbers(gpus, **bare)
    written = None if spec is None else action.Written.of(scenario)
    with busy("playing runs with failures ..."):
        simulation = action.simulate(
            *(scenario, spares, intervals, trials, seed, goal, prices, notes), written=written
        )
    if as_json:
        json_out("simulation", simulation)
        return
    for line in simulation_lines(simulation):
        click.echo(line)


# -- Formats the results of simulated runs, in lines of at most 80 columns ----------------------


_HEADS = ("SPARES", "INTERVAL", "ETTR", "5-95 %", "DAYS", "GPU-HOURS", "STOPPED", "")


def simulation_lines(simulation: Simulation) -> list[str]:
    """Format the scenario, one row for each combination, and the best one in detail."""
    choice, scenario = simulation.choice, simulation.scenario
    best = choice.outcomes[choice.best]
    played = (
        f"{scenario.gpus:,} GPUs on {scenario.nodes:,} nodes, "
        f"{scenario.work_seconds / 86400:.1f} d of training; a failure per "
        f"{short_duration(min(scenario.mttf_seconds, 1e12))}; a save stops training for "
        f"{short_duration(scenario.save_stall_seconds)}; restart "
        f"{short_duration(scenario.restart_seconds)}; {choice.outcomes[0].trials:,} runs each"
    )
    rows = [
        (
            f"{one.spare_nodes:,}",
            short_duration(one.interval_seconds),
            f"{one.ettr.mean:.3f}",
            f"{one.ettr.p5:.3f}-{one.ettr.p95:.3f}",
            f"{one.days.mean:,.1f}",
            f"{one.gpu_hours.mean:,.0f}",
            f"{one.stopped:.0%}",
            _mark(simulation, index),
        )
        for index, one in enumerate(choice.outcomes)
    ]
    # In a mean run, the largest first.
    total = sum(best.seconds.values())
    lost = ", ".join(
        f"{name} {seconds / total:.2%}"
        for name, seconds in sorted(best.seconds.items(), key=lambda item: -item[1])
        if seconds > 0 and name != "productive"
    )
    costs = ", ".join(
        f"{name.replace('_', ' ')} {short_duration(seconds)}"
        for name, seconds in sorted(best.lost_seconds.items(), key=lambda item: -item[1])[:5]
        if seconds > 0
    )
    events = f"{best.failures:,.1f} failures and {best.requeues:,.1f} requeues in a run"
    days = f"{best.days.mean:,.1f} ({best.days.p5:,.1f} to {best.days.p95:,.1f})"
    finish = (
        f"in {days} d; ETTR {best.ettr.mean:.1%} with the queue, "
        f"{best.ettr_without_queue.mean:.1%} without"
    )
    if simulation.price_per_gpu_hour is not None:
        amount = best.gpu_hours.mean * simulation.price_per_gpu_hour
        finish += f"; {amount:,.0f} {simulation.currency}"
    spares = (
        f"{best.spare_nodes} by these trials; the 95 % quantile of the nodes lost in "
        f"{short_duration(choice.poisson_seconds)}, one attempt, is {choice.poisson_spares}"
    )
    return [
        *facts(("Played", played)),
        "",
        *columns_text(_HEADS, rows, [True] * 7 + [False]),
        "",
        *facts(
            ("Best", "; ".join(choice.reasons)),
            ("Lost", lost or "nothing"),
            ("Causes", f"{events}; {costs or 'nothing is lost'}"),
            ("Finish", finish),
            ("Spares", spares),
            *(("Assumed", note) for note in simulation.assumptions),
        ),
    ]


def _mark(simulation: Simulation, index: int) -> str:
    """Tell which row is the spec's own, and which is the best of several."""
    one, written = simulation.choice.outcomes[index], simulation.written
    marks = []
    if written is not None and (one.spare_nodes, one.interval_seconds) == (
        written.spare_nodes,
        written.interval_seconds,
    ):
        marks.append("spec")
    if index == simulation.choice.best and len(simulation.choice.outcomes) > 1:
        marks.append("best")
    return ", ".join(marks)
