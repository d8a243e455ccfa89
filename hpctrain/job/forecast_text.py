"""Formats a forecast as sentences and columns, wrapped at a width that the caller knows.

Belongs here: sentences and columns. Does not belong here: any number that is not in the documents.
"""

from __future__ import annotations

import re

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.page.text import LINE_WIDTH, facts
from hpctrain.plan.forecast.documents import (
    BudgetDecision,
    Forecast,
    SpotComparison,
)
from hpctrain.plan.forecast.options import days, days_column, days_range

_INDENT = 10
# textwrap breaks at ASCII white space only.
_TIE = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:d|h|min|s|ms|[KMGT]iB|[A-Z]{3}|GPUs|steps)\b)")


def forecast_lines(forecast: Forecast, width: int = LINE_WIDTH) -> list[str]:
    """Format the block that `plan` shows below the plan itself."""
    times = forecast.times
    slices = f" · {forecast.slices:,} time slices" if forecast.slices > 1 else ""
    waiting = f" + {days(times.waiting_seconds)} of waiting" if times.waiting_seconds >= 0.5 else ""
    time = (
        f"{days(times.total_seconds)} on average = {days(times.training_seconds)} of training "
        f"({forecast.steps:,} steps x {short_duration(forecast.step_seconds)}) at "
        f"{forecast.ettr:.1%} effective time{waiting}{slices}"
    )
    overheads = [
        f"{name} {days(getattr(times, f'{name}_seconds'))}"
        for name in ("evaluation", "saving", "redone", "starting", "detecting", "waiting")
        if getattr(times, f"{name}_seconds") >= 0.5
    ]
    if times.repair_seconds >= 0.01 * times.total_seconds:
        overheads[-1] += f", {days(times.repair_seconds)} of it for nodes to be repaired"
    cost = f"{forecast.gpu_hours:,.0f} GPU-hours on {forecast.gpus:,} GPUs"
    if forecast.cost is None:
        cost = f"{cost} (the profile has no prices)"
    else:
        price, currency = forecast.cost.per_gpu_hour, forecast.cost.currency
        tariff = forecast.cost.tariff
        cost = f"{forecast.cost.amount:,.0f} {currency} = {cost} x {price:g} {currency} ({tariff})"
    lines = [
        *_entry("Time", time, width),
        *_entry("", " · ".join(overheads), width),
        *_entry("Cost", cost, width),
        *_entry("Failures", _failures(forecast), width),
        *_entry("Saves", _saves(forecast), width),
        *_entry("Played", _played(forecast), width),
    ]
    for assumption in forecast.assumptions:
        lines += _entry("Assumed", str(assumption), width)
    for warning in forecast.warnings:
        lines += _entry("Warning", warning, width)
    return lines


def _played(forecast: Forecast) -> str:
    spread = forecast.spread
    if spread is None:
        return "no run, for there would be too many interruptions: means by closed forms"
    text = (
        f"{spread.trials} runs with the supervisor's policy (seed {spread.seed}), 90 of 100 within "
        f"{days_range(forecast)}; "
    )
    if spread.step_deviation:
        text += f"each has a step time of its own, ±{spread.step_deviation:.0%}"
    else:
        text += "the step time is taken as predicted"
    if spread.stopped:
        text += f"; {spread.stopped:.0%} of them stop, most often: {spread.stop_reason}"
    return text


def spot_lines(comparison: SpotComparison, width: int = LINE_WIDTH) -> list[str]:
    """Format both tariffs in columns, then the recommendation."""
    lines = [f"{'Tariff':<{_INDENT}}{'DAYS':>12}  {'GPU-HOURS':>11}  {'COST':>16}  {'STARTS':>7}"]
    for one in (comparison.on_demand, comparison.spot):
        if one is not None:
            cost = f"{one.cost.amount:,.0f} {one.cost.currency}" if one.cost else "-"
            lines.append(
                f"{one.tariff:<{_INDENT}}{days_column(one):>12}  {one.gpu_hours:>11,.0f}  "
                f"{cost:>16}  {one.starts:>7,.1f}"
            )
    lines += _entry("Take", f"{comparison.recommended}: {comparison.reason}", width)
    if comparison.spot is not None:
        limit = comparison.break_even_preemption_seconds
        if limit is None:
            break_even = "spot is dearer even without preemptions"
        elif limit == 0:
            break_even = "spot is cheaper however often nodes are taken away"
        else:
            break_even = f"spot is cheaper while preemptions are rarer than one per {days(limit)}"
        lines += _entry("", break_even, width)
        lines += [
            line
            for assumption in comparison.spot.assumptions
            if assumption not in comparison.on_demand.assumptions
            for line in _entry("Assumed", str(assumption), width)
        ]
    return lines


def decision_lines(decision: BudgetDecision, width: int = LINE_WIDTH) -> list[str]:
    """Format what the budget allows, or what is missing: one paragraph per statement."""
    lines = []
    for number, sentence in enumerate(decision.lines):
        lines += _entry("Budget" if number == 0 else "", sentence, width)
    return lines


def _entry(label: str, text: str, width: int) -> list[str]:
    """Wrap a labelled paragraph; a number stays on one line with its unit."""
    lines = facts((label, _BEFORE_UNIT.sub(_TIE, text)), width=width)
    return [line.replace(_TIE, " ") for line in lines]


def _failures(forecast: Forecast) -> str:
    stops = forecast.interruptions
    text = (
        f"{_count(forecast.failures)} expected, one per {days(stops.failure_mtbf_seconds)} on "
        f"{forecast.nodes:,} node{'s' if forecast.nodes > 1 else ''}"
    )
    if stops.preemption_mtbf_seconds is not None:
        text += (
            f" · {_count(forecast.preemptions)} preemptions, one per "
            f"{days(stops.preemption_mtbf_seconds)}"
        )
    return f"{text} · {days(stops.restart_seconds)} per restart"


def _saves(forecast: Forecast) -> str:
    interval, checkpoint = forecast.interval, forecast.checkpoint
    text = (
        f"{short_bytes(checkpoint.total_bytes)} every {interval.steps:,} steps "
        f"({days(interval.seconds)}); best {interval.best_steps:,} (Young "
        f"{days(interval.young_seconds)}, Daly {days(interval.daly_seconds)})"
    )
    write = f"{short_duration(checkpoint.write_seconds)} to write ({checkpoint.write_limit})"
    return f"{text} · {write}, stops training for {short_duration(checkpoint.stall_seconds)}"


def _count(number: float) -> str:
    """Format an expected number: two digits below ten."""
    return f"{number:.2g}" if 0.001 <= number < 10 else f"{number:,.0f}"
