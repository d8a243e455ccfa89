"""All combinations of what is free, and the rules that sort out impossible ones.

The rules are those of `layout`, `batch`, `rank_order` and `sharding`, written over arrays: there
they make sentences about one layout, here a mask over all. A unit test compares both for every
combination of small cases. Belongs here: enumeration and rules. Does not belong here: memory, time,
choosing.

A *structure* is a mesh with its vpp and split; a candidate is a structure with microbatch,
recomputation, sharding and order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.mesh.columns import Columns
from hpctrain.plan.mesh.layout import split_widths
from hpctrain.plan.mesh.rank_order import ORDERS
from hpctrain.plan.mesh.stages import Split
from hpctrain.plan.search.space import Freedom
from hpctrain.spec.run import RunSpec

Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]
DEFAULT, OTHER = 0, 1  # positions in ORDERS
assert ORDERS == ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


@dataclass(frozen=True)
class Splits:
    """Layers of the first, a middle and the last stage; what counts as a layer; `found` where the
    layers can be split at all."""

    embedding: Whole
    loss: Whole
    uneven: Whole
    first: Whole
    middle: Whole
    last: Whole
    found: Mask


@dataclass(frozen=True)
class Structures:
    """Meshes whose product divides the GPUs; `feasible` says which ones the rules allow."""

    tp: Whole
    cp: Whole
    pp: Whole
    vpp: Whole
    ep: Whole
    dp: Whole
    sequence_parallel: Whole
    splits: Splits
    feasible: Mask

    def __len__(self) -> int:
        return len(self.tp)


def structures(spec: RunSpec, freedom: Freedom) -> Structures:
    """Every tp x cp x pp that divides the GPUs, with every ep and (behind a pipeline) vpp."""
    axes = (freedom.tp, freedom.cp, freedom.pp, freedom.vpp, freedom.ep)
    grid = np.meshgrid(*(np.array(axis, dtype=np.int64) for axis in axes), indexing="ij")
    tp, cp, pp, vpp, ep = (axis.ravel() for axis in grid)
    kept = (freedom.gpus % (tp * cp * pp) == 0) & ((vpp == 1) | (pp > 1))
    tp, cp, pp, vpp, ep = (axis[kept] for axis in (tp, cp, pp, vpp, ep))
    parallel = _sequence_parallel(freedom, tp)
    splits = _splits(spec, freedom, pp, vpp)
    feasible = splits.found & _model_rules(spec, tp, cp, ep, parallel)
    feasible &= _axis_rules(spec, tp, cp, pp, vpp, ep, freedom.gpus)
    return Structures(
        *(tp, cp, pp, vpp, ep, freedom.gpus // (tp * cp * pp), parallel, splits, feasible)
    )


def _sequence_parallel(freedom: Freedom, tp: Whole) -> Whole:
    asked = freedom.sequence_parallel
    return np.where(tp > 1, 1 if asked is None else int(asked), 0).astype(np.int64)


def _splits(spec: RunSpec, freedom: Freedom, pp: Whole, vpp: Whole) -> Splits:
    """How the layers are split over pp x vpp chunks: the first way that works out.

    The ways: as the spec lists them, evenly, evenly with embedding and loss counted as layers,
    and, without vpp, stages that differ by one layer.
    """
    if freedom.stages is not None:
        return _listed(freedom.stages, pp)
    layers, chunks = spec.model.layers, pp * vpp
    embedding, loss = np.zeros_like(pp), np.zeros_like(pp)
    even = np.zeros(pp.shape, dtype=bool)
    for first, last in freedom.counted:
        fits = ~even & ((layers + first + last) % chunks == 0)
        embedding[fits], loss[fits] = int(first), int(last)
        even |= fits
    uneven = ~even & (vpp == 1) & (pp <= layers) if freedom.uneven else np.zeros_like(even)
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
        found=even | uneven,
    )


def _listed(split: Split, pp: Whole) -> Splits:
    """The one split of a spec that lists its stages; `middle` is the longest in between."""
    count = int(pp[0]) if len(pp) else 1
    stages = [sum(split[index::count]) for index in range(count)]
    middle = max(stages[1:-1], default=max(stages))
    zero = np.zeros_like(pp)
    return Splits(
        embedding=zero,
        loss=zero,
        uneven=zero + 1,
        first=zero + stages[0],
        middle=zero + middle,
        last=zero + stages[-1],
        found=np.ones(pp.shape, dtype=bool),
    )


def _model_rules(spec: RunSpec, tp: Whole, cp: Whole, ep: Whole, parallel: Whole) -> Mask:
    """`layout.tensor_problems`, `_expert_problems` and `_sequence_problems`."""
    model = spec.model
    groups = model.key_value_heads
    fine = ((groups % tp == 0) | (tp % groups == 0)) & (
        (model.heads + 2 * groups) * model.head_size % tp == 0
    )
    for _, size in split_widths(model):
        fine &= size % tp == 0
    if model.moe is None:
        fine &= ep == 1
    else:
        fine &= (model.moe.experts % ep == 0) & ((ep > 1) | (model.moe.ffn % tp == 0))
        fine &= (tp == 1) | ((parallel > 0) & ((ep > 1) | (not model.bias)))
    fine &= (cp == 1) | (model.seq % (2 * cp) == 0)
    fine &= (parallel == 0) | (model.seq // cp % tp == 0)
    return np.asarray(fine, dtype=bool)


def _axis_rules(
    spec: RunSpec, tp: Whole, cp: Whole, pp: Whole, vpp: Whole, ep: Whole, gpus: int
) -> Mask:
    """`sharding.axis_problems`, and of `layout` what is about context parallelism, ranks of experts
    and token prediction."""
    allowed = () if spec.model.reads_images else spec.engine.abilities.axes
    fine = np.ones(tp.shape, dtype=bool)
    for name, axis in (("tp", tp), ("cp", cp), ("pp", pp), ("vpp", vpp), ("ep", ep)):
        if name not in allowed:
            fine &= axis == 1
    if spec.engine.implementation == "local":
        fine &= cp == 1
    if spec.model.mtp_layers and spec.model.positions == "learned":
        fine &= pp == 1
    spread = np.where(ep > 1, ep, tp)
    return np.asarray(fine & (gpus // pp % spread == 0), dtype=bool)


def enumerated(found: Structures, freedom: Freedom) -> int:
    """How many candidates there are before any rule; orders differ behind pp and dp only."""
    choices = (freedom.micro_batches, freedom.recomputes, freedom.zeros, freedom.offloads)
    each = len(freedom.shards)
    for axis in choices:
        each *= len(axis)
    both = (found.pp > 1) & (found.dp > 1)
    orders = np.where(both, len(freedom.orders), 1)
    return int(orders.sum()) * each


def tables(
    spec: RunSpec, freedom: Freedom, found: Structures, rows_per_table: int
) -> Iterator[Columns]:
    """The feasible candidates, in tables of about `rows_per_table` rows at most.

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
    """All feasible candidates of some structures."""
    choices = (
        freedom.micro_batches, freedom.recomputes, freedom.zeros,
        freedom.offloads, freedom.shards, freedom.orders,
    )  # fmt: skip
    grid = np.meshgrid(rows, *(np.array(c, dtype=np.int64) for c in choices), indexing="ij")
    row, micro, recompute, zero, offload, shard, order = (axis.ravel() for axis in grid)
    both = (found.pp[row] > 1) & (found.dp[row] > 1)
    order = np.where(both, order, freedom.orders[0] if len(freedom.orders) == 1 else DEFAULT)
    once = both | (grid[-1].ravel() == freedom.orders[0])
    fine = once & _batch_rule(spec, found, row, micro) & _order_rule(found, row, order)
    fine &= _sharding_rules(found, row, zero, offload, shard)
    if not spec.engine.abilities.stage3_with_tensors and spec.parallel == "auto":
        # what the trainer can (`trainable_deepspeed.untrainable_in_tensors`)
        fine &= (zero < 3) | (found.tp[row] == 1)
    kept = [axis[fine].astype(np.int32) for axis in (micro, recompute, zero, offload, shard, order)]
    return _columns(spec, found, row[fine], *kept)


