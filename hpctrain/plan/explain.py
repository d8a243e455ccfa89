"""Write the reasons, warnings and refusals of a plan.

Belongs here: sentences. Does not belong here: decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.base.units import short_bytes
from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import case_of, uses_flash_attention
from hpctrain.plan.cost.memory import host_bytes
from hpctrain.plan.cost.prediction import TIGHT_SHARE, candidate_peak
from hpctrain.plan.divisors import divisors
from hpctrain.plan.documents import (
    RECOMPUTES,
    AxisPlacement,
    Certainty,
    Goal,
    MemoryBreakdown,
    Prediction,
    SearchCounts,
)
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.candidate import LOW_BUBBLE, Candidate, bubble_fraction, columns_of
from hpctrain.plan.mesh.placement import stays_inside
from hpctrain.plan.model.number_formats import recipe_of
from hpctrain.plan.model.parameters import pad_vocab
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Rivals, comfortable
from hpctrain.spec.profile import ClusterProfile

_BEST: dict[Goal, str] = {
    "time": "The best by predicted time",
    "gpu-hours": "The best by predicted time",  # GPU-hours, with as many GPUs as there are
    "memory": "The least memory",
}

_SLOW_SPANS = ("across nodes", "across islands")


@dataclass(frozen=True)
class Facts:
    """Everything about one plan that its sentences mention.

    `domain`: consecutive ranks in one NVLink domain; `segment`: nodes that share a block, if the
    script requests that; `rivals`: other meshes that may be faster.
    """

    request: PlanRequest
    candidate: Candidate
    placements: Sequence[AxisPlacement]
    memory: Sequence[MemoryBreakdown]
    counts: SearchCounts
    prediction: Prediction | None
    domain: int
    segment: int | None
    certainty: Certainty | None
    rivals: Rivals | None

    @property
    def bubble(self) -> float:
        """The pipeline bubble as a share of the ideal step time."""
        return bubble_fraction(self.candidate.layout, self.candidate.accumulation)


def amount(count: float, unit_bytes: int) -> str:
    """Format a number of bytes in a unit fixed by the caller: `55.4`."""
    return f"{count / unit_bytes:.1f}"


def fill_level(memory: Sequence[MemoryBreakdown], capacity_bytes: int) -> str:
    """Format the fullest stage: `101.2 of 79.2 GiB per GPU in stage 0`."""
    stage = max(range(len(memory)), key=lambda index: memory[index].total_bytes)
    total, capacity = short_bytes(memory[stage].total_bytes), short_bytes(capacity_bytes)
    if total.split()[-1] == capacity.split()[-1]:
        total = total.split()[0]
    return f"{total} of {capacity} per GPU in stage {stage}"


def largest_parts(memory: Sequence[MemoryBreakdown], capacity_bytes: int) -> str:
    """Format the fullest stage, largest part first: `optimizer 61.1, gradients 20.4, ...`."""
    peak = max(memory, key=lambda stage: stage.total_bytes)
    unit = 2**30 if capacity_bytes >= 2**30 else 2**20  # as `fill_level` prints the capacity
    parts = sorted(peak.model_dump().items(), key=lambda part: -part[1])
    shown = [
        f"{name.removesuffix('_bytes')} {amount(count, unit)}"
        for name, count in parts
        if count >= 0.05 * unit
    ]
    return ", ".join(shown)


def memory_refusal(
    candidate: Candidate, memory: Sequence[MemoryBreakdown], capacity_bytes: int
) -> str:
    """Format what a candidate needs, what a GPU has, and the largest parts."""
    level = fill_level(memory, capacity_bytes)
    return f"{candidate.layout} needs {level} ({largest_parts(memory, capacity_bytes)})"


def proposal(candidates: Iterable[Candidate]) -> str | None:
    """Format the hint of a refusal: layouts that fit, nearest first; None when there are none."""
    lines = [f"  {candidate}" for candidate in candidates]
    return "\n".join(["these fit:", *lines]) if lines else None


def reasons(facts: Facts) -> tuple[str, ...]:
    """List why the plan is as it is, one full sentence each."""
    request, layout = facts.request, facts.candidate.layout
    vocab, gpu = request.spec.model.vocab, request.profile.gpu
    lines = [
        *_choice_reasons(facts),
        *_placement_reasons(request.profile, facts.placements),
        *_segment_reasons(facts),
        f"Memory peaks at {fill_level(facts.memory, int(gpu.memory))}.",
        *_recompute_reasons(facts),
        *option_reasons(request, facts.candidate, facts.prediction),
    ]
    if facts.prediction is None and request.knowledge is not None:
        lines.append(
            f"Step time is not predicted: profile {request.profile.name} says neither the peak "
            f"rate nor the memory bandwidth of its {gpu.type} with {short_bytes(gpu.memory)}."
        )
    if layout.sequence_parallel:
        lines.append(f"sequence_parallel divides norms and dropout by tp {layout.tp} as well.")
    if layout.vpp > 1 and layout.pp == 2:
        lines.append("vpp with pp 2 needs overlapped stage-to-stage transfers; they are on.")
    multiple = request.counts.vocab_multiple
    padded = pad_vocab(vocab, layout.tp, multiple)
    if padded != vocab and not request.spec.model.reads_images:
        step = multiple * layout.tp
        lines.append(f"vocab {vocab} is padded to {padded}, a multiple of {step}.")
    return tuple(lines)


def _choice_reasons(facts: Facts) -> list[str]:
    """Explain the choice; where the GPU is unknown, size and bubble decide."""
    candidate, counts, spec = facts.candidate, facts.counts, facts.request.spec
    layout, micro = candidate.layout, f"micro {candidate.micro_batch}"
    lines = []
    if facts.prediction is not None and counts.fitting > 1:
        more = f"; {counts.too_large:,} more would not" if counts.too_large else ""
        lines.append(
            f"{_BEST[facts.request.goal]} of {counts.fitting:,} candidates that fit{more}."
        )
        lines += _rival_reasons(facts.rivals)
    if facts.prediction is None and spec.parallel == "auto":
        lines.append(
            f"tp {layout.tp} x pp {layout.pp} is the smallest group of GPUs that holds the model "
            f"with recompute {candidate.recomputed}; time is not predicted."
        )
    if facts.prediction is None and spec.batch.micro == "auto":
        if layout.pp == 1:
            lines.append(f"{micro} is the largest power of two that divides the batch and fits.")
        elif facts.bubble > LOW_BUBBLE:
            lines.append(f"{micro} makes the smallest pipeline bubble, {facts.bubble:.1%}.")
        else:
            lines.append(
                f"{micro} is the largest power of two that divides the batch, fits and keeps the "
                f"pipeline bubble under {LOW_BUBBLE:.0%} ({facts.bubble:.1%})."
            )
    if len(set(candidate.split)) > 1:
        lines.append(f"Layers per chunk are uneven: {list(candidate.split)} in model order.")
    return lines


def _rival_reasons(rivals: Rivals | None) -> list[str]:
    """Say which other meshes may be faster: the prediction cannot tell them apart."""
    if rivals is None or not rivals.count:
        return []
    others = "one other mesh" if rivals.count == 1 else f"{rivals.count} other meshes"
    return [
        f"It cannot be told apart from {others}: {rivals.nearest} is predicted "
        f"{rivals.slower:.1%} slower, and is the faster one with a probability of "
        f"{rivals.probability:.0%} (--explain)."
    ]


def _recompute_reasons(facts: Facts) -> list[str]:
    """Report the memory that recomputation saves and the time it costs."""
    candidate = facts.candidate
    if candidate.mode == "none":
        return []
    without = candidate_peak(facts.request, replace(candidate, recompute=RECOMPUTES.index("none")))
    saved = without - max(stage.total_bytes for stage in facts.memory)
    why = " (flash attention keeps no s x s matrices anyway)"
    core = candidate.mode == "selective" and candidate.modules == ("core_attn",)
    flash = core and uses_flash_attention(facts.request.spec)
    cost = ""
    if facts.prediction is not None:
        parts = facts.prediction.parts
        cost = f" and costs {parts.recompute_seconds / parts.total_seconds:.1%} of the step"
    return [
        f"recompute {candidate.recomputed} saves {short_bytes(saved)} per GPU{cost}"
        f"{why if flash else ''}; without it the peak is {short_bytes(without)}."
    ]


def _placement_reasons(profile: ClusterProfile, placements: Sequence[AxisPlacement]) -> list[str]:
    lines = []
    for placement in placements:
        if placement.size > 1:
            fast = placement.span not in _SLOW_SPANS
            link = (
                f"NVLink {profile.nvlink.bandwidth / 1e9:.0f} GB/s"
                if fast
                else profile.network.fabric
            )
            verb = "stays" if fast else "goes"
            lines.append(f"{placement.axis} {placement.size} {verb} {placement.span} ({link}).")
    return lines


def _segment_reasons(facts: Facts) -> list[str]:
    """Report the segment that the script requests, and what it holds."""
    profile, per_node = facts.request.profile, facts.request.profile.gpu.per_node
    switches = profile.network.switches
    if facts.segment is None:
        return []
    nodes = "1 node" if facts.segment == 1 else f"{facts.segment} nodes"
    gpus = facts.segment * per_node
    return [
        f"--segment={facts.segment} puts {nodes} ({gpus} GPUs) at a time into one block of "
        f"{switches.nodes_per_leaf}."
    ]


def _cut_groups(facts: Facts) -> list[str]:
    """Warn where cp or ep would fit into a rack, but no segment of the job holds whole groups."""
    profile, per_node = facts.request.profile, facts.request.profile.gpu.per_node
    switches, nodes = profile.network.switches, facts.candidate.layout.world_size // per_node
    most = min(profile.nvlink.domain, (switches.usable_nodes or nodes) * per_node)
    lines = []
    for placement in facts.placements:
        block = placement.stride * placement.size
        cut = placement.span in _SLOW_SPANS and per_node < block <= most
        if not cut or placement.axis not in ("cp", "ep"):
            continue
        line = f"{placement.axis} {placement.size} would fit into an NVLink domain of {most} GPUs"
        if switches.plugin != "block" or switches.segment_policy == "forbid":
            lines.append(f"{line}, but no segments are requested here that would keep it there.")
        else:
            lines.append(
                f"{line}, but no segment of this job holds whole groups (resources.segment, "
                "spare_nodes, min_nodes)."
            )
    return lines


def warnings(facts: Facts) -> tuple[str, ...]:
    """Warn about what works but should be known before GPU hours are spent."""
    spec, profile, candidate = facts.request.spec, facts.request.profile, facts.candidate
    layout, placements = candidate.layout, facts.placements
    lines = [
        f"tp {placement.size} leaves the NVLink domain of {facts.domain} GPUs: every layer waits "
        f"for slower links several times per microbatch."
        for placement in placements
        if placement.axis == "tp"
        and not stays_inside(placement.stride, placement.size, layout.world_size, facts.domain)
    ]
    lines += _cut_groups(facts)
    capacity = int(profile.gpu.memory)
    share = max(stage.total_bytes for stage in facts.memory) / capacity
    sure = facts.certainty
    if sure is not None and sure.fit_probability < comfortable(facts.request):
        lines.append(
            f"Memory is tight: {fill_level(facts.memory, capacity)} ({share:.0%}) fits with a "
            f"probability of {sure.fit_probability:.0%} (`fit_probability` refuses less than "
            f"{spec.fit_probability:.0%})."
        )
    elif sure is None and share > TIGHT_SHARE:
        lines.append(
            f"Memory is tight: {fill_level(facts.memory, capacity)} ({share:.0%}); fragmentation "
            "may end the run."
        )
    if facts.bubble > LOW_BUBBLE:
        lines.append(_bubble_warning(facts))
    if layout.dp * layout.cp > 1 and candidate.zero == 0 and spec.engine.abilities.shards:
        replicas = layout.dp * layout.cp
        lines.append(f"Optimizer state is not sharded: {replicas} GPUs hold the same copy.")
    if spec.model.key_value_heads < layout.tp:
        lines.append(
            f"kv_heads {spec.model.key_value_heads} is below tp {layout.tp}: QKV is gathered "
            "over tp in every layer."
        )
    lines += _outdated(facts.request)
    per_node = node_request(layout.world_size, profile.gpu.per_node).gpus_per_node
    return (*lines, *option_warnings(facts.request, candidate, per_node))


def _outdated(request: PlanRequest) -> list[str]:
    """Warn where what own runs have taught is left aside."""
    engine = request.spec.engine.name
    if request.knowledge is None or engine not in request.knowledge.outdated:
        return []
    return [
        f"What runs of {engine} have taught here is not used: the planner's constants or "
        "multipliers are others since; run `hpctrain calibrate RUN ...` again."
    ]


def _bubble_warning(facts: Facts) -> str:
    layers, candidate, bubble = facts.request.spec.model.layers, facts.candidate, facts.bubble
    layout = candidate.layout
    even = layout.vpp == 1 and layers % layout.pp == 0
    useful = [vpp for vpp in divisors(layers // layout.pp) if vpp > 1] if even else []
    if useful:
        advice = f"vpp {useful[0]} would make it {bubble / useful[0]:.1%}"
        if candidate.accumulation % layout.pp:
            advice += f" if microbatches were a multiple of pp {layout.pp}"
    else:
        advice = "a larger global batch would make it smaller"
    return (
        f"The pipeline bubble is {bubble:.1%} of the ideal step: (pp - 1) / (microbatches x vpp) "
        f"= {layout.pp - 1} / ({candidate.accumulation} x {layout.vpp}); {advice}."
    )


# -- Explain what settings of production cost in a plan, and what of them has no price ----------


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
