"""Search the layouts of a spec: enumerate, keep those that fit, and price them.

`grid` enumerates, `cost` prices; both work on tables of many candidates, each small enough for the
processor's cache. Belongs here: pricing all candidates and counting. Does not belong here: choosing
(`ranking`), hints (`hints`), explanations (`alternatives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.case import Case, Machine, Mesh
from hpctrain.plan.cost.from_spec import case_of, machine_for
from hpctrain.plan.cost.island_links import crossed_islands, shown_seconds, uplink_seconds
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.plan_memory import TIGHT_SHARE
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.documents import SearchCounts
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import Columns, candidate_at, joined
from hpctrain.plan.mesh.nvlink_domain import possible_domains
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.grid import enumerated, structures, tables
from hpctrain.plan.search.space import Freedom

Floats = NDArray[np.float64]
_Record = TypeVar("_Record", Mesh, Machine)
# Estimates of the search are within this of the exact memory of a plan (closed forms of
# parameters): candidates above the capacity by no more than that are priced and counted exactly.
BORDER = 1.01
# Rows of one table: some hundred arrays of that length pass through a cache of a few MiB.
ROWS_PER_TABLE = 8192


@dataclass(frozen=True)
class Found:
    """All feasible candidates with their prices, arrays of shape [candidates].

    `step_seconds` is NaN where a candidate does not fit and everywhere when the GPU is unknown.
    """

    request: PlanRequest
    freedom: Freedom
    columns: Columns
    peak_bytes: Floats
    step_seconds: Floats
    capacity_bytes: int
    enumerated: int
    nvlink_domain: int
    timed: bool

    @property
    def fits(self) -> NDArray[np.bool_]:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def roomy(self) -> NDArray[np.bool_]:
        """Candidates that leave some memory to the allocator."""
        return self.peak_bytes <= TIGHT_SHARE * self.capacity_bytes

    @property
    def counts(self) -> SearchCounts:
        feasible, fitting = len(self.columns), int(self.fits.sum())
        return SearchCounts(
            enumerated=self.enumerated,
            infeasible=self.enumerated - feasible,
            too_large=feasible - fitting,
            fitting=fitting,
            tight=fitting - int(self.roomy.sum()),
        )

    def candidate(self, row: int) -> Candidate:
        return candidate_at(self.request.spec, self.columns, row, self.freedom.stages)


def search(request: PlanRequest, freedom: Freedom, timed: bool = True) -> Found:
    """Price all candidates that `freedom` allows; without step times if not `timed`."""
    spec, profile = request.spec, request.profile
    grid = structures(spec, freedom)
    timed = timed and machine_for(request) is not None
    capacity = int(profile.gpu.memory)
    islands = crossed_islands(freedom.gpus, profile) if timed else ()
    parts: list[tuple[Columns, Floats, Floats]] = []
    for columns in tables(spec, freedom, grid, ROWS_PER_TABLE):
        case = case_of(request, columns)
        peaks, seconds, data = _priced(case, capacity, timed)
        rows = np.flatnonzero(np.isfinite(seconds))
        if islands and len(rows):
            some = columns.take(rows)
            loads = uplink_seconds(request, some, islands, freedom.stages)
            seconds[rows] += shown_seconds(some, case.software, seconds[rows], data[rows], loads)
        parts.append((columns, peaks, seconds))
    return Found(
        request=request,
        freedom=freedom,
        columns=joined([part[0] for part in parts]),
        peak_bytes=_end_to_end([part[1] for part in parts]),
        step_seconds=_end_to_end([part[2] for part in parts]),
        capacity_bytes=capacity,
        enumerated=enumerated(grid, freedom),
        nvlink_domain=possible_domains(spec.resources, profile)[-1],
        timed=timed,
    )


def _priced(case: Case, capacity: int, timed: bool) -> tuple[Floats, Floats, Floats]:
    """Compute (peak bytes, step seconds, data parallel messages among them) of one table.

    Times are of rows that fit, or nearly do; NaN elsewhere.
    """
    shape = np.shape(case.mesh.tp)
    peaks = np.broadcast_to(np.asarray(peak_bytes(case), dtype=float), shape)
    seconds, data = np.full(shape, np.nan), np.zeros(shape)
    if timed:
        rows = np.flatnonzero(peaks <= BORDER * capacity)
        if len(rows):
            taken = replace(case, mesh=_rows(case.mesh, rows), machine=_rows(case.machine, rows))
            times = step_seconds(taken)
            seconds[rows], data[rows] = times.total, times.data_messages
    return peaks, seconds, data


def _rows(record: _Record, rows: NDArray[np.int64]) -> _Record:
    """Select rows of all arrays of a record; plain numbers stay."""
    arrays = {
        field.name: value[rows]
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), np.ndarray)
    }
    return replace(record, **arrays)


def _end_to_end(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros(0)
