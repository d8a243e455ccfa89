"""How residuals of rows change with the constants: all constants in one call of the cost model.

Belongs here: the derivative by differences, for a fit whose constants each touch some rows. Does
not belong here: constants, residuals or the fit (`calibrate_planner`).

SciPy would evaluate all rows once for each constant. Formulas broadcast and most of their time goes
into calls of NumPy, so that one evaluation of the touched rows of all constants, stacked, takes a
tenth of that.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np

from hpctrain.plan.cost.case import Case, Floats
from hpctrain.plan.cost.step import step_seconds

PARTS = ("shape", "mesh", "machine", "software")
STEP = 1e-6  # of a constant's value; of 1e-3 for one that is 0
LEAST = 1e-3


class Residuals(Protocol):
    """What a fit has to say of its rows."""

    def with_values(self, values: np.ndarray) -> Case:
        """The cases with these constants."""

    def touched(self, constant: int) -> np.ndarray:
        """Which rows a constant enters, as their numbers."""

    def of_rows(self, predicted: Floats, rows: np.ndarray) -> np.ndarray:
        """Residuals of these rows, from their predictions."""

    def beliefs(self, values: np.ndarray) -> np.ndarray:
        """Residuals of the constants themselves, one each."""


def jacobian(task: Residuals, values: np.ndarray) -> np.ndarray:
    """Derivatives of all residuals, [rows + constants, constants], by forward differences."""
    steps = STEP * np.maximum(np.abs(values), LEAST)
    moved = values + np.diag(steps)
    rows = [task.touched(constant) for constant in range(len(values))]
    changed = [taken(task.with_values(one), own) for one, own in zip(moved, rows, strict=True)]
    predicted = np.asarray(step_seconds(task.with_values(values)).total)
    every = np.arange(len(predicted))
    before = task.of_rows(predicted, every)
    seconds = np.asarray(step_seconds(joined(changed)).total)
    found = np.zeros((len(every) + len(values), len(values)))
    first = 0
    for constant, own in enumerate(rows):
        after = task.of_rows(seconds[first : first + len(own)], own)
        found[own, constant] = (after - before[own]) / steps[constant]
        first += len(own)
    apart = task.beliefs(values + steps) - task.beliefs(values)
    found[len(every) :] = np.diag(apart / steps)
    return found


def taken(case: Case, rows: np.ndarray) -> Case:
    """Some rows of stacked cases."""

    def part(record: Any) -> Any:
        columns = {f.name: np.asarray(getattr(record, f.name)) for f in fields(record)}
        return replace(record, **{k: v[rows] if v.ndim else v for k, v in columns.items()})

    return Case(*(part(getattr(case, name)) for name in PARTS))


def joined(cases: list[Case]) -> Case:
    """Stacked cases one after the other."""

    def part(records: list[Any]) -> Any:
        first = records[0]
        columns = {
            f.name: np.concatenate([np.atleast_1d(getattr(one, f.name)) for one in records])
            for f in fields(first)
        }
        return replace(first, **columns)

    return Case(*(part([getattr(case, name) for case in cases]) for name in PARTS))
