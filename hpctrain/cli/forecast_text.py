"""A forecast in words: lines of at most 80 columns.

Belongs here: sentences and columns. Does not belong here: any number that is not in the documents.
"""

from __future__ import annotations

import re
import textwrap

from hpctrain.plan.forecast.documents import (
    BudgetDecision,
    CheckpointCost,
    Forecast,
    SpotComparison,
    TimeShares,
)
from hpctrain.units import short_bytes, short_duration

_WIDTH, _INDENT = 80, 10
_DAY_SECONDS = 86400
# textwrap breaks at ASCII white space only.
_TIE = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:d|h|min|s|ms|[KMGT]iB|[A-Z]{3}|GPUs|steps)\b)")


def forecast_lines(forecast: Forecast) -> list[str]:
    """The block that `plan` shows below the plan itself."""
    lines = [
        *_entry("Time", _time(forecast)),
        *_entry("", _shares(forecast.times)),
        *_entry("Cost", _cost(forecast)),
        *_entry("Failures", _failures(forecast)),
        *_entry("Saves", _saves(forecast)),
    ]
    for assumption in forecast.assumptions:
        lines += _entry("Assumed", assumption)
    for warning in forecast.warnings:
        lines += _entry("Warning", warning)
    return lines


def spot_lines(comparison: SpotComparison) -> list[str]:
    """Both tariffs in columns, then the recommendation."""
    lines = [f"{'Tariff':<{_INDENT}}{'DAYS':>8}  {'GPU-HOURS':>11}  {'COST':>16}  {'STARTS':>7}"]
    for one in (comparison.on_demand, comparison.spot):
        if one is not None:
            lines.append(_tariff_row(one))
    lines += _entry("Take", f"{comparison.recommended}: {comparison.reason}")
    if comparison.spot is not None:
        lines += _entry("", _break_even(comparison))
        lines += [
            line
            for assumption in comparison.spot.assumptions
            if assumption not in comparison.on_demand.assumptions
            for line in _entry("Assumed", assumption)
        ]
    return lines


def decision_lines(decision: BudgetDecision) -> list[str]:
    """What the budget allows, or what is missing: one paragraph per statement."""
    lines = []
    for number, sentence in enumerate(decision.lines):
        lines += _entry("Budget" if number == 0 else "", sentence)
    return lines


def _entry(label: str, text: str) -> list[str]:
    """A paragraph with a label; a number stays on one line with its unit."""
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(_TIE, text),
        _WIDTH,
        initial_indent=f"{label:<{_INDENT}}",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIE, " ") for line in lines]


def _time(forecast: Forecast) -> str:
    training = forecast.times.training_seconds
    slices = f" · {forecast.slices:,} time slices" if forecast.slices > 1 else ""
    return (
        f"{_days(forecast.times.total_seconds)} expected = {_days(training)} of training "
        f"({forecast.steps:,} steps x {short_duration(forecast.step_seconds)}) at "
        f"{forecast.ettr:.1%} effective time{slices}"
    )


def _shares(times: TimeShares) -> str:
    """Where the rest goes; what is nothing is left out."""
    parts = [
        f"{word} {_days(getattr(times, f'{word}_seconds'))}"
        for word in ("evaluation", "saving", "redone", "starting", "waiting")
        if getattr(times, f"{word}_seconds") >= 0.5
    ]
    return " · ".join(parts)


def _cost(forecast: Forecast) -> str:
    hours = f"{forecast.gpu_hours:,.0f} GPU-hours on {forecast.gpus:,} GPUs"
    if forecast.cost is None:
        return f"{hours} (the profile has no prices)"
    cost = forecast.cost
    return (
        f"{cost.amount:,.0f} {cost.currency} = {hours} x {cost.per_gpu_hour:g} {cost.currency} "
        f"({cost.tariff})"
    )


def _failures(forecast: Forecast) -> str:
    stops = forecast.interruptions
    text = (
        f"{_count(forecast.failures)} expected, one per {_days(stops.failure_mtbf_seconds)} on "
        f"{forecast.nodes:,} node{'s' if forecast.nodes > 1 else ''}"
    )
    if stops.preemption_mtbf_seconds is not None:
        text += (
            f" · {_count(forecast.preemptions)} preemptions, one per "
            f"{_days(stops.preemption_mtbf_seconds)}"
        )
    return f"{text} · {_days(stops.restart_seconds)} per restart"


def _saves(forecast: Forecast) -> str:
    interval, checkpoint = forecast.interval, forecast.checkpoint
    text = (
        f"{short_bytes(checkpoint.total_bytes)} every {interval.steps:,} steps "
        f"({_days(interval.seconds)}); best {interval.best_steps:,} (Young "
        f"{_days(interval.young_seconds)}, Daly {_days(interval.daly_seconds)})"
    )
    return f"{text} · {_save(checkpoint)}"


def _save(checkpoint: CheckpointCost) -> str:
    write = f"{short_duration(checkpoint.write_seconds)} to write ({checkpoint.write_limit})"
    return f"{write}, stops training for {short_duration(checkpoint.stall_seconds)}"


def _tariff_row(one: Forecast) -> str:
    cost = f"{one.cost.amount:,.0f} {one.cost.currency}" if one.cost else "-"
    return (
        f"{one.tariff:<{_INDENT}}{one.days:>8,.1f}  {one.gpu_hours:>11,.0f}  {cost:>16}  "
        f"{one.starts:>7,.1f}"
    )


def _break_even(comparison: SpotComparison) -> str:
    limit = comparison.break_even_preemption_seconds
    if limit is None:
        return "spot is dearer even without preemptions"
    if limit == 0:
        return "spot is cheaper however often nodes are taken away"
    return f"spot is cheaper while preemptions are rarer than one per {_days(limit)}"


def _count(number: float) -> str:
    """Expected numbers: two digits below ten."""
    return f"{number:.2g}" if 0.001 <= number < 10 else f"{number:,.0f}"


def _days(seconds: float) -> str:
    """`short_duration`, but days never in powers of ten and with thousands apart."""
    if seconds >= 2 * _DAY_SECONDS:
        days = seconds / _DAY_SECONDS
        return f"{days:,.1f} d" if days < 100 else f"{days:,.0f} d"
    return short_duration(seconds)
