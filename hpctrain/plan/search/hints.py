"""Find the layouts that fit and are nearest to a spec that does not.

Belongs here: the distance between a candidate and the spec. Does not belong here: messages.
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.documents import RECOMPUTES
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import Columns
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Floats, Found, search
from hpctrain.plan.search.space import hint_freedom
from hpctrain.spec.run import ParallelSpec, RunSpec


def nearest_fits(
    request: PlanRequest, gpus: int | None = None, count: int = 3
) -> tuple[Candidate, ...]:
    """Find up to `count` layouts that leave memory to the allocator, the nearest first."""
    spec = request.spec
    freedom = hint_freedom(request, gpus or spec.resources.gpus)
    priced = search(request, freedom, timed=False)
    rows = np.flatnonzero(priced.roomy)
    distances = distance(spec, priced.columns.take(rows))
    nearest: dict[ParallelSpec, Candidate] = {}
    for row in rows[np.argsort(distances, kind="stable")]:
        candidate = priced.candidate(int(row))
        nearest.setdefault(candidate.parallel, candidate)
        if len(nearest) == count:
            break
    return tuple(nearest.values())


def distance(spec: RunSpec, columns: Columns) -> Floats:
    """Compute how far candidates are from the spec, for ranking.

    A doubling of an axis counts 1, of the microbatch 0.5, a step of recomputation 0.6; among
    equals a small bubble and a large microbatch come first. Candidates without offload come
    before those with it.
    """
    total = np.zeros(len(columns))
    if spec.parallel != "auto":
        for name in ("tp", "pp", "vpp", "ep"):
            total += np.abs(np.log2(getattr(columns, name) / getattr(spec.parallel, name)))
    if spec.batch.micro != "auto":
        total += 0.5 * np.abs(np.log2(columns.micro_batch / spec.batch.micro))
    if spec.recompute != "auto":
        total += 0.6 * np.abs(columns.recompute - RECOMPUTES.index(spec.recompute))
    bubble = (columns.pp - 1) / (columns.vpp * columns.accumulation)
    tie_break = 0.1 * bubble + 0.01 * columns.recompute + 0.005 * columns.zero + 2 * columns.offload
    return np.asarray(total + tie_break - 0.001 * np.log2(columns.micro_batch), dtype=float)


def larger_fit(request: PlanRequest, limit: int) -> Candidate | None:
    """Find a candidate on more GPUs than in the spec, doubling up to `limit`; None if none."""
    gpus, per_node = request.spec.resources.gpus * 2, request.profile.gpu.per_node
    while gpus <= limit:
        whole = gpus <= per_node or gpus % per_node == 0
        fitting = nearest_fits(request, gpus, count=1) if whole else ()
        if fitting:
            return fitting[0]
        gpus *= 2
    return None


def roomiest(found: Found) -> Candidate:
    """Return the candidate that needs the least memory; there must be one."""
    return found.candidate(int(np.argmin(found.peak_bytes)))
