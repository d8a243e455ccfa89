"""List the values of every axis that a search tries for a spec.

Belongs here: the values. Does not belong here: their combinations (`grid`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpctrain.plan.abilities.sharding import offload_choices, shard_choices, zero_choices
from hpctrain.plan.abilities.trainable import untrainable_axes
from hpctrain.plan.divisors import divisors
from hpctrain.plan.documents import RECOMPUTES, Recompute
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.mesh.batch import micro_choices
from hpctrain.plan.mesh.layout import settled, tensor_sizes
from hpctrain.plan.mesh.nvlink_domain import possible_domains
from hpctrain.plan.mesh.placement import stays_inside
from hpctrain.plan.mesh.recomputation import (
    Recomputation,
    recomputations,
    whole_recomputations,
)
from hpctrain.plan.mesh.stages import Split
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ParallelSpec, RunSpec

# (embedding, loss) as layers of the pipeline, in the order in which they are tried. Llama 3 405B
# has 126 layers so that 126 + 2 divides (arXiv 2407.21783, section 3.3.2).
EMBEDDING_LOSS_AS_LAYERS = ((False, False), (True, True), (False, True), (True, False))
# Modules of `recompute_modules` in which nothing is drawn at random.
_WITHOUT_DROPOUT = frozenset({"layernorm", "moe_act", "mla_up_proj"})


@dataclass(frozen=True)
class Freedom:
    """Values of each axis; one value means that it is fixed.

    `counted`: (embedding, loss) as pipeline layers; the first of them that divides is used.
    `stages`: the split that a spec lists, which then has exactly one pp and vpp.
    `etps`: 0 for the default. `sequence_parallel`: None means on where tp > 1. `uneven`: where
    nothing divides the layers, stages of nearly equal length are tried.
    """

    gpus: int
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    vpp: tuple[int, ...]
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
    """List ways to compute again: for `auto` all that are possible; a ResNet has no blocks."""
    if spec.recompute != "auto":
        return recomputations(spec, (spec.recompute,))
    if spec.model.family == "resnet":
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
