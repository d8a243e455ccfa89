"""Find the layouts that fit and are nearest to a spec that does not.

Belongs here: the distance between a candidate and the spec. Does not belong here: messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpctrain.plan.cost.case import Floats
from hpctrain.plan.documents import RECOMPUTES, Layout
from hpctrain.plan.mesh.candidate import Candidate, Columns
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import search
from hpctrain.plan.search.space import freedom_of, hint_freedom
from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.run import RunSpec


def nearest_fits(
    request: PlanRequest, gpus: int | None = None, count: int = 3
) -> tuple[Candidate, ...]:
    """Find up to `count` layouts that leave memory to the allocator, the nearest first."""
    spec = request.spec
    freedom = hint_freedom(request, gpus or spec.resources.gpus)
    priced = search(request, freedom, timed=False)
    rows = np.flatnonzero(priced.roomy)
    distances = distance(spec, priced.columns.take(rows))
    nearest: dict[Layout, Candidate] = {}
    for row in rows[np.argsort(distances, kind="stable")]:
        candidate = priced.candidate(int(row))
        nearest.setdefault(candidate.layout, candidate)
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


def sizes_around(gpus: int, per_node: int, limit: int) -> tuple[int, ...]:
    """List other numbers of GPUs to try, up to `limit`, the nearest first, larger ones before.

    Whole nodes 1, 2, 4, ... away, or parts of one node; halves, doubles, and the limit.
    """
    if gpus < per_node:
        sizes = {*range(1, per_node), per_node}
    else:
        steps = [per_node << power for power in range(limit.bit_length())]
        sizes = {gpus - step for step in steps} | {gpus + step for step in steps}
        sizes |= {gpus >> power for power in range(1, gpus.bit_length())}
    sizes |= {gpus << power for power in range(1, limit.bit_length())} | {limit}
    possible = {n for n in sizes if 0 < n <= limit and n != gpus}
    whole = {n for n in possible if n <= per_node or n % per_node == 0}
    return tuple(sorted(whole, key=lambda n: (abs(n - gpus), -n)))


def fit_around(request: PlanRequest, sizes: Sequence[int]) -> Candidate | None:
    """Find a candidate on the first of `sizes` that has one; None if none has."""
    for gpus in sizes:
        fitting = nearest_fits(request, gpus, count=1)
        if fitting:
            return fitting[0]
    return None


def lighter_settings(request: PlanRequest) -> tuple[str, ...]:
    """Find the fewest settings of `engine.megatron` with which the spec's own layouts fit.

    Those of NVIDIA's recipes for 8 bits (Megatron-Bridge, training/mixed_precision.py): gradients
    in 16 bits, and with `precision: fp8` weights in 8 bits alone. Both change what is computed, so
    no plan chooses them. Empty where they do not help or do not exist.
    """
    spec, own = request.spec, request.spec.engine.megatron
    if spec.engine.abilities.model_classes != MEGATRON_CORE or spec.precision == "fp32":
        return ()
    known = [("grad_reduce_in_fp32", False)] if own.grad_reduce_in_fp32 else []
    sharded = spec.optimizer.distributed and spec.optimizer.offload == "none"
    if spec.precision == "fp8" and sharded and not own.fp8_param_gather:
        known.append(("fp8_param_gather", True))
    for chosen in (*((one,) for one in known), tuple(known)):
        lighter = own.model_copy(update=dict(chosen))
        engine = spec.engine.model_copy(update=dict(megatron=lighter))
        changed = replace(request, spec=spec.model_copy(update={"engine": engine}))
        if chosen and search(changed, freedom_of(changed), timed=False).fits.any():
            return tuple(f"engine.megatron.{name}={str(on).lower()}" for name, on in chosen)
    return ()
