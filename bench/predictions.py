"""Published rows with what the cost model says about them.

Belongs here: running the model over a file of rows. Does not belong here: statistics
(`accuracy_figures`), the meaning of columns (`published`), what fills blanks (`cases`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from bench.cases import CannotModel, RowCase, row_case
from bench.memory_conventions import Ranks, convention_of
from bench.published import PublishedRow, facts_of, family_of, read_rows
from hpctrain.plan.cost.case import Array, Case, Floats, stack
from hpctrain.plan.cost.memory import (
    peak_bytes,
    reserved_on_stage,
    stage_memory,
    stages_that_matter,
)
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
        """Peak as the source of each row counts it, on the ranks that it looked at, GiB."""
        if not self.cases:
            return NONE
        capacities = np.array([float(c.gpu.memory) for c in self.cases])
        inner = replace(self.case.software, context_bytes=0.0, communicator_bytes=0.0)
        exact = replace(self.case, software=replace(inner, slack=1.0))
        counted = {
            "driver": reserved_on_ranks(self.case, capacities),
            "reserved": reserved_on_ranks(replace(self.case, software=inner), capacities),
            "allocated": bytes_on_ranks(exact),
        }
        conventions = [convention_of(c.row) for c in self.cases]
        found = np.zeros(len(self.cases))
        for kind, on_ranks in counted.items():
            for ranks, size in on_ranks.items():
                here = np.array([(c.kind, c.ranks) == (kind, ranks) for c in conventions])
                found = np.where(here, size, found)
        return found / GIB

    @cached_property
    def total_gibibytes(self) -> Floats:
        """What has to fit into the GPU, with what lies outside the allocator, GiB."""
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
                "family": [family_of(row.source) for row in rows],
                "framework": [row.framework for row in rows],
                "date": [facts_of(row).date for row in rows],
                "model": [row.model for row in rows],
                "shape": [_shape(c) for c in self.cases],
                "gpu": [c.gpu.name for c in self.cases],
                "gpus": [row.gpus for row in rows],
                "global_batch": [row.global_batch for row in rows],
                "seq_len": [row.seq_len for row in rows],
                "precision": [row.precision for row in rows],
                "kernels": [_kernels(row) for row in rows],
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


def bytes_on_ranks(case: Case) -> dict[Ranks, Floats]:
    """Peak bytes of the fullest rank, of the last stage's, and of the fuller end's."""
    return _on_ranks([stage_memory(case, stage).total for stage in stages_that_matter(case)])


def reserved_on_ranks(case: Case, capacity_bytes: Floats) -> dict[Ranks, Floats]:
    """What the allocator holds there, with what lies outside of it."""
    stages = stages_that_matter(case)
    return _on_ranks([reserved_on_stage(case, stage, capacity_bytes) for stage in stages])


def _on_ranks(sizes: Sequence[Array]) -> dict[Ranks, Floats]:
    """By ranks that a source looks at; `sizes` of the first, the second and the last stage."""
    first, second, last = (np.asarray(size, dtype=float) for size in sizes)
    ends = np.maximum(first, last)
    return {"fullest": np.maximum(ends, second), "last": last, "ends": ends}


def _shape(case: RowCase) -> str:
    shape = case.case.shape
    return f"{shape.layers}x{shape.hidden} {shape.heads}/{shape.kv_heads} {shape.vocab}"


def _kernels(row: PublishedRow) -> str:
    """What of its software a row names that a planner does not choose."""
    facts = facts_of(row)
    return f"{facts.attention} {facts.rms_kernel} {facts.mixed_precision}"


def _layout(row: PublishedRow) -> str:
    sizes = (("tp", row.tp), ("pp", row.pp), ("vp", row.vp), ("cp", row.cp), ("ep", row.ep))
    shown = [f"{name}{size}" for name, size in sizes if size and size > 1]
    shown += [f"zero{row.zero_stage}"] * bool(row.zero_stage) + ["sp"] * bool(row.sequence_parallel)
    offload = ["offload"] * bool(facts_of(row).activation_offload)
    return " ".join([*shown, *offload, f"dp{row.dp}", f"mb{row.micro_batch}", row.recompute])


def _states_layout(row: PublishedRow) -> bool:
    """Whether the source prints tp, pp and the microbatch."""
    return None not in (row.tp, row.pp, row.micro_batch)


def predict_file(path: Path, product: bool = False) -> Predicted:
    """All rows of a CSV file, with `product` as `hpctrain plan` prices them.

    Raises OSError when it cannot be read.
    """
    catalogue, calibration = load_catalogue(), load_calibration()
    rows = read_rows(path)
    cases: list[RowCase] = []
    refused: list[str] = []
    for row in rows:
        try:
            cases.append(row_case(row, catalogue, calibration, product))
        except CannotModel as error:
            refused.append(f"{path.name}:{row.line}: {error}")
    complaints = [f"{path.name}:{c.line}: {c.reason}" for c in rows.complaints]
    return Predicted(cases, refused, complaints)
