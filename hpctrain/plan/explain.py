"""A plan in words: reasons, warnings and refusals.

Belongs here: sentences. Does not belong here: decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpctrain.plan.cost.from_spec import uses_flash_attention
from hpctrain.plan.cost.plan_memory import TIGHT_SHARE, candidate_peak
from hpctrain.plan.divisors import divisors
from hpctrain.plan.documents import (
    AxisPlacement,
    Goal,
    MemoryBreakdown,
    Prediction,
    SearchCounts,
)
from hpctrain.plan.mesh.batch import LOW_BUBBLE, bubble_fraction
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.placement import stays_inside
from hpctrain.plan.model.parameters import pad_vocab, vocab_multiple
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import short_bytes

_BEST: dict[Goal, str] = {
    "time": "The best by predicted time",
    "gpu-hours": "The best by predicted time",  # GPU-hours, with as many GPUs as there are
    "memory": "The least memory",
}


@dataclass(frozen=True)
class Facts:
    """Everything about one plan that sentences are made of."""

    request: PlanRequest
    candidate: Candidate
    placements: Sequence[AxisPlacement]
    memory: Sequence[MemoryBreakdown]
    counts: SearchCounts
    prediction: Prediction | None

    @property
    def bubble(self) -> float:
        """The pipeline bubble as a share of the ideal step time."""
        return bubble_fraction(self.candidate.layout, self.candidate.accumulation)


def amount(count: float, unit_bytes: int) -> str:
    """A number of bytes in a unit fixed by the caller: `55.4`."""
    return f"{count / unit_bytes:.1f}"


def fill_level(memory: Sequence[MemoryBreakdown], capacity_bytes: int) -> str:
    """`101.2 of 79.2 GiB per GPU in stage 0` for the fullest stage."""
    stage = max(range(len(memory)), key=lambda index: memory[index].total_bytes)
    total, capacity = short_bytes(memory[stage].total_bytes), short_bytes(capacity_bytes)
    if total.split()[-1] == capacity.split()[-1]:
        total = total.split()[0]
    return f"{total} of {capacity} per GPU in stage {stage}"


def largest_parts(memory: Sequence[MemoryBreakdown], capacity_bytes: int) -> str:
    """`optimizer 61.1, gradients 20.4, ...`: the components of the fullest stage, largest first."""
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
    """One sentence: what is needed, what there is, and what needs it."""
    level = fill_level(memory, capacity_bytes)
    return f"{candidate.layout} needs {level} ({largest_parts(memory, capacity_bytes)})"


def proposal(found: Iterable[Candidate]) -> str | None:
    """The hint of a refusal: layouts that fit, nearest first; None when there are none."""
    lines = [f"  {candidate}" for candidate in found]
    return "\n".join(["these fit:", *lines]) if lines else None


def reasons(facts: Facts) -> tuple[str, ...]:
    """Why the plan is as it is, one full sentence each."""
    spec, profile, layout = facts.request.spec, facts.request.profile, facts.candidate.layout
    lines = [
        *_choice_reasons(facts),
        *_placement_reasons(profile, facts.placements),
        f"Memory peaks at {fill_level(facts.memory, int(profile.gpu.memory))}.",
        *_recompute_reasons(facts),
        *_time_reasons(facts),
    ]
    if layout.sequence_parallel:
        lines.append(f"sequence_parallel divides norms and dropout by tp {layout.tp} as well.")
    if layout.vpp > 1 and layout.pp == 2:
        lines.append("vpp with pp 2 needs overlapped stage-to-stage transfers; they are on.")
    multiple = vocab_multiple(spec)
    padded = pad_vocab(spec.model.vocab, layout.tp, multiple)
    if padded != spec.model.vocab and not spec.model.reads_images:
        step = multiple * layout.tp
        lines.append(f"vocab {spec.model.vocab} is padded to {padded}, a multiple of {step}.")
    return tuple(lines)


def _choice_reasons(facts: Facts) -> list[str]:
    candidate, counts = facts.candidate, facts.counts
    lines = []
    if facts.prediction is None:
        lines += _untimed_reasons(facts)
    elif counts.fitting > 1:
        more = f"; {counts.too_large:,} more would not" if counts.too_large else ""
        lines.append(
            f"{_BEST[facts.request.goal]} of {counts.fitting:,} candidates that fit{more}."
        )
    if len(set(candidate.split)) > 1:
        lines.append(f"Layers per chunk are uneven: {list(candidate.split)} in model order.")
    return lines


def _untimed_reasons(facts: Facts) -> list[str]:
    """Where the GPU is unknown, size and bubble decide; nothing is said about what is fixed."""
    spec, candidate = facts.request.spec, facts.candidate
    lines, layout = [], candidate.layout
    if spec.parallel == "auto":
        lines.append(
            f"tp {layout.tp} x pp {layout.pp} is the smallest group of GPUs that holds the model "
            f"with recompute {candidate.recompute}; time is not predicted."
        )
    if spec.batch.micro == "auto":
        lines.append(_micro_reason(candidate, facts.bubble))
    return lines


def _micro_reason(candidate: Candidate, bubble: float) -> str:
    micro = f"micro {candidate.micro_batch}"
    if candidate.layout.pp == 1:
        return f"{micro} is the largest power of two that divides the batch and fits."
    if bubble > LOW_BUBBLE:
        return f"{micro} makes the smallest pipeline bubble, {bubble:.1%}."
    return (
        f"{micro} is the largest power of two that divides the batch, fits and keeps the "
        f"pipeline bubble under {LOW_BUBBLE:.0%} ({bubble:.1%})."
    )


def _recompute_reasons(facts: Facts) -> list[str]:
    """What recomputation buys, so that nobody pays for it without need."""
    spec, candidate = facts.request.spec, facts.candidate
    if candidate.recompute == "none":
        return []
    without = candidate_peak(facts.request, replace(candidate, recompute="none"))
    saved = without - max(stage.total_bytes for stage in facts.memory)
    why = " (flash attention keeps no s x s matrices anyway)"
    flash = candidate.recompute == "selective" and uses_flash_attention(spec)
    cost = ""
    if facts.prediction is not None:
        parts = facts.prediction.parts
        cost = f" and costs {parts.recompute_seconds / parts.total_seconds:.1%} of the step"
    return [
        f"recompute {candidate.recompute} saves {short_bytes(saved)} per GPU{cost}"
        f"{why if flash else ''}; without it the peak is {short_bytes(without)}."
    ]


def _placement_reasons(profile: ClusterProfile, placements: Sequence[AxisPlacement]) -> list[str]:
    lines = []
    for placement in placements:
        if placement.size > 1:
            fast = placement.span not in ("across nodes", "across islands")
            link = (
                f"NVLink {profile.nvlink.bandwidth / 1e9:.0f} GB/s"
                if fast
                else profile.network.fabric
            )
            verb = "stays" if fast else "goes"
            lines.append(f"{placement.axis} {placement.size} {verb} {placement.span} ({link}).")
    return lines


def warnings(facts: Facts) -> tuple[str, ...]:
    """What works but should be known before the GPU hours are spent."""
    return (
        *_domain_warnings(facts.request.profile, facts.placements),
        *_memory_warnings(facts.request.profile, facts.memory),
        *_bubble_warnings(facts),
        *_engine_warnings(facts.request.spec, facts.candidate),
    )


def _time_reasons(facts: Facts) -> list[str]:
    profile = facts.request.profile
    if facts.prediction is not None or facts.request.knowledge is None:
        return []
    gpu = profile.gpu
    return [
        f"Step time is not predicted: profile {profile.name} says neither the peak rate nor "
        f"the memory bandwidth of its {gpu.type} with {short_bytes(gpu.memory)}."
    ]


def _domain_warnings(profile: ClusterProfile, placements: Sequence[AxisPlacement]) -> list[str]:
    world_size = placements[-1].stride * placements[-1].size
    domain = profile.nvlink.domain
    return [
        f"tp {placement.size} leaves the NVLink domain of {domain} GPUs: every layer waits for "
        f"slower links several times per microbatch."
        for placement in placements
        if placement.axis == "tp"
        and not stays_inside(placement.stride, placement.size, world_size, domain)
    ]


def _memory_warnings(profile: ClusterProfile, memory: Sequence[MemoryBreakdown]) -> list[str]:
    capacity = int(profile.gpu.memory)
    share = max(stage.total_bytes for stage in memory) / capacity
    if share <= TIGHT_SHARE:
        return []
    return [
        f"Memory is tight: {fill_level(memory, capacity)} ({share:.0%}); fragmentation may end "
        "the run."
    ]


def _bubble_warnings(facts: Facts) -> list[str]:
    spec, candidate, bubble = facts.request.spec, facts.candidate, facts.bubble
    layout = candidate.layout
    if bubble <= LOW_BUBBLE:
        return []
    per_stage = spec.model.layers // layout.pp
    even = layout.vpp == 1 and spec.model.layers % layout.pp == 0
    useful = [vpp for vpp in divisors(per_stage) if vpp > 1] if even else []
    advice = f"vpp {useful[0]} would make it {bubble / useful[0]:.1%}" if useful else ""
    if useful and candidate.accumulation % layout.pp:
        advice += f" if microbatches were a multiple of pp {layout.pp}"
    advice = advice or "a larger global batch would make it smaller"
    return [
        f"The pipeline bubble is {bubble:.1%} of the ideal step: (pp - 1) / (microbatches x vpp) "
        f"= {layout.pp - 1} / ({candidate.accumulation} x {layout.vpp}); {advice}."
    ]


def _engine_warnings(spec: RunSpec, candidate: Candidate) -> list[str]:
    layout, lines = candidate.layout, []
    if layout.cp > 1 and spec.engine.implementation == "auto":
        lines.append(f"cp {layout.cp} needs TransformerEngine on the nodes.")
    if layout.dp * layout.cp > 1 and candidate.zero == 0 and spec.engine.abilities.shards:
        replicas = layout.dp * layout.cp
        lines.append(f"Optimizer state is not shared out: {replicas} GPUs hold the same.")
    if spec.model.key_value_heads < layout.tp:
        lines.append(
            f"kv_heads {spec.model.key_value_heads} is below tp {layout.tp}: QKV is gathered "
            "over tp in every layer."
        )
    return lines
