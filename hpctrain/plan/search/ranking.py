"""Rank candidates: by time, by memory, or without times by size.

Belongs here: orders of preference over a table of priced candidates. Does not belong here:
prices, or messages about the choice (`alternatives`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.documents import Goal
from hpctrain.plan.mesh.batch import LOW_BUBBLE
from hpctrain.plan.mesh.columns import Columns
from hpctrain.plan.search.layouts import Found

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
