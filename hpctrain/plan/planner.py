"""From a spec and a profile to a plan, or to a refusal that names every problem at once.

Belongs here: the order of decisions. Does not belong here: the arithmetic behind any of them,
files, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import DoesNotFitError, HpctrainError, LimitError
from hpctrain.plan.batch import batch_problems, batch_split, micro_batches
from hpctrain.plan.candidate import Candidate, candidate_of
from hpctrain.plan.divisors import powers_of_two_below
from hpctrain.plan.documents import MemoryBreakdown, Plan
from hpctrain.plan.explain import memory_refusal, proposal, reasons, warnings
from hpctrain.plan.layout import layout_of, layout_problems, world_problems
from hpctrain.plan.limits import (
    allowed_gpus,
    limit_problems,
    node_request,
    size_problems,
    usable_gpus,
)
from hpctrain.plan.memory import stage_memory
from hpctrain.plan.parameters import model_flops_per_step, pad_vocab, total_parameters
from hpctrain.plan.placement import place_axes
from hpctrain.plan.search import candidates, choose, larger_fit, leanest, nearest_fits
from hpctrain.plan.stages import build_stages
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec, RunSpec


def make_plan(spec: RunSpec, profile: ClusterProfile) -> Plan:
    """Decide everything that is to be decided before a script can be written.

    Raises LimitError when the site does not allow the run, else DoesNotFitError when layout,
    batch or memory do not work out. The message has one line per problem, with numbers; the hint
    has the nearest layouts that fit.
    """
    limits = limit_problems(spec, profile)
    sizes = size_problems(spec.resources.gpus, profile)
    found, problems = (None, sizes) if sizes and spec.parallel == "auto" else _find(spec, profile)
    if sizes and spec.parallel != "auto":
        problems = [*sizes, *problems]
    if limits or problems or found is None:
        raise _refusal(spec, profile, limits, problems)
    return _assemble(spec, profile, found)


def _find(spec: RunSpec, profile: ClusterProfile) -> tuple[Candidate | None, list[str]]:
    """The candidate to plan with, and why it cannot be used (empty when it can)."""
    if spec.parallel == "auto":
        return _find_any(spec, profile)
    return _find_explicit(spec, profile, spec.parallel)


def _find_explicit(
    spec: RunSpec, profile: ClusterProfile, parallel: ParallelSpec
) -> tuple[Candidate | None, list[str]]:
    gpus = spec.resources.gpus
    problems = layout_problems(spec, parallel)
    problems += (worlds := world_problems(parallel, gpus, profile))
    if not worlds:
        problems += batch_problems(spec, layout_of(parallel, gpus))
    if problems:
        return None, problems
    tried = [
        candidate_of(spec, parallel, gpus, micro, spec.recompute)
        for micro in micro_batches(spec, layout_of(parallel, gpus))
    ]
    return _fitting_or_reason(spec, profile, tried)


def _find_any(spec: RunSpec, profile: ClusterProfile) -> tuple[Candidate | None, list[str]]:
    tried = list(candidates(spec, profile))
    if tried:
        return _fitting_or_reason(spec, profile, tried)
    model = spec.model
    return None, [
        f"no layout of {spec.resources.gpus} GPUs divides layers {model.layers}, heads "
        f"{model.heads} and global batch {spec.batch.global_} (micro {spec.batch.micro})"
    ]


def _fitting_or_reason(
    spec: RunSpec, profile: ClusterProfile, tried: Sequence[Candidate]
) -> tuple[Candidate | None, list[str]]:
    chosen = choose(spec, profile, tried)
    if chosen is not None:
        return chosen, []
    best = leanest(spec, profile, tried)
    assert best is not None
    memory = candidate_memory(spec, profile, best)
    refusal = memory_refusal(best, memory, int(profile.gpu.memory))
    if spec.parallel == "auto":
        refusal = f"no layout fits with recompute {spec.recompute}; the leanest, {refusal}"
    return None, [refusal]


def candidate_memory(
    spec: RunSpec, profile: ClusterProfile, candidate: Candidate
) -> tuple[MemoryBreakdown, ...]:
    """Memory of every stage."""
    stages = build_stages(spec.model, candidate.layout, candidate.split)
    return tuple(stage_memory(spec, profile, candidate, stage) for stage in stages)


def _refusal(
    spec: RunSpec, profile: ClusterProfile, limits: Sequence[str], problems: Sequence[str]
) -> HpctrainError:
    kind = LimitError if limits else DoesNotFitError
    too_many = allowed_gpus(spec, profile) != spec.resources.gpus
    hint = _hint(spec, profile) if problems or too_many else None
    return kind("\n".join([*limits, *problems]), hint)


def _hint(spec: RunSpec, profile: ClusterProfile) -> str:
    """What would work: on the GPUs asked for, on fewer where those are too many, else on more."""
    gpus, asked = allowed_gpus(spec, profile), spec.resources.gpus
    for number in (gpus, *powers_of_two_below(gpus)) if gpus != asked else (gpus,):
        found = proposal(nearest_fits(spec, profile, number))
        if found is not None:
            return found if number == asked else f"on {number} GPUs {found}"
    limit = usable_gpus(spec, profile)
    larger = larger_fit(spec, profile, limit)
    if larger is not None:
        needed = larger.layout.world_size
        return f"no layout of {asked} GPUs fits; {needed} GPUs would do: {larger}"
    return f"no layout was found on up to {limit} GPUs, the most that one run may have here"


def _assemble(spec: RunSpec, profile: ClusterProfile, candidate: Candidate) -> Plan:
    layout, model = candidate.layout, spec.model
    memory = candidate_memory(spec, profile, candidate)
    placements = place_axes(layout, profile)
    facts = (spec, profile, candidate, placements, memory)
    return Plan(
        run_name=spec.name,
        profile_name=profile.name,
        engine=spec.engine.name,
        layout=layout,
        layout_origin="auto" if spec.parallel == "auto" else "spec",
        nodes=node_request(layout.world_size, profile.gpu.per_node),
        batch=batch_split(spec, layout.dp, candidate.micro_batch),
        recompute=candidate.recompute,
        precision=spec.precision,
        padded_vocab=pad_vocab(model.vocab, layout.tp),
        parameters=total_parameters(model),
        stages=build_stages(model, layout, candidate.split),
        memory=memory,
        gpu_memory_bytes=int(profile.gpu.memory),
        placements=placements,
        model_flops_per_step=model_flops_per_step(model, spec.batch.global_),
        reasons=reasons(*facts),
        warnings=warnings(*facts),
    )
