"""How many measurements lie inside the intervals that `hpctrain plan` prints with its predictions.

Belongs here: coverage and width by source, of time and memory. Does not belong here: the intervals
(`hpctrain.plan.uncertainty`), what few own runs make of them (`learning_curve`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.accuracy_figures import Report
from bench.left_out import counted, known_gpus
from bench.predictions import Predicted
from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.multipliers import MEMORY, classes_of, memory_sensitivities
from hpctrain.plan.uncertainty.intervals import Spread, interval_of, noise_of, prior_of
from hpctrain.spec.loader import load_uncertainty


def time_intervals(predicted: Predicted, unseen: bool) -> Report:
    """Coverage of the step times' 80 % intervals.

    `unseen`: constants have not seen the family of a row, and know its GPU if another family has
    it; else they are those of `hpctrain plan`, which names the GPUs that it knows.
    """
    title = "step time, 80 % intervals"
    timed = predicted.where(lambda row: row.step_seconds is not None)
    if not timed.cases:
        return Report(title, {})
    low, high = interval_of(timed.case, load_uncertainty(), _known(timed, unseen))
    measured = np.array([case.row.step_seconds for case in timed.cases], dtype=float)
    return _report(title, timed, measured, low, high)


def memory_intervals(predicted: Predicted, unseen: bool) -> Report:
    """Coverage of the peaks' 80 % intervals, around bytes as each source counts them.

    What a source does not count is no reason to doubt its figure (`left_out.counted`).
    """
    title = "memory, 80 % intervals"
    sized = predicted.where(lambda row: row.memory_gb is not None)
    if not sized.cases:
        return Report(title, {})
    doubt = load_uncertainty().memory
    effects = memory_sensitivities(sized.case) * counted(sized.cases)
    noise = noise_of(doubt, classes_of(sized.case, _known(sized, unseen)))
    deviation = doubt.widening * prior_of(doubt, MEMORY).deviation(effects, noise)
    spread = Spread(sized.gibibytes, deviation)
    measured = np.array([case.row.memory_gb for case in sized.cases], dtype=float)
    return _report(title, sized, measured, spread.low, spread.high)


def _known(predicted: Predicted, unseen: bool) -> NDArray[np.bool_]:
    if unseen:
        return known_gpus(predicted.cases)
    return np.array([c.gpu.name in load_uncertainty().measured_gpus for c in predicted.cases])


def _report(
    title: str, predicted: Predicted, measured: Floats, low: Floats, high: Floats
) -> Report:
    sources = np.array([case.row.source for case in predicted.cases])
    inside = (measured >= low) & (measured <= high)
    width = 50 * np.log(high / low)
    lines = {
        source: _line(inside[sources == source], width[sources == source])
        for source in dict.fromkeys(sources)
    }
    shares = [line["inside %"] for line in lines.values()]
    lines["mean of the above"] = {"inside %": float(np.mean(shares))}
    lines["all"] = _line(inside, width)
    return Report(title, {str(source): line for source, line in lines.items()})


def _line(inside: Floats, width: Floats) -> dict[str, float]:
    return {
        "rows": len(inside),
        "inside %": 100 * float(np.mean(inside)),
        "+- %": float(np.median(width)),
    }
