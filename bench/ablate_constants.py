"""What each free constant of the cost model is worth for sources that it was not fitted to.

    python -m bench.ablate_constants --runs FILE.csv

Each line: errors of all rows when every source is predicted with constants fitted to the others,
once with the constant left at what is believed of it before seeing data. A constant stays free only
where that makes predictions worse. The model is linear around its fit, so that all refits take half
a minute. Belongs here: that table. Does not belong here: the fit itself (`calibrate_planner`), or
refits without that short cut (`held_out`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from bench.accuracy_figures import Report
from bench.calibrate_planner import (
    MISTRUST,
    TOLERANCE,
    Fit,
    base_calibration,
    document,
    fit,
    load_cases,
)
from bench.calibration_table import Free, free_constants
from hpctrain.plan.cost.step import step_seconds

ROUNDS = 6  # of reweighted least squares, until odd rows have found their weight
STEP = 0.01  # relative change of a constant in difference quotients


@dataclass(frozen=True)
class Linear:
    """Logarithms of step times as linear functions of the constants, around `values`."""

    free: list[Free]
    values: np.ndarray
    predicted: np.ndarray  # [rows]
    slopes: np.ndarray  # [rows, constants]
    measured: np.ndarray
    weights: np.ndarray
    sources: np.ndarray

    def at(self, values: np.ndarray) -> np.ndarray:
        """Relative errors of all rows with these constants."""
        logs = self.predicted + self.slopes @ (values - self.values) - self.measured
        return np.asarray(np.expm1(logs))

    def solved(self, rows: np.ndarray, fixed: int | None) -> np.ndarray:
        """The constants fitted to these rows, one of them left at its start."""
        start, low, high, belief = (
            np.array([getattr(one, name) for one in self.free])
            for name in ("start", "low", "high", "weight")
        )
        moving = np.array([number for number in range(len(start)) if number != fixed])
        values = self.values.copy()
        if fixed is not None:
            values[fixed] = start[fixed]
        for _ in range(ROUNDS):
            residuals = np.log1p(self.at(values)) / TOLERANCE * self.weights * rows
            size = np.maximum(np.abs(residuals), 1e-9)
            trust = np.where(size > MISTRUST, np.sqrt(MISTRUST / size), 1.0)
            slopes = self.slopes * (self.weights * rows / TOLERANCE * trust)[:, None]
            near = np.maximum(values, 0.05 * start)
            beliefs = np.diag(belief / near)
            targets = np.concatenate([residuals * trust, (belief * np.log(near / start))[moving]])
            matrix = np.vstack([slopes[:, moving], beliefs[np.ix_(moving, moving)]])
            change = np.linalg.lstsq(matrix, -targets, rcond=None)[0]
            values[moving] = np.clip(values[moving] + change, low[moving], high[moving])
        return values

    def unseen(self, fixed: int | None = None) -> np.ndarray:
        """Relative errors of each source with constants fitted to the others."""
        errors = np.zeros(len(self.measured))
        for source in dict.fromkeys(self.sources):
            own = self.sources == source
            errors[own] = self.at(self.solved(~own, fixed))[own]
        return errors


def linear(task: Fit, values: np.ndarray) -> Linear:
    """The model around a fit."""

    def logs(at: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(step_seconds(task.with_values(at)).total))

    middle, columns = logs(values), []
    for number, one in enumerate(task.free):
        step = STEP * max(abs(values[number]), 0.1 * one.start)
        moved = values.copy()
        moved[number] += step if moved[number] + step <= one.high else -step
        columns.append((logs(moved) - middle) / (moved[number] - values[number]))
    return Linear(
        free=task.free,
        values=values,
        predicted=middle,
        slopes=np.array(columns).T,
        measured=np.log(task.measured),
        weights=task.weights,
        sources=np.array([case.row.source for case in task.cases]),
    )


def figures(errors: np.ndarray, sources: np.ndarray) -> dict[str, float]:
    """Median and 90th percentile in percent, over rows, and over sources of each source's."""
    table = pd.DataFrame({"source": sources, "size": 100 * np.abs(errors)})
    per_source = table.groupby("source")["size"]
    return {
        "rows median": float(table["size"].median()),
        "rows p90": float(table["size"].quantile(0.9)),
        "sources median": float(per_source.median().median()),
        "sources p90": float(per_source.quantile(0.9).median()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, action="append", required=True)
    options = parser.parse_args()
    free = free_constants()
    cases, _ = load_cases(options.runs, document(base_calibration(free)), share=1.1)
    model = linear(Fit(cases, free), fit(cases, free))
    lines = {f"all {len(free)} free": figures(model.unseen(), model.sources)}
    for number, one in enumerate(free):
        lines[f"without {one.name}"] = figures(model.unseen(number), model.sources)
    print(Report("each source unseen, errors in %", lines).text())


if __name__ == "__main__":
    main()
