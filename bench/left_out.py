"""Predict rows with constants that have not seen their source, and keep what intervals need of it.

Belongs here: one record per row: measured over predicted seconds, and how each multiplier of the
cost model would move the prediction. Does not belong here: predictions without a source
(`held_out`), the fit of the prior (`fit_uncertainty`), or what few rows teach (`learning_curve`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.cases import RowCase
from bench.held_out import leave_one_source_out
from bench.memory_conventions import convention_of
from bench.predictions import predict_file
from bench.published import family_of
from hpctrain.plan.cost.case import Case, Floats, stack
from hpctrain.plan.cost.multipliers import classes_of, memory_sensitivities, places_of
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.uncertainty.intervals import time_effects


@dataclass(frozen=True)
class LeftOut:
    """Rows of all sources, predicted without their own source; arrays of shape [rows].

    `effects`: d log(seconds) / d log(multiplier), [rows, multipliers]; `classes`: whether the
    planner knows less of a row for a reason, [rows, classes]; `places`: where a row lies among
    others, [rows, axes], with its GPU as one axis more, of which a source may have several.
    """

    sources: tuple[str, ...]
    measured: Floats
    predicted: Floats
    effects: Floats
    classes: Floats
    places: Floats
    gpus: tuple[str, ...]

    @property
    def errors(self) -> Floats:
        """Logarithms of measured over predicted seconds."""
        return np.asarray(np.log(self.measured / self.predicted))

    def save(self, file: Path) -> None:
        """Keep the rows for another program: the fits behind them take a while."""
        np.savez(
            file,
            sources=np.array(self.sources),
            gpus=np.array(self.gpus),
            measured=self.measured,
            predicted=self.predicted,
            effects=self.effects,
            classes=self.classes,
            places=self.places,
        )


def saved(file: Path) -> LeftOut:
    """Read what `save` has written."""
    with np.load(file) as arrays:
        return LeftOut(
            sources=tuple(map(str, arrays["sources"])),
            gpus=tuple(map(str, arrays["gpus"])),
            measured=arrays["measured"],
            predicted=arrays["predicted"],
            effects=arrays["effects"],
            classes=arrays["classes"],
            places=arrays["places"],
        )


def unseen_cases(file: Path) -> list[RowCase]:
    """Price the timed rows as `plan` would, on constants that have not seen their families."""
    return [case for case in leave_one_source_out(file).cases if case.row.step_seconds]


def left_out_rows(runs: list[Path]) -> LeftOut:
    """Predict every row of these files without its own source."""
    cases = [case for file in runs for case in unseen_cases(file)]
    sources = tuple(case.row.source for case in cases)
    gpus = tuple(case.gpu.name for case in cases)
    known = known_gpus(cases)
    case = stacked(cases)
    return LeftOut(
        sources=sources,
        measured=np.array([one.row.step_seconds for one in cases], dtype=float),
        predicted=np.asarray(step_seconds(case).total, dtype=float),
        effects=time_effects(case, known),
        classes=classes_of(case, known),
        places=row_places(case),
        gpus=gpus,
    )


def known_gpus(cases: list[RowCase]) -> NDArray[np.bool_]:
    """Whether another family has a row's GPU, so that constants without its own know it: [rows]."""
    own = [(case.gpu.name, family_of(case.row.source)) for case in cases]
    families = Counter(gpu for gpu, _ in set(own))
    return np.array([families[gpu] > 1 for gpu, _ in own], dtype=bool)


def memory_rows(runs: list[Path]) -> LeftOut:
    """Predict the memory of every row that states it, as its source counts bytes.

    No memory constant of `hpctrain plan` is fitted to these rows.
    """
    parts = [
        predict_file(file, product=True).where(lambda row: row.memory_gb is not None)
        for file in runs
    ]
    cases = [case for part in parts for case in part.cases]
    case = stacked(cases)
    return LeftOut(
        sources=tuple(one.row.source for one in cases),
        measured=np.array([one.row.memory_gb for one in cases], dtype=float),
        predicted=np.concatenate([part.gibibytes for part in parts]),
        effects=memory_sensitivities(case) * counted(cases),
        classes=classes_of(case),
        places=row_places(case),
        gpus=tuple(one.gpu.name for one in cases),
    )


def counted(cases: list[RowCase]) -> Floats:
    """Tell which multipliers of memory move what a row's source counts: 1 or 0, [rows, MEMORY].

    Bytes that PyTorch has allocated know neither its allocator nor what lies outside of it.
    """
    kinds = np.array([convention_of(case.row).kind for case in cases])
    seen = [np.ones(len(cases), dtype=bool), kinds != "allocated", kinds == "driver"]
    return np.column_stack(seen).astype(float)


def row_places(case: Case) -> Floats:
    """Compute the places of rows, whose GPUs differ by doublings of their dense bf16 rate."""
    return np.column_stack([places_of(case), np.log2(case.machine.peak)])


def stacked(cases: list[RowCase]) -> Case:
    """Join the cases of rows into one."""
    parts = ("shape", "mesh", "machine", "software")
    return Case(*(stack([getattr(case.case, part) for case in cases]) for part in parts))
