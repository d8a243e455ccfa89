"""Bytes on one GPU of each pipeline stage of one plan, by component.

The formulas are those of `cost.memory`, which the search uses too; here weights, gradients and
optimizer state come from exact counts of parameters instead of closed forms. Belongs here: the
breakdown of one candidate. Does not belong here: formulas, or what to do when it is too much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.cost.composition import Blocks
from hpctrain.plan.cost.from_spec import (
    ELEMENT_BYTES,
    case_of,
    gradient_bytes,
    optimizer_bytes,
)
from hpctrain.plan.cost.lora_counts import held_stages
from hpctrain.plan.cost.memory import Stage as CostStage
from hpctrain.plan.cost.memory import StageMemory, stage_memory
from hpctrain.plan.documents import MemoryBreakdown, Stage
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import columns_of
from hpctrain.plan.mesh.stages import stage_expert_parameters, stage_layers
from hpctrain.plan.model.parameters import expert_tp
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ModelSpec, RunSpec

TIGHT_SHARE = 0.94  # above this, fragmentation of PyTorch's allocator alone can end a run


@dataclass(frozen=True)
class Shards:
    """Over how many ranks a ZeRO stage divides something: dense weights, and routed experts."""

    dense: int
    experts: int

    def part(self, dense: int, experts: int) -> int:
        """Elements on the rank that holds the most."""
        return -(-dense // self.dense) + -(-experts // self.experts)


def candidate_memory(request: PlanRequest, candidate: Candidate) -> tuple[MemoryBreakdown, ...]:
    """Count the bytes of every stage."""
    spec = request.spec
    stages = held_stages(spec, candidate.layout, candidate.split)
    case = case_of(request, columns_of(candidate))
    estimate = _at(stage_memory(case, _cost_stages(spec.model, candidate)), len(stages))
    return tuple(
        _exact(spec, candidate, stage, int(request.profile.gpu.reserved), estimate[stage.index])
        for stage in stages
    )


def _cost_stages(model: ModelSpec, candidate: Candidate) -> CostStage:
    """All stages of one layout as arrays of shape [stages]."""
    pp = candidate.layout.pp
    held = [stage_layers(candidate.split, pp, index) for index in range(pp)]
    layers = np.array([sum(map(len, chunks)) for chunks in held], dtype=float)
    experts = np.array(
        [sum(model.has_experts(n) for chunk in chunks for n in chunk) for chunks in held],
        dtype=float,
    )
    ends = np.arange(pp)
    attention = layers * (model.family != "resnet")
    return CostStage(
        index=ends,
        blocks=Blocks(layers, attention, layers - experts, experts, 0 * layers),
        embedding=(ends == 0).astype(float),
        loss=(ends == pp - 1).astype(float),
    )


def _at(memory: StageMemory, count: int) -> list[dict[str, float]]:
    """The components of each stage."""
    parts = {
        name: np.broadcast_to(np.asarray(getattr(memory, name), dtype=float), (count,))
        for name in type(memory).__dataclass_fields__
    }
    return [{name: float(values[n]) for name, values in parts.items()} for n in range(count)]


def _exact(
    spec: RunSpec, candidate: Candidate, stage: Stage, reserved: int, estimate: dict[str, float]
) -> MemoryBreakdown:
    experts = stage_expert_parameters(spec.model, candidate.layout, candidate.split, stage.index)
    dense = stage.parameters_per_gpu - experts
    held = ELEMENT_BYTES[spec.precision] + int(spec.precision == "fp8")  # and an 8-bit copy
    state = 0 if candidate.offload else optimizer_bytes(spec)
    return MemoryBreakdown(
        weights_bytes=held * shards(candidate, 3).part(dense, experts),
        gradients_bytes=round(gradient_bytes(spec) * shards(candidate, 2).part(dense, experts)),
        optimizer_bytes=round(state * shards(candidate, 1).part(dense, experts)),
        activations_bytes=round(estimate["activations"]),
        logits_bytes=round(estimate["logits"]),
        buffers_bytes=round(estimate["buffers"]),
        reserved_bytes=reserved,
    )


def shards(candidate: Candidate, least_zero: int) -> Shards:
    """Ranks that share what is divided from this ZeRO stage on; one where it is not.

    Megatron's optimizer groups include context parallel ranks (ZeRO-1: Rajbhandari et al. 2020,
    arXiv 1910.02054, section 5.1); experts are held by fewer replicas.
    """
    if candidate.zero < least_zero:
        return Shards(1, 1)
    layout = candidate.layout
    replicas = layout.dp * layout.cp
    spread = layout.ep * expert_tp(layout.tp, layout.ep)
    return Shards(candidate.shard_gpus or replicas, max(1, replicas * layout.tp // spread))


def candidate_peak(request: PlanRequest, candidate: Candidate) -> int:
    """Count the bytes on the fullest GPU."""
    return max(stage.total_bytes for stage in candidate_memory(request, candidate))
