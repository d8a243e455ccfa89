"""Explain what settings of production cost in a plan, and what of them has no price.

Belongs here: one sentence for each setting that a spec has chosen. Does not belong here: formulas
(`hpctrain.plan.cost`; docs/planner.md lists them with their sources), other reasons (`explain`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpctrain.base.units import short_bytes
from hpctrain.plan.abilities.low_precision import recipe_of
from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.memory import host_bytes
from hpctrain.plan.documents import Prediction
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import columns_of
from hpctrain.plan.request import PlanRequest


def option_reasons(
    request: PlanRequest, candidate: Candidate, prediction: Prediction | None
) -> Iterator[str]:
    """Yield what each chosen setting changes in memory and time, and what that assumes."""
    case = case_of(request, columns_of(candidate))
    yield from _of_number_formats(request, case)
    yield from _of_activations(request, candidate, case, prediction)
    if prediction is not None:
        yield from _of_messages(request, candidate, case)


def _of_number_formats(request: PlanRequest, case: Case) -> Iterator[str]:
    spec = request.spec
    own, recipe = spec.engine.megatron, recipe_of(spec)
    if recipe is not None:
        how = "instead of" if own.fp8_param_gather else "besides"
        yield (
            f"{spec.precision} ({recipe} scaling): products of layers run at the calibrated rate "
            f"of that precision; their weights take {float(case.mesh.low_bytes):.3g} bytes {how} "
            f"{float(case.mesh.element_bytes):.0f}. Inputs of linear layers wait for the backward "
            f"pass in {float(case.mesh.kept_input_bytes):.3g} bytes, all else in 16 bits."
        )
    if not own.grad_reduce_in_fp32:
        yield (
            "Gradients are held and summed in bf16, 2 bytes each; while the optimizer runs, its "
            "shard of them exists in fp32 too."
        )
    if own.cross_entropy_loss_fusion:
        yield (
            f"The fused cross entropy moves {float(case.software.loss_bytes):.0f} bytes for each "
            "logit and pass, the unfused one 24; its memory is the same."
        )


def _of_activations(
    request: PlanRequest, candidate: Candidate, case: Case, prediction: Prediction | None
) -> Iterator[str]:
    spec, layout = request.spec, candidate.layout
    if candidate.mode == "full" and candidate.recompute_layers:
        chunk = max(candidate.split)
        layers = min(candidate.recompute_layers, chunk)
        yield f"recompute full covers the first {layers} of {chunk} layers in a model chunk."
    if candidate.offloaded_layers:
        held = float(np.max(host_bytes(case)))
        share = "; time is not predicted"
        if prediction is not None:
            shown = prediction.parts.activation_messages_seconds
            share = f" at {float(case.machine.host_bandwidth) / 1e9:.0f} GB/s, and copies that "
            share += f"compute does not hide are {shown / prediction.parts.total_seconds:.1%} of "
            share += "the step"
        yield (
            f"{candidate.offloaded_layers} of {spec.model.layers} layers keep their "
            f"activations in the host's memory: {short_bytes(held)} for each GPU{share}. "
            "Assumed: everything that these layers keep can leave the GPU."
        )
    if spec.engine.megatron.defer_embedding_wgrad_compute:
        yield (
            "The last stage keeps inputs and output gradients of the output layer for "
            f"{float(np.max(case.mesh.waiting_outputs)):.0f} of {candidate.accumulation} "
            "microbatches, and computes its weight gradient in the gap "
            f"of {layout.pp - 1} backward passes at the end of the step, two thirds of the bubble."
        )


def _of_messages(request: PlanRequest, candidate: Candidate, case: Case) -> Iterator[str]:
    spec, software = request.spec, case.software
    own, key = spec.engine.megatron, spec.engine.abilities.calibration
    assert request.knowledge is not None
    calibration = request.knowledge.calibration
    if candidate.etp > 1:
        yield (
            f"Each expert is split over {candidate.etp} ranks, which gather their tokens "
            "and reduce their outputs in every MoE layer, in the open."
        )
    if own.tp_comm_overlap:
        yield (
            f"Assumed: userbuffers hide {float(software.tp_overlap):.0%} of tensor parallel "
            f"messages, as in the runs behind calibration `{key}`."
        )
    if own.moe_token_dispatcher_type == "flex":
        backend = own.moe_flex_dispatcher_backend
        yield (
            f"Assumed: {backend} sends one copy of a token to each node with experts for it, at "
            f"{calibration.dispatch[backend].efficiency:.0%} of the links; the alltoall dispatcher "
            f"sends one to each expert, at {calibration.dispatch['alltoall'].efficiency:.0%}."
        )
    if own.moe_shared_expert_overlap:
        yield "Assumed: messages to experts hide behind the shared expert for as long as it takes."
    if own.cuda_graph_impl != "none":
        yield (
            f"Assumed: CUDA graphs of layers leave {calibration.graphs['layer'].layers:.0%} of "
            "their launches, as in the calibration; experts are outside of them."
        )


def option_warnings(
    request: PlanRequest, candidate: Candidate, gpus_per_node: int
) -> Iterator[str]:
    """Yield what the plan does not price or check, and host memory that is not there."""
    spec, own = request.spec, request.spec.engine.megatron
    unpriced = {
        "the time of moe_permute_fusion (all runs behind the price of sorting tokens had it)": (
            own.moe_permute_fusion
        ),
        "memory of CUDA graphs": own.cuda_graph_impl != "none",
        "memory of userbuffers": own.tp_comm_overlap,
        f"buffers of {own.moe_flex_dispatcher_backend}": own.moe_token_dispatcher_type == "flex",
    }
    missing: Sequence[str] = [what for what, chosen in unpriced.items() if chosen]
    if missing:
        yield f"Not priced: {'; '.join(missing)}."
    if recipe_of(spec) is not None and request.generation is None:
        yield (
            f"Whether {request.profile.gpu.type} has {spec.precision} products is not checked: the "
            "GPU is not known."
        )
    if candidate.offloaded_layers:
        case = case_of(request, columns_of(candidate))
        held = float(np.max(host_bytes(case))) * gpus_per_node
        memory = float(request.profile.nodes.memory)
        if held > memory:
            yield (
                f"Offloaded activations need {short_bytes(held)} of each node, which has "
                f"{short_bytes(memory)}."
            )
