"""Search the layouts of a spec: price them, keep those that fit, and rank them.

`space` enumerates, `cost` prices; both work on tables of many candidates, each small enough for the
processor's cache. Belongs here: prices and probabilities of all candidates, orders of preference
over them. Does not belong here: peaks (`cost.memory`), beliefs (`plan.uncertainty`), hints
(`planner`), explanations (`alternatives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.case import Case, Floats, Machine, Mesh
from hpctrain.plan.cost.from_spec import case_of, machine_for
from hpctrain.plan.cost.memory import host_bytes, peak_bytes
from hpctrain.plan.cost.multipliers import places_of
from hpctrain.plan.cost.prediction import crossed_islands, shown_seconds, uplink_seconds
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.documents import TOLD_APART, Goal, SearchCounts
from hpctrain.plan.mesh.candidate import LOW_BUBBLE, Candidate, Columns, joined
from hpctrain.plan.mesh.placement import possible_domains
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.space import Freedom, enumerated, structures, tables
from hpctrain.plan.uncertainty.intervals import (
    Spread,
    belief_of,
    memory_deviation,
    probability_faster,
    time_effects,
)

# -- How likely candidates fit into a GPU's memory ----------------------------------------------


COMFORTABLE = 0.9  # a layout that fits with this probability is preferred to less sure ones
# Without a known deviation: what PyTorch's allocator wastes is a few percent of the memory, and a
# layout that fills less than 94 % of it fits with 90 % (see `deviations`).
PLAIN_DEVIATION = 0.048


def deviations(request: PlanRequest, case: Case, peaks: Floats) -> Floats:
    """Compute the deviation of the logarithm of each peak of the cost model: [rows]."""
    belief = belief_of(request)
    if belief is None:
        return np.full(len(peaks), PLAIN_DEVIATION)
    return memory_deviation(case, peaks, belief.memory, belief.memory_doubt, belief.known_gpu)


def probabilities(peaks: Floats, deviation: Floats, capacity_bytes: float) -> Floats:
    """Compute the probability that a GPU has enough memory: [rows]."""
    return Spread(peaks, deviation).within(capacity_bytes)


def comfortable(request: PlanRequest) -> float:
    """Return the probability from which on layouts are as good as sure, as the spec allows."""
    return max(COMFORTABLE, request.spec.fit_probability)


# -- The search ----------------------------------------------------------------------------------


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


# -- Orders of preference: by time, by memory, or without times by size ---------------------------


Rows = NDArray[np.intp]
NEAR_TIE = 0.01  # predictions are not better than that


def preferred(found: Found, goal: Goal | None = None) -> Rows:
    """Sort the rows that may be chosen, best first.

    Rows that are as good as sure to fit; only if there are none, those that fit as probably as
    the spec wants it.

    time, gpu-hours: the shortest step, given that it fits; within 1 % of it the simplest (fewest
    axes, no offload, the lowest ZeRO stage, Megatron's order of axes, the least recomputation),
    then the leanest.
    memory: the least memory; within 1 % of the capacity the fastest. Without times, whatever the
    goal: see `_by_size`.
    """
    goal = goal or found.request.goal
    rows = np.flatnonzero(found.roomy)
    if not len(rows):
        rows = np.flatnonzero(found.nearly)
    if not found.timed:
        return _by_size(found, rows)
    if not len(rows):
        return rows
    columns, peaks, seconds = found.columns, found.peak_bytes[rows], found.step_seconds[rows]
    if goal == "memory":
        near = peaks <= peaks.min() + NEAR_TIE * found.capacity_bytes
        best = _ordered(rows[near], seconds[near])
        rest = _ordered(rows[~near], peaks[~near])
    else:
        near = seconds <= (1 + NEAR_TIE) * seconds.min()
        best = _ordered(rows[near], *simplicity(columns.take(rows[near])), peaks[near])
        rest = _ordered(rows[~near], seconds[~near])
    return np.concatenate([best, rest])


def simplicity(columns: Columns) -> tuple[NDArray[np.int64], ...]:
    """Return keys that grow as a layout gets less simple, the most important first."""
    axes = sum(
        (np.asarray(getattr(columns, name) > 1, dtype=np.int64) for name in ("tp", "pp", "cp")),
        start=(columns.ep > 1).astype(np.int64) + (columns.vpp > 1),
    )
    others = (
        *(columns.offload, columns.offloaded_layers > 0, columns.zero, columns.shard_gpus > 0),
        columns.etp > 0,
        *(columns.order, columns.recompute),
    )
    return (np.asarray(axes), *(np.asarray(key, dtype=np.int64) for key in others))


def _by_size(found: Found, rows: Rows) -> Rows:
    """Sort without times: the smallest tp x pp x cp x ep, preferably without full recomputation.

    Model parallelism costs communication and bubbles, data parallelism hardly any; of equal
    products the larger tp, up to the NVLink domain (Narayanan et al. 2021, arXiv 2104.04473,
    section 3.2). Then little recomputation, and the largest microbatch that keeps the bubble
    under 10 %, else the least bubble: larger microbatches make more efficient matrix products
    (section 3.4).
    """
    columns = found.columns.take(rows)
    group = columns.tp * columns.pp * columns.cp * columns.ep
    bubble = (columns.pp - 1) / (columns.vpp * columns.accumulation)
    large = bubble > LOW_BUBBLE
    return _ordered(
        rows,
        *(
            columns.offload,
            columns.offloaded_layers > 0,
            columns.tp > found.nvlink_domain,
            columns.recompute == 2,
        ),
        *(group, -columns.tp, columns.cp, columns.vpp),
        *(columns.zero, columns.shard_gpus > 0, columns.order, columns.recompute, large),
        np.where(large, bubble, -columns.micro_batch),
    )


def _ordered(rows: Rows, *keys: NDArray[np.generic]) -> Rows:
    """Sort rows by keys, the first key first."""
    return rows[np.lexsort(keys[::-1])]


def pareto(found: Found) -> Rows:
    """Find the Pareto front of step time and memory, fastest first.

    Of rows with the same time and memory the first is taken. Empty when time is not predicted.
    """
    rows = np.flatnonzero(found.fits & np.isfinite(found.step_seconds))
    seconds, peaks = found.step_seconds[rows], found.peak_bytes[rows]
    order = np.lexsort((peaks, seconds))
    least = np.minimum.accumulate(peaks[order]) if len(order) else peaks
    better = np.ones(len(order), dtype=bool)
    better[1:] = peaks[order][1:] < least[:-1]
    return rows[order[better]]


# -- Which candidates a prediction cannot tell apart from the chosen one ------------------------
# What makes one layout of a model slower than planned mostly makes its neighbours slower too: the
# difference of two predictions is surer than either.


_MOST_LOOKED_AT = 16
_NEAR = 1.15  # of the best step: slower ones are not looked at


@dataclass(frozen=True)
class Rivals:
    """Other meshes that may be faster: how many, and the one that is nearest."""

    count: int
    nearest: str
    slower: float
    probability: float


def rivals(found: Found, row: int) -> Rivals | None:
    """Find meshes whose best candidate cannot be told apart from the chosen one.

    None where nothing is known of errors, or where something else than time was chosen by.
    """
    request, columns, seconds = found.request, found.columns, found.step_seconds
    if belief_of(request) is None or not found.timed or request.goal == "memory":
        return None
    near = np.flatnonzero(found.roomy & (seconds <= _NEAR * seconds[row]))
    near = near[columns.mesh[near] != columns.mesh[row]]
    near = near[np.argsort(seconds[near], kind="stable")]
    _, first = np.unique(columns.mesh[near], return_index=True)
    others = near[np.sort(first)][:_MOST_LOOKED_AT]
    if not len(others):
        return Rivals(0, "", 0.0, 0.0)
    rows = np.concatenate([[row], others]).astype(np.intp)
    odds = winner_faster(request, columns.take(rows), seconds[rows])[1:]
    open_ = np.flatnonzero(odds < TOLD_APART)
    if not len(open_):
        return Rivals(0, "", 0.0, 0.0)
    best = int(others[open_[0]])
    return Rivals(
        count=len(open_),
        nearest=str(found.candidate(best).layout),
        slower=float(seconds[best] / seconds[row] - 1),
        probability=1 - float(odds[open_[0]]),
    )


def winner_faster(request: PlanRequest, columns: Columns, seconds: NDArray[np.float64]) -> Floats:
    """Compute the probability that the first row has a shorter step than each row: [rows]."""
    belief = belief_of(request)
    assert belief is not None
    case = case_of(request, columns)
    effects, places = (
        np.broadcast_to(found, (len(columns), found.shape[1]))
        for found in (time_effects(case, belief.known_gpu), places_of(case))
    )
    return probability_faster(seconds, effects, places, belief.time, belief.time_doubt)
