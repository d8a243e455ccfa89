"""Enumerate all combinations of free values, without those that break a rule.

Belongs here: enumeration. Does not belong here: the rules (`mesh.rules`), memory, time, choosing.

A *structure* is a mesh with its vpp and split; a candidate is a structure with microbatch,
recomputation, sharding and order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.mesh.columns import Columns
from hpctrain.plan.mesh.rules import (
    CANDIDATE_RULES,
    MESH_RULES,
    LayoutValues,
    ManyLayouts,
    Mask,
    Whole,
    allowed,
    longest_chunk,
)
from hpctrain.plan.search.space import Freedom
from hpctrain.spec.run import RunSpec

DEFAULT = 0  # the position of DEFAULT_ORDER in ORDERS


@dataclass(frozen=True)
class Splits:
    """Layers of the first, a middle and the last stage; what counts as a layer."""

    embedding: Whole
    loss: Whole
    uneven: Whole
    first: Whole
    middle: Whole
    last: Whole


@dataclass(frozen=True)
class Structures:
    """Meshes whose product divides the GPUs; `feasible`: those that the rules allow.

    What makes a structure a candidate is 0 in `layouts`.
    """

    layouts: ManyLayouts
    splits: Splits
    feasible: Mask

    def __len__(self) -> int:
        return len(self.layouts.tp)


def structures(spec: RunSpec, freedom: Freedom) -> Structures:
    """List every tp x cp x pp that divides the GPUs, with every ep and (behind a pipeline) vpp.

    Where etp is free, it splits experts over ranks that split the other layers too, and only with
    ep: without, it is tp.
    """
    axes = (freedom.tp, freedom.cp, freedom.pp, freedom.vpp, freedom.ep, freedom.etps)
    grid = np.meshgrid(*(np.array(axis, dtype=np.int64) for axis in axes), indexing="ij")
    tp, cp, pp, vpp, ep, etp = (axis.ravel() for axis in grid)
    kept = (freedom.gpus % (tp * cp * pp) == 0) & ((vpp == 1) | (pp > 1))
    if len(freedom.etps) > 1:
        kept &= (etp == 0) | ((etp <= tp) & (ep > 1))
    tp, cp, pp, vpp, ep, etp = (axis[kept] for axis in (tp, cp, pp, vpp, ep, etp))
    sequence_parallel = freedom.sequence_parallel
    splits = _splits(spec.model.layers, freedom, pp, vpp)
    zero = np.zeros_like(tp)
    layouts = LayoutValues[Whole](
        gpus=freedom.gpus,
        stages=freedom.stages,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        etp=etp,
        sequence_parallel=np.where(tp > 1, sequence_parallel is not False, 0),
        count_embedding=splits.embedding,
        count_loss=splits.loss,
        listed=splits.uneven,
        micro_batch=zero,
        zero=zero,
        shard_gpus=zero,
        order=zero,
    )
    return Structures(layouts, splits, allowed(spec, layouts, MESH_RULES))


def _splits(layers: int, freedom: Freedom, pp: Whole, vpp: Whole) -> Splits:
    """Split the layers over pp x vpp chunks in the first way that works out.

    The ways: as the spec lists them (`middle` is the longest in between), evenly, evenly with
    embedding and loss counted as layers, and, without vpp, stages that differ by one layer.
    """
    if freedom.stages is not None:
        count, zero = int(pp[0]) if len(pp) else 1, np.zeros_like(pp)
        listed = [sum(freedom.stages[index::count]) for index in range(count)]
        return Splits(
            embedding=zero,
            loss=zero,
            uneven=zero + 1,
            first=zero + listed[0],
            middle=zero + max(listed[1:-1], default=max(listed)),
            last=zero + listed[-1],
        )
    chunks = pp * vpp
    # where no way works out, the last one stays, which the rules then refuse
    embedding, loss = (np.full_like(pp, int(counts)) for counts in freedom.counted[-1])
    even = np.zeros(pp.shape, dtype=bool)
    for first, last in freedom.counted:
        fits = ~even & ((layers + first + last) % chunks == 0)
        embedding[fits], loss[fits] = int(first), int(last)
        even |= fits
    uneven = ~even & (vpp == 1) & (pp <= layers) if freedom.uneven else np.zeros_like(even)
    embedding[uneven], loss[uneven] = 0, 0
    each = (layers + embedding + loss) // chunks * vpp
    each = np.where(uneven, -(-layers // pp), each)
    more = np.where(uneven, layers % pp, 0)
    short = np.where(uneven, 1, 0)
    alone, two = pp == 1, pp == 2
    start = np.where(alone, layers, each - embedding - short * (more <= pp - 2))
    end = np.where(alone, layers, each - loss - short)
    return Splits(
        embedding=embedding,
        loss=loss,
        uneven=uneven.astype(np.int64),
        first=start,
        middle=np.where(alone | two, np.maximum(start, end), each),
        last=end,
    )


def enumerated(found: Structures, freedom: Freedom) -> int:
    """Count the candidates before any rule; orders differ only where pp and dp are above 1."""
    choices = (freedom.micro_batches, freedom.recomputes, freedom.zeros, freedom.offloads)
    each = len(freedom.shards)
    for axis in choices:
        each *= len(axis)
    both = (found.layouts.pp > 1) & (found.layouts.dp > 1)
    orders = np.where(both, len(freedom.orders), 1)
    return int(orders.sum()) * each


def tables(
    spec: RunSpec, freedom: Freedom, found: Structures, rows_per_table: int
) -> Iterator[Columns]:
    """Yield the feasible candidates, in tables of about `rows_per_table` rows at most.

    They come in the order of the structures; no table is empty.
    """
    each = (
        len(freedom.micro_batches) * len(freedom.recomputes) * len(freedom.zeros)
        * len(freedom.offloads) * len(freedom.shards) * len(freedom.orders)
    )  # fmt: skip
    rows = np.flatnonzero(found.feasible)
    step = max(1, rows_per_table // each)
    for start in range(0, len(rows), step):
        table = _expanded(spec, freedom, found, rows[start : start + step])
        if len(table):
            yield table


def _expanded(spec: RunSpec, freedom: Freedom, found: Structures, rows: Whole) -> Columns:
    """Combine some structures with all other choices, without those that break a rule."""
    choices = (
        freedom.micro_batches, range(len(freedom.recomputes)), freedom.zeros,
        freedom.offloads, freedom.shards, freedom.orders,
    )  # fmt: skip
    grid = np.meshgrid(rows, *(np.array(c, dtype=np.int64) for c in choices), indexing="ij")
    row, micro, way, zero, offload, shard, order = (axis.ravel() for axis in grid)
    mesh, splits = found.layouts, found.splits
    chunk = longest_chunk(spec, mesh) + 0 * mesh.pp
    again = _recomputed(freedom, chunk[row], mesh.pp[row], way)
    layouts = LayoutValues[Whole](
        gpus=mesh.gpus,
        stages=mesh.stages,
        tp=mesh.tp[row],
        cp=mesh.cp[row],
        pp=mesh.pp[row],
        vpp=mesh.vpp[row],
        ep=mesh.ep[row],
        etp=mesh.etp[row],
        sequence_parallel=mesh.sequence_parallel[row],
        count_embedding=mesh.count_embedding[row],
        count_loss=mesh.count_loss[row],
        listed=mesh.listed[row],
        micro_batch=micro,
        zero=zero,
        shard_gpus=shard,
        order=order,
    )
    # without pipeline or replicas all orders are the same
    both = (layouts.pp > 1) & (layouts.dp > 1)
    once = both | (order == freedom.orders[0])
    if len(freedom.orders) > 1:
        layouts = replace(layouts, order=np.where(both, order, DEFAULT))
    kept = np.flatnonzero(once & again.distinct & allowed(spec, layouts, CANDIDATE_RULES))

    def of(values: Whole) -> NDArray[np.int32]:
        return values[kept].astype(np.int32)

    structure = row[kept]
    return Columns(
        tp=of(layouts.tp),
        pp=of(layouts.pp),
        vpp=of(layouts.vpp),
        cp=of(layouts.cp),
        ep=of(layouts.ep),
        etp=of(layouts.etp),
        dp=of(layouts.dp),
        sequence_parallel=of(layouts.sequence_parallel),
        count_embedding=of(layouts.count_embedding),
        count_loss=of(layouts.count_loss),
        uneven=of(layouts.listed),
        layers_first=splits.first[structure].astype(np.int32),
        layers_middle=splits.middle[structure].astype(np.int32),
        layers_last=splits.last[structure].astype(np.int32),
        micro_batch=of(micro),
        accumulation=of(spec.batch.global_ // (micro * layouts.dp)),
        recompute=of(again.mode),
        recompute_modules=of(again.modules),
        recompute_layers=of(again.layers),
        offloaded_layers=of(again.offloaded),
        zero=of(zero),
        shard_gpus=of(shard),
        offload=of(offload),
        order=of(layouts.order),
    )


@dataclass(frozen=True)
class _Recomputed:
    """Recomputation of many candidates; `distinct`: no other of the same chunk is the same."""

    mode: Whole
    modules: Whole
    layers: Whole
    offloaded: Whole
    distinct: Mask


def _recomputed(freedom: Freedom, chunk: Whole, pp: Whole, way: Whole) -> _Recomputed:
    """Translate positions in `freedom.recomputes`; `chunk`: layers of the longest chunk.

    Activations are offloaded without a pipeline only, whose one chunk is the whole model.
    """
    mode, modules, fixed, quarters, away, away_quarters = (
        np.array([getattr(one, name) for one in freedom.recomputes], dtype=np.int64)[way]
        for name in (
            *("mode", "modules", "layers", "quarters"),
            *("offloaded", "offloaded_quarters"),
        )
    )
    layers, some = _part(chunk, quarters)
    offloaded, others = _part(chunk, away_quarters)
    return _Recomputed(
        mode=mode,
        modules=modules,
        layers=np.where(quarters > 0, layers, fixed),
        offloaded=np.where(away_quarters > 0, offloaded, away),
        distinct=some & others & ((away_quarters == 0) | (pp == 1)),
    )


def _part(chunk: Whole, quarters: Whole) -> tuple[Whole, Mask]:
    """Return so many quarters of a chunk, and where that is no other part of it."""
    layers = quarters * chunk // 4
    more = layers > (quarters - 1) * chunk // 4
    return layers, (quarters == 0) | ((layers > 0) & more & (layers < chunk))
