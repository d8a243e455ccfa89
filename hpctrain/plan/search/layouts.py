"""Search the layouts of a spec: enumerate, keep those that fit, and price them.

`grid` enumerates, `cost` prices; both work on tables of many candidates, each small enough for the
processor's cache. Belongs here: pricing all candidates and counting. Does not belong here: choosing
(`ranking`), hints (`hints`), explanations (`alternatives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.case import Case, Machine, Mesh
from hpctrain.plan.cost.from_spec import case_of, machine_for
from hpctrain.plan.cost.island_links import crossed_islands, shown_seconds, uplink_seconds
from hpctrain.plan.cost.memory import host_bytes, peak_bytes
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.documents import SearchCounts
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import Columns, joined
from hpctrain.plan.mesh.nvlink_domain import possible_domains
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.fitting import (
    PLAIN_DEVIATION,
    comfortable,
    deviations,
    probabilities,
)
from hpctrain.plan.search.grid import enumerated, structures, tables
from hpctrain.plan.search.space import Freedom

Floats = NDArray[np.float64]
_Record = TypeVar("_Record", Mesh, Machine)
# Estimates of the search are within this of the exact memory of a plan (closed forms of
# parameters): candidates above the capacity by no more than that are priced and counted exactly.
BORDER = 1.01
# Logarithms of peak over capacity beyond this are sure to fit, or sure not to.
NEAR = 0.4
# Rows of one table: some hundred arrays of that length pass through a cache of a few MiB.
ROWS_PER_TABLE = 8192


@dataclass(frozen=True)
class Found:
    """All feasible candidates with their prices, arrays of shape [candidates].

    `step_seconds` is NaN where a candidate does not fit and everywhere when the GPU is unknown.
    `deviation` is that of the logarithm of `peak_bytes`.
    """

    request: PlanRequest
    freedom: Freedom
    columns: Columns
    peak_bytes: Floats
    deviation: Floats
    step_seconds: Floats
    capacity_bytes: int
    enumerated: int
    nvlink_domain: int
    timed: bool

    @cached_property
    def probability(self) -> Floats:
        """Of fitting, of each candidate."""
        return probabilities(self.peak_bytes, self.deviation, self.capacity_bytes)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Candidates that fit as probably as the spec wants it."""
        return self.probability >= self.request.spec.fit_probability

    @property
    def roomy(self) -> NDArray[np.bool_]:
        """Candidates that are as good as sure to fit."""
        return self.probability >= comfortable(self.request)

    @property
    def nearly(self) -> NDArray[np.bool_]:
        """Candidates that fit, or whose exact count may do."""
        lean = self.peak_bytes / BORDER
        odds = probabilities(lean, self.deviation, self.capacity_bytes)
        return odds >= self.request.spec.fit_probability

    def exact_probability(self, row: int, peak_bytes: float) -> float:
        """Compute the probability that a row fits, of which the bytes are counted exactly."""
        odds = probabilities(np.array([peak_bytes]), self.deviation[[row]], self.capacity_bytes)
        return float(odds[0])

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
        return self.columns.candidate(row)


def search(request: PlanRequest, freedom: Freedom, timed: bool = True) -> Found:
    """Price all candidates that `freedom` allows; without step times if not `timed`."""
    spec, profile = request.spec, request.profile
    grid = structures(spec, freedom)
    timed = timed and machine_for(request) is not None
    capacity = int(profile.gpu.memory)
    # a spec that says how much is offloaded gets a warning instead (`explain`)
    free = spec.activation_offload_layers == "auto"
    host_capacity = float(profile.nodes.memory) / profile.gpu.per_node if free else np.inf
    islands = crossed_islands(freedom.gpus, profile) if timed else ()
    least = spec.fit_probability
    parts: list[tuple[Columns, Floats, Floats, Floats]] = []
    for columns in tables(spec, freedom, grid, ROWS_PER_TABLE):
        case = case_of(request, columns)
        peaks = _peaks(case, columns, host_capacity)
        deviation = _deviations(request, case, peaks, capacity)
        likely = probabilities(peaks / BORDER, deviation, capacity) >= least
        seconds, data = _priced(case, np.flatnonzero(likely & timed), len(columns))
        rows = np.flatnonzero(np.isfinite(seconds))
        if islands and len(rows):
            some = columns.take(rows)
            loads = uplink_seconds(request, some, islands)
            seconds[rows] += shown_seconds(some, case.software, seconds[rows], data[rows], loads)
        parts.append((columns, peaks, deviation, seconds))
    return Found(
        request=request,
        freedom=freedom,
        columns=joined([part[0] for part in parts] or [grid.take(slice(0))]),
        peak_bytes=_end_to_end([part[1] for part in parts]),
        deviation=_end_to_end([part[2] for part in parts]),
        step_seconds=_end_to_end([part[3] for part in parts]),
        capacity_bytes=capacity,
        enumerated=enumerated(grid, freedom),
        nvlink_domain=possible_domains(spec.resources, profile)[-1],
        timed=timed,
    )


def _peaks(case: Case, columns: Columns, host_capacity: float) -> Floats:
    """Compute peak bytes; infinite where a planner offloads more than a GPU's share of the host."""
    peaks = np.array(np.broadcast_to(np.asarray(peak_bytes(case), dtype=float), (len(columns),)))
    if np.any(case.mesh.kept_on_host):
        peaks = np.where(host_bytes(case) > host_capacity, np.inf, peaks)
    return peaks


def _deviations(request: PlanRequest, case: Case, peaks: Floats, capacity: int) -> Floats:
    """Compute the deviation of peaks that may or may not fit; of others any will do."""
    found = np.full(len(peaks), PLAIN_DEVIATION)
    near = np.abs(np.log(peaks / capacity)) < NEAR
    rows = np.flatnonzero(near)
    if len(rows):
        found[rows] = deviations(request, _taken(case, rows), peaks[rows])
    return found


def _priced(case: Case, rows: NDArray[np.intp], count: int) -> tuple[Floats, Floats]:
    """Compute (step seconds, data parallel messages among them) of `rows`; NaN elsewhere."""
    seconds, data = np.full(count, np.nan), np.zeros(count)
    # counted layers have a recomputation of their own in every stage, which takes longer
    some = np.broadcast_to(np.asarray(case.mesh.full_layers) > 0, (count,))[rows]
    for chosen in (rows[~some], rows[some]):
        if len(chosen):
            times = step_seconds(_taken(case, chosen))
            seconds[chosen], data[chosen] = times.total, times.data_messages
    return seconds, data


def _taken(case: Case, rows: NDArray[np.intp]) -> Case:
    parts = {name: _rows(getattr(case, name), rows) for name in ("mesh", "machine", "software")}
    return replace(case, **parts)


def _rows(record: _Record, rows: NDArray[np.intp]) -> _Record:
    """Select rows of all arrays of a record; plain numbers stay."""
    arrays = {
        field.name: value[rows]
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), np.ndarray)
    }
    return replace(record, **arrays)


def _end_to_end(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros(0)
