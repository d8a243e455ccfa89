"""Formats the results of simulated runs, in lines of at most 80 columns.

Belongs here: columns and sentences. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

from hpctrain.base.units import short_duration
from hpctrain.job.simulation import Simulation
from hpctrain.page.text import facts

_HEADS = ("SPARES", "INTERVAL", "ETTR", "5-95 %", "DAYS", "GPU-HOURS", "STOPPED")
_WIDTHS = (8, 10, 8, 14, 8, 14, 9)


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
    lines = [*facts(("Played", played)), "", _columns(_HEADS)]
    for index, one in enumerate(choice.outcomes):
        cells = (
            f"{one.spare_nodes:,}",
            short_duration(one.interval_seconds),
            f"{one.ettr.mean:.3f}",
            f"{one.ettr.p5:.3f}-{one.ettr.p95:.3f}",
            f"{one.days.mean:,.1f}",
            f"{one.gpu_hours.mean:,.0f}",
            f"{one.stopped:.0%}",
        )
        lines.append(_columns(cells) + _mark(simulation, index))
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
        *lines,
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
    return f"  {', '.join(marks)}" if marks else ""


def _columns(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
