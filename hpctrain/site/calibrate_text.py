"""Formats what a site's own runs have taught, in 80 columns.

Belongs here: sentences and columns. Does not belong here: any number that is not in the documents.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

from hpctrain.base.units import short_bytes
from hpctrain.job.explain_text import MULTIPLIERS
from hpctrain.job.plan_text import wrapped
from hpctrain.page.text import LINE_WIDTH

if TYPE_CHECKING:
    from hpctrain.site.calibrate_runs import LearningResult
    from hpctrain.site.engine_learning import EngineLearning
    from hpctrain.spec.uncertainty import LearnedMultiplier, OwnRun, SiteLearning


def learning_lines(found: LearningResult, width: int = LINE_WIDTH) -> list[str]:
    """Format runs, multipliers, refusals and remarks of all engines."""
    lines = [line for engine in found.engines for line in (*_engine_lines(engine), "")]
    for mark, texts in (("left out  ", found.refused), ("mind      ", found.remarks)):
        for text in texts:
            lines += wrapped(text.replace("\n", " "), mark, " " * len(mark), width)
    return [*lines, ""] if found.refused or found.remarks else lines


def _engine_lines(engine: EngineLearning) -> list[str]:
    """Tabulate measured, planned before and planned after of each run, and the multipliers."""
    learned = engine.learned
    lines = [f"{'step time':36}{'measured':>10}{'before':>17}{'after':>17}"]
    lines += [_run_line(run) for run in learned.runs]
    sized = [run for run in learned.runs if run.measured_bytes is not None]
    if sized:
        lines += [
            "",
            f"{'memory reserved by PyTorch':36}{'measured':>10}{'before':>17}{'after':>17}",
        ]
        lines += [_memory_line(run) for run in sized]
    lines += [
        "",
        f"{'over what is packaged':37}{'factor':>9}{'before (68%)':>17}{'now (68%)':>17}",
    ]
    lines += [_multiplier_line(one) for one in engine.multipliers]
    return [*lines, "", accuracy_line(engine.engine, learned)]


def accuracy_line(engine: str, learned: SiteLearning) -> str:
    """Format on how many runs an engine is calibrated, and how far the next one may be off."""
    count = len(learned.runs)
    runs = f"{count} run{'s' if count > 1 else ''}"
    return f"engine {engine}: calibrated on {runs}: ±{learned.error:.0%}"


def _run_line(run: OwnRun) -> str:
    measured = run.measured_seconds
    cells = [
        _against(f"{value:.4g} s", value / measured - 1)
        for value in (run.before_seconds, run.after_seconds)
    ]
    return f"{run.run[:35]:36}{f'{measured:.4g} s':>10}{cells[0]:>17}{cells[1]:>17}"


def _memory_line(run: OwnRun) -> str:
    assert run.measured_bytes and run.before_bytes and run.after_bytes
    measured = run.measured_bytes
    cells = [
        _against(short_bytes(value), value / measured - 1)
        for value in (run.before_bytes, run.after_bytes)
    ]
    return f"{run.run[:35]:36}{short_bytes(measured):>10}{cells[0]:>17}{cells[1]:>17}"


def _against(text: str, error: float) -> str:
    return f"{text} {error:+.1%}"


def _multiplier_line(one: LearnedMultiplier) -> str:
    before, after = _range(1.0, one.before), _range(one.factor, one.after)
    return (
        f"{MULTIPLIERS.get(one.name, one.name)[:36]:37}{one.factor:>8.2f}x{before:>17}{after:>17}"
    )


def _range(factor: float, deviation: float) -> str:
    """Format the factors of two sites in three: `0.26-3.78x`, for a deviation may exceed 100 %."""
    return f"{factor * exp(-deviation):.2f}-{factor * exp(deviation):.2f}x"
