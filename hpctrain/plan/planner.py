"""From a spec and a cluster profile to a plan, or to a refusal that says what would work.

Belongs here: the order in which things are decided. Does not belong here: arithmetic, wording,
files, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import DoesNotFitError, HpctrainError, LimitError
from hpctrain.plan.abilities.sharding import sharding_problems
from hpctrain.plan.abilities.trainable import untrainable
from hpctrain.plan.cost.from_spec import Knowledge
from hpctrain.plan.cost.lora_counts import (
    flops_per_step,
    held_parameters,
    held_stages,
    learned_parameters,
)
from hpctrain.plan.cost.plan_memory import candidate_memory
from hpctrain.plan.cost.prediction import predict
from hpctrain.plan.divisors import powers_of_two_below
from hpctrain.plan.documents import Goal, NodeRequest, Plan
from hpctrain.plan.explain import Facts, memory_refusal, proposal, reasons, warnings
from hpctrain.plan.limits import (
    allowed_gpus,
    limit_problems,
    node_request,
    size_problems,
    usable_gpus,
)
from hpctrain.plan.mesh.batch import batch_problems, batch_split
from hpctrain.plan.mesh.candidate import Candidate, candidate_of
from hpctrain.plan.mesh.islands import island_warnings, on_islands, slow_links, used_islands
from hpctrain.plan.mesh.layout import layout_of, layout_problems, settled, world_problems
from hpctrain.plan.mesh.placement import place_axes
from hpctrain.plan.mesh.rank_order import OrderChoice, choose_order, order_problems
from hpctrain.plan.model.parameters import (
    pad_vocab,
    vocab_multiple,
)
from hpctrain.plan.search.hints import larger_fit, nearest_fits, roomiest
from hpctrain.plan.search.layouts import Found, search
from hpctrain.plan.search.ranking import preferred
from hpctrain.plan.search.space import freedom_of
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec, RunSpec

# How many candidates just below the capacity are looked at exactly before giving up.
BORDERLINE = 64


@dataclass(frozen=True)
class Decision:
    """A plan and the search behind it: `row` of `found` became the plan."""

    spec: RunSpec
    profile: ClusterProfile
    knowledge: Knowledge | None
    goal: Goal
    found: Found
    row: int
    plan: Plan


def make_plan(
    spec: RunSpec,
    profile: ClusterProfile,
    knowledge: Knowledge | None = None,
    goal: Goal = "time",
) -> Plan:
    """Decide everything that is to be decided before a script can be written.

    Without `knowledge` of a GPU no time is predicted, and a rule that knows memory only decides.
    Raises LimitError when the site does not allow the run, else DoesNotFitError when layout,
    batch or memory do not work out. The message has one line per problem, with numbers; the hint
    has the nearest layouts that fit.
    """
    return decide(spec, profile, knowledge, goal).plan


def decide(
    spec: RunSpec,
    profile: ClusterProfile,
    knowledge: Knowledge | None = None,
    goal: Goal = "time",
) -> Decision:
    """`make_plan`, with the search that led to the plan."""
    limits = limit_problems(spec, profile)
    problems = _problems(spec, profile)
    found: Found | None = None
    row: int | None = None
    if not problems or (_only_too_many(spec, profile, problems)):
        found = search(spec, profile, knowledge, freedom_of(spec, profile))
        row = _chosen(spec, profile, knowledge, found, goal)
        problems += [] if row is not None else _memory_problems(spec, profile, knowledge, found)
    if limits or problems or found is None or row is None:
        raise _refusal(spec, profile, knowledge, limits, problems)
    plan = _assemble(spec, profile, knowledge, found, row, goal)
    return Decision(spec, profile, knowledge, goal, found, row, plan)


def _problems(spec: RunSpec, profile: ClusterProfile) -> list[str]:
    """Everything but memory that is wrong with the sizes asked for, in words."""
    gpus = spec.resources.gpus
    problems = size_problems(gpus, profile)
    if spec.parallel == "auto":
        return problems + sharding_problems(spec)
    parallel = settled(spec, spec.parallel)
    problems += sharding_problems(spec) + layout_problems(spec, parallel)
    worlds = world_problems(parallel, gpus, profile)
    if worlds:
        return problems + worlds
    problems += batch_problems(spec, layout_of(parallel, gpus))
    return problems or _mesh_problems(spec, parallel)


def _mesh_problems(spec: RunSpec, parallel: ParallelSpec) -> list[str]:
    """What can only be said of a mesh that is fine by itself: its order and its shards."""
    candidate = candidate_of(spec, parallel, spec.resources.gpus, 1, "none")
    layout, size = candidate.layout, spec.optimizer.shard_gpus
    problems = order_problems(candidate, layout.order)
    replicas = layout.dp * layout.cp
    if size is not None and replicas % size:
        problems.append(f"shards of {size} GPUs do not divide the {replicas} replicas (dp x cp)")
    return problems


def _only_too_many(spec: RunSpec, profile: ClusterProfile, problems: Sequence[str]) -> bool:
    """True where an explicit layout is fine but for the number of GPUs: its memory is worth
    mentioning in the same message."""
    sizes = size_problems(spec.resources.gpus, profile)
    return spec.parallel != "auto" and list(problems) == sizes


def _chosen(
    spec: RunSpec,
    profile: ClusterProfile,
    knowledge: Knowledge | None,
    found: Found,
    goal: Goal,
) -> int | None:
    """The first preferred row whose exact memory fits; None when none does."""
    for row in preferred(found, goal)[:BORDERLINE]:
        memory = candidate_memory(spec, profile, knowledge, found.candidate(int(row)))
        if max(stage.total_bytes for stage in memory) <= found.capacity_bytes:
            return int(row)
    return None


def _memory_problems(
    spec: RunSpec, profile: ClusterProfile, knowledge: Knowledge | None, found: Found
) -> list[str]:
    """Why nothing was chosen: what the leanest candidate needs, or that there is none."""
    if not len(found.columns):
        model = spec.model
        return [
            f"no layout of {spec.resources.gpus} GPUs divides layers {model.layers}, heads "
            f"{model.heads} and global batch {spec.batch.global_} (micro {spec.batch.micro})"
        ]
    best = roomiest(found)
    memory = candidate_memory(spec, profile, knowledge, best)
    refusal = memory_refusal(best, memory, found.capacity_bytes)
    if spec.parallel == "auto":
        how = "" if spec.recompute == "auto" else f" with recompute {spec.recompute}"
        refusal = f"no layout fits{how}; the leanest, {refusal}"
    return [refusal]


def _refusal(
    spec: RunSpec,
    profile: ClusterProfile,
    knowledge: Knowledge | None,
    limits: Sequence[str],
    problems: Sequence[str],
) -> HpctrainError:
    kind = LimitError if limits else DoesNotFitError
    too_many = allowed_gpus(spec, profile) != spec.resources.gpus
    hint = _hint(spec, profile, knowledge) if problems or too_many else None
    return kind("\n".join([*limits, *problems]), hint)


def _hint(spec: RunSpec, profile: ClusterProfile, knowledge: Knowledge | None) -> str | None:
    """What would work: on the GPUs asked for, on fewer where those are too many, else on more."""
    if sharding_problems(spec):
        return None
    gpus, asked = allowed_gpus(spec, profile), spec.resources.gpus
    for number in (gpus, *powers_of_two_below(gpus)) if gpus != asked else (gpus,):
        found = proposal(nearest_fits(spec, profile, knowledge, number))
        if found is not None:
            return found if number == asked else f"on {number} GPUs {found}"
    limit = usable_gpus(spec, profile)
    larger = larger_fit(spec, profile, knowledge, limit)
    if larger is not None:
        needed = larger.layout.world_size
        return f"no layout of {asked} GPUs fits; {needed} GPUs would do: {larger}"
    return f"no layout was found on up to {limit} GPUs, the most that one run may have here"


def _ordered(
    spec: RunSpec, profile: ClusterProfile, found: Found, candidate: Candidate, nodes: NodeRequest
) -> OrderChoice:
    """The search's order of axes where it has priced slow links, or where there are none; else
    the one that sends less over them."""
    own, several = candidate.layout.order, len(used_islands(nodes, profile)) > 1
    links = slow_links(nodes, profile)
    if not found.timed or (links and not several):
        return choose_order(spec, profile, candidate, nodes)
    if not links:
        return OrderChoice(own, ())
    other = choose_order(spec, profile, candidate, nodes)
    said = other.reasons if other.order == own else (f"order {own} has the shorter step.",)
    return OrderChoice(own, said)


def _assemble(
    spec: RunSpec,
    profile: ClusterProfile,
    knowledge: Knowledge | None,
    found: Found,
    row: int,
    goal: Goal,
) -> Plan:
    candidate, model = found.candidate(row), spec.model
    request = node_request(candidate.layout.world_size, profile.gpu.per_node)
    nodes = on_islands(request, profile)
    ordered = _ordered(spec, profile, found, candidate, nodes)
    layout = candidate.layout.model_copy(update={"order": ordered.order})
    candidate = replace(candidate, layout=layout)
    memory = candidate_memory(spec, profile, knowledge, candidate)
    placements = place_axes(layout, profile, nodes)
    prediction = predict(spec, profile, knowledge, candidate)
    facts = Facts(
        *(spec, profile, knowledge, candidate, placements, memory, found.counts, prediction), goal
    )
    return Plan(
        run_name=spec.name,
        profile_name=profile.name,
        engine=spec.engine.name,
        layout=layout,
        layout_origin="auto" if spec.parallel == "auto" else "spec",
        nodes=nodes,
        batch=batch_split(spec, layout.dp, candidate.micro_batch),
        recompute=candidate.recompute,
        precision=spec.precision,
        zero=candidate.zero,
        shard_gpus=candidate.shard_gpus,
        offload=spec.optimizer.offload if candidate.offload else "none",
        padded_vocab=pad_vocab(model.vocab, layout.tp, vocab_multiple(spec)),
        parameters=held_parameters(spec),
        learned_parameters=learned_parameters(spec) if spec.lora else None,
        stages=held_stages(spec, layout, candidate.split),
        memory=memory,
        gpu_memory_bytes=int(profile.gpu.memory),
        placements=placements,
        step_seconds=prediction.parts.total_seconds if prediction else None,
        prediction=prediction,
        unit="images" if model.reads_images else "tokens",
        search=found.counts,
        model_flops_per_step=flops_per_step(spec),
        reasons=(*reasons(facts), *ordered.reasons),
        warnings=(*warnings(facts), *island_warnings(nodes, profile), *untrainable(spec)),
    )
