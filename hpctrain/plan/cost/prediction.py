"""Predict how fast one plan is: seconds of a step, MFU, days, GPU-hours.

Belongs here: the prediction of one candidate. Does not belong here: formulas of time
(`cost.step`), failures, saves and money (`forecast`).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.island_links import crossed_islands, shown_seconds, uplink_seconds
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.documents import Prediction, Recompute, StepParts
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import Columns, columns_of
from hpctrain.plan.model.flops import (
    FORWARD_AND_BACKWARD,
    attention_flops_per_token,
    latent_up_weights,
    mlp_weights,
    model_flops_per_step,
)
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.engines.abilities import RecomputeModule
from hpctrain.spec.run import ModelSpec

SECONDS_PER_DAY = 86400
CORE_ATTENTION: tuple[RecomputeModule, ...] = ("core_attn",)


def predict(request: PlanRequest, candidate: Candidate) -> Prediction | None:
    """Predict the speed of one candidate; None when the GPU is not known."""
    if request.knowledge is None or request.knowledge.gpu is None:
        return None
    (parts,) = step_parts(request, columns_of(candidate))
    spec, gpus, seconds = request.spec, candidate.layout.world_size, parts.total_seconds
    peak = peak_flops(request.knowledge.gpu, spec.precision)
    flops = request.counts.flops_per_step
    again = recomputed_flops(spec.model, spec.batch.global_, candidate.mode, candidate.modules)
    if candidate.mode == "full" and candidate.recompute_layers:
        again *= min(1.0, candidate.recompute_layers / max(candidate.split))
    run_seconds = seconds * spec.train_steps
    return Prediction(
        parts=parts,
        mfu=flops / (seconds * gpus * peak),
        hfu=(flops + again) / (seconds * gpus * peak),
        peak_flops_per_gpu=peak,
        tokens_per_second_per_gpu=spec.batch.global_ * spec.model.seq / (seconds * gpus),
        days=run_seconds / SECONDS_PER_DAY,
        gpu_hours=run_seconds * gpus / 3600,
    )


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


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Return the dense peak of the precision, or of the next one that the data sheet lists."""
    for name in (precision, "bf16", "fp16", "fp32"):
        if name in gpu.peak:
            return float(gpu.peak[name])
    return float(max(gpu.peak.values()))


def recomputed_flops(
    model: ModelSpec,
    global_batch: int,
    recompute: Recompute,
    modules: Collection[RecomputeModule] = CORE_ATTENTION,
) -> float:
    """Count the operations that recomputation adds to a step.

    full: the forward pass of all layers, without the output matrix; selective: that of `from_spec`,
    of which norms and activation functions have no products (Korthikanti et al. 2022, arXiv
    2205.05198, appendix A: hardware FLOPs).
    """
    if recompute == "none" or model.family == "resnet":
        return 0.0
    tokens = global_batch * model.seq
    if recompute == "selective":
        attention = attention_flops_per_token(model) / FORWARD_AND_BACKWARD
        core = attention if "core_attn" in modules else 0.0
        return (core + 2 * _weights_again(model, modules)) * tokens
    output = 0 if model.reads_images else 2 * model.vocab * model.hidden * (1 + model.mtp_layers)
    forward = model_flops_per_step(model, global_batch) / FORWARD_AND_BACKWARD
    return forward - output * tokens


def _weights_again(model: ModelSpec, modules: Collection[RecomputeModule]) -> int:
    """Count weights that multiply a token once more where these modules are computed again."""
    last = model.layers - 1
    found = 0
    for layer in (*range(model.layers), *[last] * model.mtp_layers):
        routed = model.moe is not None and model.has_experts(layer)
        if ("moe" if routed else "mlp") in modules:
            found += mlp_weights(model, layer)
        if "mla_up_proj" in modules and model.mla is not None:
            found += latent_up_weights(model, model.mla)
    return found
