"""Bytes on one GPU of each pipeline stage of one plan, by component.

The formulas are those of `cost.memory`, which the search uses too; here weights, gradients and
optimizer state come from exact counts of parameters instead of closed forms. Belongs here: the
breakdown of one candidate. Does not belong here: formulas, or what to do when it is too much.
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.composition import Blocks
from hpctrain.plan.cost.from_spec import (
    ELEMENT_BYTES,
    case_of,
)
from hpctrain.plan.cost.lora_counts import held_stages
from hpctrain.plan.cost.memory import Stage as CostStage
from hpctrain.plan.cost.memory import shards, stage_memory
from hpctrain.plan.documents import MemoryBreakdown
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import columns_of
from hpctrain.plan.mesh.stages import stage_expert_parameters, stage_layers
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ModelSpec

TIGHT_SHARE = 0.94  # above this, fragmentation of PyTorch's allocator alone can end a run


def candidate_memory(request: PlanRequest, candidate: Candidate) -> tuple[MemoryBreakdown, ...]:
    """Count the bytes of every stage."""
    spec = request.spec
    case = case_of(request, columns_of(candidate))
    estimate = stage_memory(case, _cost_stages(spec.model, candidate))
    stages = held_stages(spec, candidate.layout, candidate.split)
    shape = (len(stages),)
    activations, logits, buffers = (
        np.broadcast_to(np.asarray(part, dtype=float), shape)
        for part in (estimate.activations, estimate.logits, estimate.buffers)
    )
    held = ELEMENT_BYTES[spec.precision] + int(spec.precision == "fp8")  # and an 8-bit copy
    state = 0.0 if candidate.offload else float(case.software.main_bytes)
    found = []
    for n, stage in enumerate(stages):
        experts = stage_expert_parameters(spec.model, candidate.layout, candidate.split, n)
        dense = stage.parameters_per_gpu - experts
        weights, gradients, optimizer = (
            _largest_part(case, least_zero, dense, experts) for least_zero in (3, 2, 1)
        )
        found.append(
            MemoryBreakdown(
                weights_bytes=held * weights,
                gradients_bytes=round(float(case.mesh.gradient_bytes) * gradients),
                optimizer_bytes=round(state * optimizer),
                activations_bytes=round(float(activations[n])),
                logits_bytes=round(float(logits[n])),
                buffers_bytes=round(float(buffers[n])),
                reserved_bytes=int(request.profile.gpu.reserved),
            )
        )
    return tuple(found)


def _largest_part(case: Case, least_zero: int, dense: int, experts: int) -> int:
    """Count the elements on the rank that holds the most, if divided from this ZeRO stage on."""
    by = [int(np.asarray(ranks).item()) for ranks in shards(case, least_zero)]
    return -(-dense // by[0]) + -(-experts // by[1])


def _cost_stages(model: ModelSpec, candidate: Candidate) -> CostStage:
    """All stages of one layout as arrays of shape [stages]."""
    pp = candidate.layout.pp
    held = [stage_layers(candidate.split, pp, index) for index in range(pp)]
    layers = np.array([sum(map(len, chunks)) for chunks in held], dtype=float)
    experts = np.array(
        [sum(model.has_experts(n) for chunk in chunks for n in chunk) for chunks in held],
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
