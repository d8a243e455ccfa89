"""Predict one plan: seconds of a step, MFU, days, GPU-hours, bytes of each stage.

Belongs here: predictions of single candidates, and of the speed of GPUs and links behind them. Does
not belong here: formulas of time and memory (`step`, `memory`), failures, saves and money
(`hpctrain.plan.forecast`), what to do when memory is too small.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.blocks import reduce_seconds, send_seconds
from hpctrain.plan.cost.case import Case, Mesh, Software
from hpctrain.plan.cost.from_spec import case_of, machine_for, peak_rate, shape_of, software_for
from hpctrain.plan.cost.memory import Stage as CostStage
from hpctrain.plan.cost.memory import outside_allocator_bytes, shards, stage_memory
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.cost.weights import Blocks
from hpctrain.plan.documents import (
    BatchSplit,
    MemoryBreakdown,
    Plan,
    Prediction,
    RampStage,
    Recompute,
    StepParts,
)
from hpctrain.plan.layout_words import Axis
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.candidate import Candidate, Columns, batch_split, columns_of
from hpctrain.plan.mesh.placement import Island, on_islands, slow_links, used_islands
from hpctrain.plan.mesh.rank_order import busiest_uplink
from hpctrain.plan.mesh.stages import (
    build_stages,
    stage_expert_parameters,
    stage_layer_parameters,
    stage_layers,
)
from hpctrain.plan.model.parameters import (
    FORWARD_AND_BACKWARD,
    attention_flops_per_token,
    latent_up_weights,
    mlp_weights,
    model_flops_per_step,
)
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.engines.abilities import MODEL_AXES, RecomputeModule
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ModelSpec

# -- Slow links between islands, for many candidates --------------------------------------------
# The cost model has one network for all nodes. Where the nodes of a run are in several islands, the
# rings and messages that cross a border share an uplink (`mesh.placement`, `mesh.rank_order`).


Floats = NDArray[np.float64]
# What decides which ranks talk over a border and how much they send in a step; the microbatch
# does not, because a step sends the same number of tokens in any number of messages.
STRUCTURE = (
    *("tp", "pp", "vpp", "cp", "ep", "dp", "order", "sequence_parallel"),
    *("count_embedding", "count_loss", "uneven"),
)


def crossed_islands(gpus: int, profile: ClusterProfile) -> tuple[Island, ...]:
    """Return the islands of a run on `gpus` GPUs; empty where one island holds them all.

    Over-subscribed leaf switches are not islands here: the cost model covers them.
    """
    request = on_islands(node_request(gpus, profile.gpu.per_node), profile)
    return slow_links(request, profile) if len(used_islands(request, profile)) > 1 else ()


def uplink_seconds(
    request: PlanRequest, columns: Columns, islands: tuple[Island, ...]
) -> tuple[Floats, Floats]:
    """Compute the seconds per step for which each row keeps its busiest uplink busy.

    Returns (gradients and weights, activations), arrays of shape [candidates].
    """
    table = np.stack([getattr(columns, name) for name in STRUCTURE], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    loads = []
    for row in first:
        candidate = columns.candidate(int(row))
        load = busiest_uplink(request, candidate, candidate.layout.order, islands)
        loads.append((load.gradients_bytes / load.uplink, load.activations_bytes / load.uplink))
    rows = np.array(loads, dtype=float).reshape(len(first), 2)[inverse.ravel()]
    return rows[:, 0], rows[:, 1]


def shown_seconds(
    columns: Columns,
    software: Software,
    step: Floats,
    data_messages: Floats,
    loads: tuple[Floats, Floats],
) -> Floats:
    """Compute the seconds that islands add to the step time of the cost model.

    Gradients and weights hide behind one microbatch (the last backward, the first forward pass)
    as far as data parallel traffic of this software does; what the cost model has charged for them
    already is subtracted. Activations delay the pipeline like all its messages. No step is shorter
    than its uplink is busy.
    """
    gradients, activations = loads
    hidden = software.dp_overlap * software.overlaps_gradients * step / columns.accumulation
    late = np.maximum(0.0, gradients - hidden - data_messages)
    between_chunks = software.pp_overlap * software.overlaps_stages * (columns.vpp > 1)
    waiting = (1 - between_chunks) * activations
    return np.asarray(np.maximum(late + waiting, gradients + activations - step), dtype=float)


# -- Speed ----------------------------------------------------------------------------------------


SECONDS_PER_DAY = 86400
CORE_ATTENTION: tuple[RecomputeModule, ...] = ("core_attn",)


def predict(request: PlanRequest, candidate: Candidate) -> Prediction | None:
    """Predict the speed of one candidate; None when the GPU is not known."""
    if request.knowledge is None or request.knowledge.gpu is None:
        return None
    (parts,) = step_parts(request, columns_of(candidate))
    spec, gpus, seconds = request.spec, candidate.layout.world_size, parts.total_seconds
    peak = peak_rate(request.knowledge.gpu, spec.precision)
    flops = request.counts.flops_per_step
    again = recomputed_flops(spec.model, spec.batch.global_, candidate.mode, candidate.modules)
    if candidate.mode == "full" and candidate.recompute_layers:
        again *= min(1.0, candidate.recompute_layers / max(candidate.split))
    run_seconds = priced_split(request, candidate).seconds(seconds)
    return Prediction(
        parts=parts,
        mfu=flops / (seconds * gpus * peak),
        hfu=(flops + again) / (seconds * gpus * peak),
        peak_flops_per_gpu=peak,
        tokens_per_second_per_gpu=spec.batch.global_ * spec.model.seq / (seconds * gpus),
        days=run_seconds / SECONDS_PER_DAY,
        gpu_hours=run_seconds * gpus / 3600,
    )


def priced_split(request: PlanRequest, candidate: Candidate) -> BatchSplit:
    """Split the batch, with the steps of smaller ones before it, each priced where time is."""
    spec = request.spec
    known = request.knowledge is not None and request.knowledge.gpu is not None

    def seconds(size: int) -> float | None:
        smaller = columns_of(replace(candidate, batch=size))
        return step_parts(request, smaller)[0].total_seconds if known else None

    ramp = tuple(
        RampStage(global_batch=size, steps=steps, step_seconds=seconds(size))
        for size, steps in spec.batch.sizes.ramp(spec.train_steps)
    )
    split = batch_split(spec, candidate.dp, candidate.micro_batch)
    return split.model_copy(update={"ramp": ramp})


def step_parts(request: PlanRequest, columns: Columns) -> list[StepParts]:
    """Compute the parts of the step time of each row."""
    case = case_of(request, columns)
    times = step_seconds(case)
    shape = (len(columns),)
    parts = {
        name: np.broadcast_to(np.asarray(getattr(times, name), dtype=float), shape)
        for name in type(times).__dataclass_fields__
    }
    islands = crossed_islands(columns.gpus, request.profile) if len(columns) else ()
    if islands:
        loads = uplink_seconds(request, columns, islands)
        total = np.broadcast_to(np.asarray(times.total, dtype=float), shape)
        charged = parts["data_messages"]
        parts["islands"] = shown_seconds(columns, case.software, total, charged, loads)
    return [
        StepParts(**{f"{name}_seconds": float(part[row]) for name, part in parts.items()})
        for row in range(len(columns))
    ]


def recomputed_flops(
    model: ModelSpec,
    global_batch: int,
    recompute: Recompute,
    modules: Collection[RecomputeModule] = CORE_ATTENTION,
) -> float:
    """Count the operations that recomputation adds to a step.

    full: the forward pass of all layers, without the output matrix; selective: that of `modules`,
    of which norms and activation functions have no products (Korthikanti et al. 2022, arXiv
    2205.05198, appendix A: hardware FLOPs).
    """
    if recompute == "none" or model.family == "resnet":
        return 0.0
    tokens = global_batch * model.seq
    if recompute == "selective":
        attention = attention_flops_per_token(model) / FORWARD_AND_BACKWARD
        core = attention if "core_attn" in modules else 0.0
        again = 0  # weights that multiply a token once more
        for layer in (*range(model.layers), *[model.layers - 1] * model.mtp_layers):
            if ("moe" if model.has_experts(layer) else "mlp") in modules:
                again += mlp_weights(model, layer)
            if "mla_up_proj" in modules and model.mla is not None:
                again += latent_up_weights(model, model.mla)
        return (core + 2 * again) * tokens
    output = 0 if model.reads_images else 2 * model.vocab * model.hidden * (1 + model.mtp_layers)
    forward = model_flops_per_step(model, global_batch) / FORWARD_AND_BACKWARD
    return forward - output * global_batch * model.target_seq


# -- Bytes on one GPU of each pipeline stage ------------------------------------------------------
# The formulas are those of `cost.memory`, which the search uses too; here weights, gradients and
# optimizer state come from exact counts of parameters instead of closed forms.


TIGHT_SHARE = 0.94  # above this, fragmentation of PyTorch's allocator alone can end a run


def candidate_memory(request: PlanRequest, candidate: Candidate) -> tuple[MemoryBreakdown, ...]:
    """Count the bytes of every stage."""
    spec, counts = request.spec, request.counts
    case = case_of(request, columns_of(candidate))
    estimate = stage_memory(case, _cost_stages(spec.model, candidate))
    stages = build_stages(
        spec.model,
        candidate.layout,
        candidate.split,
        counts.vocab_multiple,
        counts.adapters_per_layer,
    )
    shape = (len(stages),)
    activations, logits, buffers = (
        np.broadcast_to(np.asarray(part, dtype=float), shape)
        for part in (estimate.activations, estimate.logits, estimate.buffers)
    )
    wide, low_only = float(case.mesh.element_bytes), float(case.mesh.low_only)
    low_bytes = float(case.mesh.low_bytes) - low_only * wide
    outside = float(np.asarray(outside_allocator_bytes(case)).item())
    state = 0.0 if candidate.offload else float(case.software.main_bytes)
    # by ZeRO stage: over how many ranks dense weights and experts are divided from it on
    divisors = {
        zero: [int(np.asarray(ranks).item()) for ranks in shards(case, zero)] for zero in (3, 2, 1)
    }
    stage_bytes = []
    for n, stage in enumerate(stages):
        experts = stage_expert_parameters(spec.model, candidate.layout, candidate.split, n)
        dense = stage.parameters_per_gpu - experts
        layers = stage_layer_parameters(spec.model, candidate.layout, candidate.split, n) - experts
        of_layers = -(-layers // divisors[3][0]) + -(-experts // divisors[3][1])
        weights, gradients, optimizer = (
            -(-dense // by[0]) + -(-experts // by[1]) for by in divisors.values()
        )
        stage_bytes.append(
            MemoryBreakdown(
                weights_bytes=round(wide * weights + low_bytes * of_layers),
                gradients_bytes=round(float(case.mesh.gradient_bytes) * gradients),
                optimizer_bytes=round(state * optimizer),
                activations_bytes=round(float(activations[n])),
                logits_bytes=round(float(logits[n])),
                buffers_bytes=round(float(buffers[n])),
                reserved_bytes=round(outside),
            )
        )
    return tuple(stage_bytes)


def _cost_stages(model: ModelSpec, candidate: Candidate) -> CostStage:
    """Describe all stages of one layout by arrays of shape [stages]."""
    pp = candidate.layout.pp
    chunks_of = [stage_layers(candidate.split, pp, index) for index in range(pp)]
    layers = np.array([sum(map(len, chunks)) for chunks in chunks_of], dtype=float)
    experts = np.array(
        [sum(model.has_experts(n) for chunk in chunks for n in chunk) for chunks in chunks_of],
        dtype=float,
    )
    ends = np.arange(pp, dtype=float)
    attention = layers * (model.family != "resnet")
    blocks = Blocks(layers, attention, layers - experts, experts, 0 * layers)
    if model.encoder_layers:
        encoder = model.encoder_layers * (ends == 0)
        blocks = Blocks(layers + encoder, encoder, encoder, 0 * layers, 0 * layers, layers)
    return CostStage(
        index=ends,
        blocks=blocks,
        embedding=(ends == 0).astype(float),
        loss=(ends == pp - 1).astype(float),
    )


def candidate_peak(request: PlanRequest, candidate: Candidate) -> int:
    """Count the bytes on the fullest GPU."""
    return max(stage.total_bytes for stage in candidate_memory(request, candidate))


# -- The speed of GPUs and links that a plan assumes, with which `train.speed_check` compares -----


# Long enough that the start of an operation does not count.
_LARGE_BYTES = 2**30


@dataclass(frozen=True)
class ExpectedSpeed:
    """What a plan assumes: FLOP/s of 16-bit products, and bytes per second by axis.

    The bandwidth of tp, cp, ep and dp is the bus bandwidth of an all-reduce (nccl-tests,
    doc/PERFORMANCE.md); that of pp is of a message to a neighbour.
    """

    product_flops_per_second: float
    bytes_per_second: dict[Axis, float]


def expected_speed(request: PlanRequest, plan: Plan) -> ExpectedSpeed | None:
    """Compute the expected speed of a plan; None when the GPU is not known."""
    machine = machine_for(request)
    if machine is None:
        return None
    # links depend on the sizes of the axes, and on nothing else of a mesh
    layout = plan.layout
    sizes = {axis: getattr(layout, axis) for axis in (*MODEL_AXES, "dp")}
    case = Case(shape_of(request.spec.model), Mesh(**sizes), machine, software_for(request))
    links: dict[Axis, float] = {}
    for place in plan.placements:
        size, stride = place.size, place.stride
        if place.axis == "dp" and layout.cp > 1 and stride == layout.tp * layout.cp:
            # the ranks of dp and cp sum gradients together: one regular group unless pipeline
            # stages lie between; then dp alone is priced, whose links are the slower ones
            size, stride = layout.dp * layout.cp, layout.tp
        if place.axis == "pp" and size > 1:
            links["pp"] = float(_LARGE_BYTES / send_seconds(case, _LARGE_BYTES, stride))
        elif size > 1:
            seconds = float(reduce_seconds(case, _LARGE_BYTES, size, stride))
            links[place.axis] = 2 * (size - 1) / size * _LARGE_BYTES / seconds
    return ExpectedSpeed(float(machine.peak * machine.product_efficiency), links)
