"""Enumerate what a search tries for a spec: the values of every axis, and their combinations.

Does not belong here: the rules that combinations have to keep (`mesh.rules`), memory, time,
choosing (`layouts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from hpctrain.plan.abilities.sharding import offload_choices, shard_choices, zero_choices
from hpctrain.plan.abilities.trainable import untrainable_axes
from hpctrain.plan.divisors import divisors
from hpctrain.plan.documents import RECOMPUTES, Recompute
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.mesh.axes import Axes
from hpctrain.plan.mesh.candidate import (
    COLUMN_NAMES,
    Columns,
    Recomputation,
    Whole,
    micro_choices,
    recomputations,
    settled,
    tensor_sizes,
    whole_recomputations,
)
from hpctrain.plan.mesh.placement import possible_domains, stays_inside
from hpctrain.plan.mesh.rules import CANDIDATE_RULES, MESH_RULES, Mask, allowed, longest_chunk
from hpctrain.plan.mesh.stages import Split
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ParallelSpec, RunSpec

# (embedding, loss) as layers of the pipeline, in the order in which they are tried. Llama 3 405B
# has 126 layers so that 126 + 2 divides (arXiv 2407.21783, section 3.3.2).
EMBEDDING_LOSS_AS_LAYERS = ((False, False), (True, True), (False, True), (True, False))
# Modules of `recompute_modules` in which nothing is drawn at random.
_WITHOUT_DROPOUT = frozenset({"layernorm", "moe_act", "mla_up_proj"})


@dataclass(frozen=True)
class Freedom(Axes[tuple[int, ...]]):
    """Values of each axis; one value means that it is fixed.

    `counted`: (embedding, loss) as pipeline layers; the first of them that divides is used.
    `stages`: the split that a spec lists, which then has exactly one pp and vpp.
    `etps`: 0 for the default. `sequence_parallel`: None means on where tp > 1. `uneven`: where
    nothing divides the layers, stages of nearly equal length are tried.
    """

    gpus: int
    micro_batches: tuple[int, ...]
    recomputes: tuple[Recomputation, ...]
    zeros: tuple[int, ...]
    offloads: tuple[int, ...]
    shards: tuple[int, ...]
    orders: tuple[int, ...]
    sequence_parallel: bool | None = None
    counted: tuple[tuple[bool, bool], ...] = EMBEDDING_LOSS_AS_LAYERS
    stages: Split | None = None
    uneven: bool = False
    etps: tuple[int, ...] = (0,)


def freedom_of(request: PlanRequest) -> Freedom:
    """List everything that the spec leaves open on its number of GPUs."""
    spec = request.spec
    given = _given(request, spec.resources.gpus)
    if spec.parallel != "auto":
        return given
    layers, axes, sizes = spec.model.layers, _axes(spec), divisors(given.gpus)
    splits_context = "cp" in axes and spec.model.causal  # megatron-core's BERT has none
    experts = spec.model.moe.experts if spec.model.moe else 1
    chunks = sorted({n for count in range(layers, layers + 3) for n in divisors(count)})
    return replace(
        given,
        tp=_tensor_choices(spec, sizes) if "tp" in axes else (1,),
        pp=tuple(n for n in sizes if n <= layers + 2) if "pp" in axes else (1,),
        cp=tuple(n for n in sizes if n <= spec.model.seq // 2) if splits_context else (1,),
        ep=tuple(n for n in sizes if n <= experts) if "ep" in axes else (1,),
        vpp=tuple(n for n in chunks if n <= layers) if "vpp" in axes else (1,),
        etps=_expert_splits(spec, sizes) if {"tp", "ep"} <= set(axes) else (0,),
        counted=EMBEDDING_LOSS_AS_LAYERS,
        uneven=True,
    )


def hint_freedom(request: PlanRequest, gpus: int) -> Freedom:
    """List what a hint may propose instead of the spec's choices.

    Another tp (inside the NVLink domain), pp, microbatch or recomputation, and no vpp.
    """
    spec, profile = request.spec, request.profile
    domains = possible_domains(spec.resources, profile, gpus)
    given, axes, sizes = _given(request, gpus), _axes(spec), divisors(gpus)
    near = [
        tp
        for tp in tensor_sizes(spec.model)
        if any(stays_inside(1, tp, gpus, domain) for domain in domains)
    ]
    micro = () if spec.batch.micro == "auto" else (spec.batch.micro,)
    ep: tuple[int, ...] = (1,)
    if spec.model.moe is not None and "ep" in spec.engine.abilities.axes:
        experts = spec.model.moe.experts
        ep = tuple({*given.ep, *(n for n in sizes if experts % n == 0)})
    return replace(
        given,
        tp=_tensor_choices(spec, (n for n in near if gpus % n == 0)) if "tp" in axes else (1,),
        pp=tuple(n for n in sizes if n <= spec.model.layers + 2) if "pp" in axes else (1,),
        ep=ep,
        vpp=tuple({1, *given.vpp}),
        micro_batches=tuple(sorted({1, 2, 4, 8, *micro})),
        recomputes=whole_recomputations(spec, _combinable(spec, RECOMPUTES)),
        shards=(spec.optimizer.shard_gpus or 0,),
        orders=(ORDERS.index(DEFAULT_ORDER),),
        counted=EMBEDDING_LOSS_AS_LAYERS,
        stages=None,
    )


def _given(request: PlanRequest, gpus: int) -> Freedom:
    """List what is open in the layout that the spec gives; for `auto`, in one without any axis."""
    spec = request.spec
    parallel = ParallelSpec() if spec.parallel == "auto" else spec.parallel
    order = parallel.order
    return Freedom(
        gpus=gpus,
        tp=(parallel.tp,),
        pp=(parallel.pp,),
        cp=(parallel.cp,),
        ep=(parallel.ep,),
        vpp=(parallel.vpp,),
        micro_batches=micro_choices(spec),
        recomputes=recompute_choices(spec),
        zeros=zero_choices(spec),
        offloads=offload_choices(spec),
        shards=shard_choices(spec, possible_domains(spec.resources, request.profile, gpus)[-1]),
        orders=tuple(range(len(ORDERS))) if order == "auto" else (ORDERS.index(order),),
        sequence_parallel=settled(spec, parallel).sequence_parallel,
        counted=((parallel.count_embedding, parallel.count_loss),),
        stages=parallel.stages,
        etps=(parallel.etp or 0,),
    )


def _axes(spec: RunSpec) -> tuple[str, ...]:
    """List the axes that the search may use: only those that this engine can train."""
    if spec.model.reads_images:
        return ()
    refused = untrainable_axes(spec)
    return tuple(axis for axis in spec.engine.abilities.trained_axes if axis not in refused)


def _tensor_choices(spec: RunSpec, sizes: Iterable[int]) -> tuple[int, ...]:
    """Select sizes of tp; an engine that copies no key/value heads needs divisors of them."""
    heads, groups = spec.model.heads, spec.model.key_value_heads
    copies = spec.engine.abilities.copies_kv_heads
    return tuple(n for n in sizes if n <= heads and (copies or groups % n == 0))


def _expert_splits(spec: RunSpec, sizes: Iterable[int]) -> tuple[int, ...]:
    """List ranks that may split one expert, 0 for the default; none without experts."""
    if spec.model.moe is None or not spec.engine.abilities.splits_experts:
        return (0,)
    return (0, *(n for n in _tensor_choices(spec, sizes) if n > 1))


def recompute_choices(spec: RunSpec) -> tuple[Recomputation, ...]:
    """List ways to compute again: for `auto` all that are possible."""
    if spec.recompute != "auto":
        return recomputations(spec, (spec.recompute,))
    if not spec.model.recomputes:
        return recomputations(spec, ("none",))
    return recomputations(spec, _combinable(spec, spec.engine.abilities.recomputes))


def _combinable(spec: RunSpec, modes: Iterable[Recompute]) -> tuple[Recompute, ...]:
    """Select what can be computed again beside other settings of the spec.

    megatron-core offloads activations or computes them again. It does not compute whole layers
    again whose CUDA graphs it captures, nor modules with dropout, which a graph cannot draw again
    (transformer_config.py). Only `full` counts layers.
    """
    if spec.offloaded_layers:
        return ("none",)
    if spec.recompute_layers is not None:
        return ("full",)
    if spec.engine.megatron.cuda_graph_impl == "none":
        return tuple(modes)
    drawn = spec.model.dropout and not _WITHOUT_DROPOUT.issuperset(spec.recompute_modules)
    excluded = ("full", "selective") if drawn else ("full",)
    return tuple(mode for mode in modes if mode not in excluded)


# -- Combinations of free values, without those that break a rule --------------------------------


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
