"""What played runs say, in lines of at most 80 columns.

Belongs here: columns and sentences. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

import textwrap

from hpctrain.actions.simulate import Simulation
from hpctrain.simulate.monte_carlo import Distribution, Outcome
from hpctrain.units import short_duration

_WIDTH, _INDENT = 80, 10
_HEADS = ("SPARES", "INTERVAL", "ETTR", "5-95 %", "DAYS", "GPU-HOURS", "STOPPED")
_WIDTHS = (8, 10, 8, 14, 8, 14, 9)


def simulation_lines(told: Simulation) -> list[str]:
    """The scenario, one row for each combination, the best one in detail."""
    choice = told.choice
    best = choice.outcomes[choice.best]
    rows = [
        _row(one, "  best" if index == choice.best else "")
        for index, one in enumerate(choice.outcomes)
    ]
    return [
        *_scenario(told),
        "",
        _columns(_HEADS),
        *rows,
        "",
        *_entry("Best", "; ".join(choice.reasons)),
        *_entry("Lost", _shares(best)),
        *_entry("Causes", _causes(best)),
        *_entry("Finish", _finish(told, best)),
        *_entry("Spares", _spares(told, best)),
        *(line for note in told.assumptions for line in _entry("Assumed", note)),
    ]


def _scenario(told: Simulation) -> list[str]:
    scenario, trials = told.scenario, told.choice.outcomes[0].trials
    text = (
        f"{scenario.gpus:,} GPUs on {scenario.nodes:,} nodes, "
        f"{scenario.work_seconds / 86400:.1f} d of training; a failure per "
        f"{short_duration(min(scenario.mttf_seconds, 1e12))}; a save stops training for "
        f"{short_duration(scenario.save_stall_seconds)}; restart "
        f"{short_duration(scenario.restart_seconds)}"
    )
    return [*_entry("Played", f"{text}; {trials:,} runs each")]


def _columns(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _row(one: Outcome, mark: str) -> str:
    cells = (
        f"{one.spare_nodes:,}",
        short_duration(one.interval_seconds),
        f"{one.ettr.mean:.3f}",
        f"{one.ettr.p5:.3f}-{one.ettr.p95:.3f}",
        f"{one.days.mean:,.1f}",
        f"{one.gpu_hours.mean:,.0f}",
        f"{one.stopped:.0%}",
    )
    return _columns(cells) + mark


def _shares(best: Outcome) -> str:
    """What a mean run spends beside productive steps, the largest part first."""
    total = sum(best.seconds.values())
    rest = {name: seconds for name, seconds in best.seconds.items() if name != "productive"}
    ordered = sorted(rest.items(), key=lambda item: -item[1])
    parts = [f"{name} {seconds / total:.2%}" for name, seconds in ordered if seconds > 0]
    return ", ".join(parts) or "nothing"


def _causes(best: Outcome) -> str:
    ordered = sorted(best.lost_seconds.items(), key=lambda item: -item[1])
    parts = [
        f"{name.replace('_', ' ')} {short_duration(seconds)}"
        for name, seconds in ordered[:5]
        if seconds > 0
    ]
    events = f"{best.failures:,.1f} failures and {best.requeues:,.1f} requeues in a run"
    return f"{events}; " + (", ".join(parts) or "nothing is lost")


def _finish(told: Simulation, best: Outcome) -> str:
    text = (
        f"in {_days(best.days)} d; ETTR {best.ettr.mean:.1%} with the queue, "
        f"{best.ettr_without_queue.mean:.1%} without"
    )
    if told.price_per_gpu_hour is None:
        return text
    amount = best.gpu_hours.mean * told.price_per_gpu_hour
    return f"{text}; {amount:,.0f} {told.currency}"


def _days(days: Distribution) -> str:
    return f"{days.mean:,.1f} ({days.p5:,.1f} to {days.p95:,.1f})"


def _spares(told: Simulation, best: Outcome) -> str:
    choice = told.choice
    return (
        f"{best.spare_nodes} by these trials; the 95 % quantile of the nodes lost in "
        f"{short_duration(choice.poisson_seconds)}, one attempt, is {choice.poisson_spares}"
    )


def _entry(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label:<{_INDENT}}",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
