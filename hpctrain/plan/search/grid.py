"""Enumerate all combinations of free values, without those that break a rule.

Belongs here: enumeration. Does not belong here: the rules (`mesh.rules`), memory, time, choosing.

A *structure* is a mesh with its vpp and split; a candidate is a structure with microbatch,
recomputation, sharding and order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from hpctrain.plan.mesh.candidate import Whole
from hpctrain.plan.mesh.columns import COLUMN_NAMES, Columns
from hpctrain.plan.mesh.rules import CANDIDATE_RULES, MESH_RULES, Mask, allowed, longest_chunk
from hpctrain.plan.search.space import Freedom
from hpctrain.spec.run import RunSpec

DEFAULT = 0  # the position of DEFAULT_ORDER in ORDERS


def structures(spec: RunSpec, freedom: Freedom) -> Columns:
    """List every tp x cp x pp that divides the GPUs, with every ep and (behind a pipeline) vpp.

    Where etp is free, it splits experts over ranks that split the other layers too, and only with
    ep: without, it is tp. What makes a structure a candidate is 0.
    """
    axes = (freedom.tp, freedom.cp, freedom.pp, freedom.vpp, freedom.ep, freedom.etps)
    grid = np.meshgrid(*(np.array(axis, dtype=np.int64) for axis in axes), indexing="ij")
    tp, cp, pp, vpp, ep, etp = (axis.ravel() for axis in grid)
    kept = (freedom.gpus % (tp * cp * pp) == 0) & ((vpp == 1) | (pp > 1))
    if len(freedom.etps) > 1:
        kept &= (etp == 0) | ((etp <= tp) & (ep > 1))
    tp, cp, pp, vpp, ep, etp = (axis[kept] for axis in (tp, cp, pp, vpp, ep, etp))
    mesh = dict(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    mesh["sequence_parallel"] = np.where(tp > 1, freedom.sequence_parallel is not False, 0)
    split = _split(spec.model.layers, freedom, pp, vpp)
    return Columns(
        gpus=freedom.gpus,
        batch=spec.batch.global_,
        layers=spec.model.layers,
        stages=freedom.stages,
        **{**dict.fromkeys(COLUMN_NAMES, np.zeros_like(tp)), **mesh, **split},
    )


def _split(layers: int, freedom: Freedom, pp: Whole, vpp: Whole) -> dict[str, Any]:
    """Split the layers over pp x vpp chunks in the first way that works out: fields of `Columns`.

    The ways: as the spec lists them (the middle is the longest in between), evenly, evenly with
    embedding and loss counted as layers, and, without vpp, stages that differ by one layer.
    """
    if freedom.stages is not None:
        count, zero = int(pp[0]) if len(pp) else 1, np.zeros_like(pp)
        listed = [sum(freedom.stages[index::count]) for index in range(count)]
        return dict(
            uneven=zero + 1,
            layers_first=zero + listed[0],
            layers_middle=zero + max(listed[1:-1], default=max(listed)),
            layers_last=zero + listed[-1],
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
    return dict(
        count_embedding=embedding,
        count_loss=loss,
        uneven=uneven.astype(np.int64),
        layers_first=start,
        layers_middle=np.where(alone | two, np.maximum(start, end), each),
        layers_last=end,
    )


def enumerated(layouts: Columns, freedom: Freedom) -> int:
    """Count the candidates before any rule; orders differ only where pp and dp are above 1."""
    both = (layouts.pp > 1) & (layouts.dp > 1)
    orders = np.where(both, len(freedom.orders), 1)
    return int(orders.sum()) * prod(map(len, _choices(freedom)[:-1]))


def _choices(freedom: Freedom) -> tuple[Sequence[int], ...]:
    """List what makes a structure a candidate: values of each choice, the order of axes last."""
    return (
        freedom.micro_batches, range(len(freedom.recomputes)), freedom.zeros,
        freedom.offloads, freedom.shards, freedom.orders,
    )  # fmt: skip


def tables(
    spec: RunSpec, freedom: Freedom, layouts: Columns, rows_per_table: int
) -> Iterator[Columns]:
    """Yield the feasible candidates, in tables of about `rows_per_table` rows at most.

    They come in the order of the structures; no table is empty.
    """
    rows = np.flatnonzero(allowed(spec, layouts, MESH_RULES))
    step = max(1, rows_per_table // prod(map(len, _choices(freedom))))
    for start in range(0, len(rows), step):
        table = _expanded(spec, freedom, layouts, rows[start : start + step])
        if len(table):
            yield table


def _expanded(spec: RunSpec, freedom: Freedom, structures: Columns, rows: Whole) -> Columns:
    """Combine some structures with all other choices, without those that break a rule."""
    choices = (np.array(values, dtype=np.int64) for values in _choices(freedom))
    grid = np.meshgrid(rows, *choices, indexing="ij")
    row, micro, way, zero, offload, shard, order = (axis.ravel() for axis in grid)
    layouts = structures.take(row)
    # without pipeline or replicas all orders are the same
    both = (layouts.pp > 1) & (layouts.dp > 1)
    once = both | (order == freedom.orders[0])
    if len(freedom.orders) > 1:
        order = np.where(both, order, DEFAULT)
    again, distinct = _recomputed(freedom, longest_chunk(spec, layouts), layouts.pp, way)
    chosen: dict[str, Any] = dict(
        micro_batch=micro, zero=zero, shard_gpus=shard, offload=offload, order=order
    )
    layouts = replace(layouts, **chosen, **again)
    return layouts.take(once & distinct & allowed(spec, layouts, CANDIDATE_RULES)).narrow()


def _recomputed(
    freedom: Freedom, chunk: Whole | int, pp: Whole, way: Whole
) -> tuple[dict[str, Any], Mask]:
    """Translate positions in `freedom.recomputes` into fields of `Columns`.

    `chunk`: layers of the longest chunk. The mask holds where no other way is the same for that
    chunk. Activations are offloaded without a pipeline only, whose one chunk is the whole model.
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
    return dict(
        recompute=mode,
        recompute_modules=modules,
        recompute_layers=np.where(quarters > 0, layers, fixed),
        offloaded_layers=np.where(away_quarters > 0, offloaded, away),
    ), some & others & ((away_quarters == 0) | (pp == 1))


def _part(chunk: Whole | int, quarters: Whole) -> tuple[Whole, Mask]:
    """Return so many quarters of a chunk, and where that is no other part of it."""
    layers = quarters * chunk // 4
    more = layers > (quarters - 1) * chunk // 4
    return layers, (quarters == 0) | ((layers > 0) & more & (layers < chunk))
