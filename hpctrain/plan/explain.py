"""Write the reasons and warnings of a plan.

Belongs here: sentences. Does not belong here: decisions, refusals (`planner`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.base.units import short_bytes
from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import case_of, uses_flash_attention
from hpctrain.plan.cost.memory import host_bytes
from hpctrain.plan.cost.prediction import TIGHT_SHARE, candidate_peak
from hpctrain.plan.divisors import divisors, or_list
from hpctrain.plan.documents import RECOMPUTES, Goal, MemoryBreakdown, Plan
from hpctrain.plan.mesh.candidate import LOW_BUBBLE, Candidate, bubble_fraction, columns_of
from hpctrain.plan.mesh.placement import stays_inside
from hpctrain.plan.model.number_formats import keeps_main_weights, recipe_of
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Rivals, comfortable
from hpctrain.spec.engines.abilities import MEGATRON_CORE

_BEST: dict[Goal, str] = {
    "time": "The best by predicted time",
    "gpu-hours": "The best by predicted time",  # GPU-hours, with as many GPUs as there are
    "memory": "The least memory",
}
_SLOW_SPANS = ("across nodes", "across islands")


def fill_level(memory: Sequence[MemoryBreakdown], capacity_bytes: int) -> str:
    """Format the fullest stage: `101.2 of 79.2 GiB per GPU in stage 0`."""
    stage = max(range(len(memory)), key=lambda index: memory[index].total_bytes)
    total, capacity = short_bytes(memory[stage].total_bytes), short_bytes(capacity_bytes)
    if total.split()[-1] == capacity.split()[-1]:
        total = total.split()[0]
    return f"{total} of {capacity} per GPU in stage {stage}"


def reasons(
    request: PlanRequest, candidate: Candidate, plan: Plan, rivals: Rivals | None
) -> Iterator[str]:
    """Yield why the plan is as it is, one full sentence each.

    `rivals`: other meshes that may be faster: the prediction cannot tell them apart.
    """
    spec, profile, gpu = request.spec, request.profile, request.profile.gpu
    layout, prediction, counts = plan.layout, plan.prediction, plan.search
    micro, bubble = f"micro {candidate.micro_batch}", _bubble(plan)
    if prediction is not None and counts is not None and counts.fitting > 1:
        more = f"; {counts.too_large:,} more would not" if counts.too_large else ""
        yield f"{_BEST[request.goal]} of {counts.fitting:,} candidates that fit{more}."
        if rivals is not None and rivals.count:
            others = "one other mesh" if rivals.count == 1 else f"{rivals.count} other meshes"
            yield (
                f"It cannot be told apart from {others}: {rivals.nearest} is predicted "
                f"{rivals.slower:.1%} slower, and is the faster one with a probability of "
                f"{rivals.probability:.0%} (--explain)."
            )
    # where the GPU is unknown, size and bubble decide
    if prediction is None and spec.parallel == "auto":
        yield (
            f"tp {layout.tp} x pp {layout.pp} is the smallest group of GPUs that holds the model "
            f"with recompute {candidate.recomputed}; time is not predicted."
        )
    if prediction is None and spec.batch.micro == "auto":
        if layout.pp == 1:
            yield f"{micro} is the largest power of two that divides the batch and fits."
        elif bubble > LOW_BUBBLE:
            yield f"{micro} makes the smallest pipeline bubble, {bubble:.1%}."
        else:
            yield (
                f"{micro} is the largest power of two that divides the batch, fits and keeps the "
                f"pipeline bubble under {LOW_BUBBLE:.0%} ({bubble:.1%})."
            )
    if len(set(candidate.split)) > 1:
        yield f"Layers per chunk are uneven: {list(candidate.split)} in model order."
    for place in plan.placements:
        if place.size > 1 and place.span in _SLOW_SPANS:
            yield f"{place.axis} {place.size} goes {place.span} ({profile.network.fabric})."
        elif place.size > 1:
            link = f"NVLink {profile.nvlink.bandwidth / 1e9:.0f} GB/s"
            yield f"{place.axis} {place.size} stays {place.span} ({link})."
    if (segment := plan.nodes.segment) is not None:
        nodes = "1 node" if segment == 1 else f"{segment} nodes"
        yield (
            f"--segment={segment} puts {nodes} ({segment * gpu.per_node} GPUs) at a time into one "
            f"block of {profile.network.switches.nodes_per_leaf}."
        )
    yield f"Memory peaks at {fill_level(plan.memory, int(gpu.memory))}."
    if candidate.mode != "none":
        without = candidate_peak(request, replace(candidate, recompute=RECOMPUTES.index("none")))
        saved = without - max(stage.total_bytes for stage in plan.memory)
        core = candidate.mode == "selective" and candidate.modules == ("core_attn",)
        flash = core and uses_flash_attention(spec)
        why = " (flash attention keeps no s x s matrices anyway)" if flash else ""
        cost = ""
        if prediction is not None:
            parts = prediction.parts
            cost = f" and costs {parts.recompute_seconds / parts.total_seconds:.1%} of the step"
        yield (
            f"recompute {candidate.recomputed} saves {short_bytes(saved)} per GPU{cost}{why}; "
            f"without it the peak is {short_bytes(without)}."
        )
    case = case_of(request, columns_of(candidate))
    yield from _format_reasons(request, case)
    yield from _activation_reasons(request, candidate, plan, case)
    if prediction is not None:
        yield from _message_reasons(request, candidate, case)
    elif request.knowledge is not None:
        yield (
            f"Step time is not predicted: profile {profile.name} says neither the peak rate nor "
            f"the memory bandwidth of its {gpu.type} with {short_bytes(gpu.memory)}."
        )
    if layout.sequence_parallel:
        yield f"sequence_parallel divides norms and dropout by tp {layout.tp} as well."
    if layout.vpp > 1 and layout.pp == 2:
        yield "vpp with pp 2 needs overlapped stage-to-stage transfers; they are on."
    vocab, step = spec.model.vocab, request.counts.vocab_multiple * layout.tp
    if plan.padded_vocab != vocab and not spec.model.reads_images:
        yield f"vocab {vocab} is padded to {plan.padded_vocab}, a multiple of {step}."


def _bubble(plan: Plan) -> float:
    """Compute the pipeline bubble as a share of the ideal step time."""
    return bubble_fraction(plan.layout, plan.batch.accumulation)


def warnings(request: PlanRequest, candidate: Candidate, plan: Plan) -> Iterator[str]:
    """Yield what works but should be known before GPU hours are spent."""
    spec, profile, layout = request.spec, request.profile, plan.layout
    per_node, switches = profile.gpu.per_node, profile.network.switches
    domain = plan.nodes.domain or profile.nvlink.domain
    for place in plan.placements:
        inside = stays_inside(place.stride, place.size, layout.world_size, domain)
        if place.axis == "tp" and not inside:
            yield (
                f"tp {place.size} leaves the NVLink domain of {domain} GPUs: every layer waits "
                f"for slower links several times per microbatch."
            )
    # cp and ep that would fit into a rack, where no segment of the job holds whole groups
    most = min(profile.nvlink.domain, (switches.usable_nodes or plan.nodes.nodes) * per_node)
    for place in plan.placements:
        fits = per_node < place.stride * place.size <= most
        if place.axis in ("cp", "ep") and place.span in _SLOW_SPANS and fits:
            asked = switches.plugin == "block" and switches.segment_policy != "forbid"
            why = (
                "no segment of this job holds whole groups (resources.segment, spare_nodes, "
                "min_nodes)"
                if asked
                else "no segments are requested here that would keep it there"
            )
            domains = f"an NVLink domain of {most} GPUs"
            yield f"{place.axis} {place.size} would fit into {domains}, but {why}."
    capacity, sure = int(profile.gpu.memory), plan.certainty
    share = plan.memory[plan.peak_stage].total_bytes / capacity
    if sure is not None and sure.fit_probability < comfortable(request):
        yield (
            f"Memory is tight: {fill_level(plan.memory, capacity)} ({share:.0%}) fits with a "
            f"probability of {sure.fit_probability:.0%} (`fit_probability` refuses less than "
            f"{spec.fit_probability:.0%})."
        )
    elif sure is None and share > TIGHT_SHARE:
        yield (
            f"Memory is tight: {fill_level(plan.memory, capacity)} ({share:.0%}); fragmentation "
            "may end the run."
        )
    if (bubble := _bubble(plan)) > LOW_BUBBLE:
        layers, accumulation = spec.model.layers, candidate.accumulation
        even = layout.vpp == 1 and layers % layout.pp == 0
        useful = [vpp for vpp in divisors(layers // layout.pp) if vpp > 1] if even else []
        advice = "a larger global batch would make it smaller"
        if useful:
            advice = f"vpp {useful[0]} would make it {bubble / useful[0]:.1%}"
            if accumulation % layout.pp:
                advice += f" if microbatches were a multiple of pp {layout.pp}"
        yield (
            f"The pipeline bubble is {bubble:.1%} of the ideal step: (pp - 1) / (microbatches x "
            f"vpp) = {layout.pp - 1} / ({accumulation} x {layout.vpp}); {advice}."
        )
    if layout.dp * layout.cp > 1 and candidate.zero == 0 and spec.engine.abilities.shards:
        replicas = layout.dp * layout.cp
        yield f"Optimizer state is not sharded: {replicas} GPUs hold the same copy."
    core = spec.engine.abilities.model_classes == MEGATRON_CORE
    if not spec.model.takes_fused_attention(pads=not core):
        sizes = {spec.model.query_key_size, spec.model.value_size}
        yield (
            f"No fused kernel takes heads of {or_list(sorted(sizes))} (head_dim): scores of every "
            "pair of tokens are written to memory. Multiples of 8 up to 256 have one."
        )
    if spec.model.key_value_heads < layout.tp:
        yield (
            f"kv_heads {spec.model.key_value_heads} is below tp {layout.tp}: QKV is gathered "
            "over tp in every layer."
        )
    engine = spec.engine.name
    if request.knowledge is not None and engine in request.knowledge.outdated:
        yield (
            f"What runs of {engine} have taught here is not used: the planner's constants or "
            "multipliers are others since; run `hpctrain calibrate RUN ...` again."
        )
    yield from _option_warnings(request, candidate, plan.nodes.gpus_per_node)


# -- What settings of production cost in a plan, and what of them has no price ------------------


def _format_reasons(request: PlanRequest, case: Case) -> Iterator[str]:
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
        copied = (
            ""
            if keeps_main_weights(spec)
            else ("; while the optimizer runs, its shard of them exists in fp32 too")
        )
        yield f"Gradients are held and summed in bf16, 2 bytes each{copied}."
    if own.use_precision_aware_optimizer:
        yield (
            f"The optimizer keeps {float(case.software.main_bytes):.3g} bytes for each of its "
            "weights: both moments, and what a weight of 16 bits lacks of its main copy."
        )
    if own.num_distributed_optimizer_instances > 1:
        yield (
            f"{own.num_distributed_optimizer_instances} instances of the optimizer have the whole "
            "state each: messages within one are shorter, and shards of gradients are summed over "
            "all."
        )
    if own.cross_entropy_loss_fusion:
        yield (
            f"The fused cross entropy moves {float(case.software.loss_bytes):.0f} bytes for each "
            "logit and pass, the unfused one 24; its memory is the same."
        )


def _activation_reasons(
    request: PlanRequest, candidate: Candidate, plan: Plan, case: Case
) -> Iterator[str]:
    spec, layout, prediction = request.spec, plan.layout, plan.prediction
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


def _message_reasons(request: PlanRequest, candidate: Candidate, case: Case) -> Iterator[str]:
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


def _option_warnings(
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
