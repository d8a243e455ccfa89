"""Bytes on one GPU of each pipeline stage of one plan, by component.

The formulas are those of `cost.memory`, which the search uses too; here weights, gradients and
optimizer state come from exact counts of parameters instead of closed forms. Belongs here: the
breakdown of one candidate. Does not belong here: formulas, or what to do when it is too much.
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.composition import Blocks
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.memory import Stage as CostStage
from hpctrain.plan.cost.memory import outside_allocator_bytes, shards, stage_memory
from hpctrain.plan.documents import MemoryBreakdown
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import columns_of
from hpctrain.plan.mesh.stages import (
    build_stages,
    stage_expert_parameters,
    stage_layer_parameters,
    stage_layers,
)
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ModelSpec

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
    return CostStage(
        index=ends,
        blocks=Blocks(layers, attention, layers - experts, experts, 0 * layers),
        embedding=(ends == 0).astype(float),
        loss=(ends == pp - 1).astype(float),
    )


def candidate_peak(request: PlanRequest, candidate: Candidate) -> int:
    """Count the bytes on the fullest GPU."""
    return max(stage.total_bytes for stage in candidate_memory(request, candidate))