def _batch_rule(spec: RunSpec, found: Structures, row: Whole, micro: Whole) -> Mask:
    """`batch.batch_problems`: micro x dp, times pp when interleaved, divides the global batch."""
    group = np.where(found.vpp[row] > 1, found.pp[row], 1)
    return np.asarray(spec.batch.global_ % (micro * found.dp[row] * group) == 0, dtype=bool)


def _order_rule(found: Structures, row: Whole, order: Whole) -> Mask:
    """`order.order_problems`: dense and expert pipelines have the same ranks."""
    tp, ep = found.tp[row], found.ep[row]
    alike = tp * found.cp[row] == np.where(ep > 1, 1, tp) * ep
    return np.asarray((order == DEFAULT) | (found.pp[row] == 1) | alike, dtype=bool)


def _sharding_rules(
    found: Structures, row: Whole, zero: Whole, offload: Whole, shard: Whole
) -> Mask:
    """Gradients are sharded (stage 2 and above) without a pipeline only; shards are equal parts.

    deepspeed/runtime/pipe/engine.py: PipelineEngine asserts a stage below `gradients`, because a
    pipeline accumulates over microbatches.
    """
    replicas = found.dp[row] * found.cp[row]
    parts = (shard == 0) | ((replicas % np.maximum(shard, 1) == 0) & (shard < replicas))
    whole_is_asked = (shard > 0) & (shard == replicas)
    return np.asarray(((zero < 2) | (found.pp[row] == 1)) & (parts | whole_is_asked), dtype=bool)


def _columns(spec: RunSpec, found: Structures, row: Whole, *free: NDArray[np.int32]) -> Columns:
    micro, recompute, zero, offload, shard, order = free

    def of(axis: Whole) -> NDArray[np.int32]:
        return axis[row].astype(np.int32)

    splits = found.splits
    return Columns(
        tp=of(found.tp),
        pp=of(found.pp),
        vpp=of(found.vpp),
        cp=of(found.cp),
        ep=of(found.ep),
        dp=of(found.dp),
        sequence_parallel=of(found.sequence_parallel),
        count_embedding=of(splits.embedding),
        count_loss=of(splits.loss),
        uneven=of(splits.uneven),
        layers_first=of(splits.first),
        layers_middle=of(splits.middle),
        layers_last=of(splits.last),
        micro_batch=micro,
        accumulation=(spec.batch.global_ // (micro * of(found.dp))).astype(np.int32),
        recompute=recompute,
        zero=zero,
        shard_gpus=shard,
        offload=offload,
        order=order,
    )
