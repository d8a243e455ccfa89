"""Published rows with what the cost model says about them.

Belongs here: running the model over a file of rows. Does not belong here: statistics
(`accuracy_figures`), the meaning of columns (`published`), what fills blanks (`cases`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from bench.cases import CannotModel, RowCase, row_case
from bench.published import PublishedRow, read_rows
from hpctrain.plan.cost.case import Case, Floats, stack
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.step import step_seconds
from hpctrain.spec.loader import load_calibration, load_catalogue

GIB = 2**30
NONE: Floats = np.zeros(0)  # figures of no rows


@dataclass(frozen=True)
class Predicted:
    """Rows of one file: `cases` modelled, `refused` named with the reason."""

    cases: list[RowCase]
    refused: list[str]
    complaints: list[str]

    @property
    def count(self) -> int:
        return len(self.cases) + len(self.refused)

    @cached_property
    def case(self) -> Case:
        parts = ("shape", "mesh", "machine", "software")
        return Case(*(stack([getattr(c.case, part) for c in self.cases]) for part in parts))

    @cached_property
    def seconds(self) -> Floats:
        return np.asarray(step_seconds(self.case).total) if self.cases else NONE

    @cached_property
    def gibibytes(self) -> Floats:
        """Peak of the fullest rank as the source of each row counts it, GiB."""
        if not self.cases:
            return NONE
        conventions = np.array([memory_convention(c.row) for c in self.cases])
        inner = replace(self.case.software, context_bytes=0.0)
        reserved = np.asarray(peak_bytes(replace(self.case, software=inner)))
        exact = replace(inner, slack=1.0)
        allocated = np.asarray(peak_bytes(replace(self.case, software=exact)))
        everything = self.total_gibibytes * GIB
        chosen = [conventions == "driver", conventions == "reserved"]
        return np.select(chosen, [everything, reserved], allocated) / GIB

    @cached_property
    def total_gibibytes(self) -> Floats:
        """Everything that the driver counts, which has to fit into the GPU, GiB."""
        return np.asarray(peak_bytes(self.case)) / GIB if self.cases else NONE

    def where(self, chosen: Callable[[PublishedRow], bool]) -> Predicted:
        """The part of the rows for which `chosen` holds."""
        return Predicted([c for c in self.cases if chosen(c.row)], [], [])

    def assumed_counts(self) -> dict[str, int]:
        """How many rows had to assume each field."""
        return dict(Counter(name for c in self.cases for name in c.assumed).most_common())

    def table(self) -> pd.DataFrame:
        """One line per row: what it is, what was measured, what was predicted."""
        rows = [c.row for c in self.cases]
        return pd.DataFrame(
            {
                "line": [row.line for row in rows],
                "source": [row.source for row in rows],
                "model": [row.model for row in rows],
                "gpu": [c.gpu.name for c in self.cases],
                "gpus": [row.gpus for row in rows],
                "global_batch": [row.global_batch for row in rows],
                "seq_len": [row.seq_len for row in rows],
                "precision": [row.precision for row in rows],
                "layout": [_layout(row) for row in rows],
                "software": [c.software for c in self.cases],
                "assumed": [" ".join(c.assumed) for c in self.cases],
                "measured_seconds": [row.step_seconds for row in rows],
                "predicted_seconds": self.seconds,
                "measured_gib": [row.memory_gb for row in rows],
                "predicted_gib": self.gibibytes,
                "stated_layout": [_states_layout(row) for row in rows],
            }
        )


def _layout(row: PublishedRow) -> str:
    sizes = (("tp", row.tp), ("pp", row.pp), ("vp", row.vp), ("cp", row.cp), ("ep", row.ep))
    shown = [f"{name}{size}" for name, size in sizes if size and size > 1]
    return " ".join([*shown, f"dp{row.dp}", f"mb{row.micro_batch}", row.recompute])


def _states_layout(row: PublishedRow) -> bool:
    """Whether the source prints tp, pp and the microbatch."""
    return None not in (row.tp, row.pp, row.micro_batch)


def memory_convention(row: PublishedRow) -> str:
    """`driver` (nvidia-smi), `reserved` by the allocator, or `allocated` (the README of the data).

    Zero-Bubble's figures are max_memory_reserved of their fork's log; a source that says nothing
    is taken as allocated.
    """
    text = f"{row.notes} {row.source}".lower()
    if "nvidia-smi" in text:
        return "driver"
    return "reserved" if re.search(r"memory_reserved|max_memory_res", text) else "allocated"


def predict_file(path: Path) -> Predicted:
    """All rows of a CSV file; raises OSError when it cannot be read."""
    catalogue, calibration = load_catalogue(), load_calibration()
    rows = read_rows(path)
    cases: list[RowCase] = []
    refused: list[str] = []
    for row in rows:
        try:
            cases.append(row_case(row, catalogue, calibration))
        except CannotModel as error:
            refused.append(f"{path.name}:{row.line}: {error}")
    complaints = [f"{path.name}:{c.line}: {c.reason}" for c in rows.complaints]
    return Predicted(cases, refused, complaints)
