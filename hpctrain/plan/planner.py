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
from hpctrain.plan.mesh.batch import batch_split
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.islands import island_warnings, on_islands, slow_links, used_islands
from hpctrain.plan.mesh.layout import settled
from hpctrain.plan.mesh.placement import place_axes
from hpctrain.plan.mesh.rank_order import OrderChoice, choose_order
from hpctrain.plan.mesh.rules import BATCH, MESH_RULES, RULES, Rule, layout_values, refusals
from hpctrain.plan.model.parameters import pad_vocab, vocab_multiple
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.plan.search.hints import larger_fit, nearest_fits, roomiest
from hpctrain.plan.search.layouts import Found, search
from hpctrain.plan.search.ranking import preferred
from hpctrain.plan.search.space import freedom_of
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

# How many candidates just below the capacity are looked at exactly before giving up.
BORDERLINE = 64


@dataclass(frozen=True)
class Decision:
    """A plan and the search behind it: `row` of `found` became the plan."""

    request: PlanRequest
    found: Found
    row: int
    plan: Plan


@dataclass(frozen=True)
class Refusals:
    """Why a request has no plan, one message each, by kind."""

    site: Sequence[str]
    size: Sequence[str]
    sharding: Sequence[str]
    layout: Sequence[str]
    memory: Sequence[str] = ()

    @property
    def messages(self) -> list[str]:
        return [*self.site, *self.size, *self.sharding, *self.layout, *self.memory]


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
    return decide(PlanRequest(spec, profile, knowledge, goal)).plan


def decide(request: PlanRequest) -> Decision:
    """Make a plan, and keep the search that led to it."""
    spec, profile = request.spec, request.profile
    found: Found | None = None
    row: int | None = None
    sharding = sharding_problems(spec)
    # what the engine cannot do at all says enough about sharding
    rules = (*MESH_RULES, BATCH) if sharding else RULES
    refused = Refusals(
        site=limit_problems(spec, profile),
        size=size_problems(spec.resources.gpus, profile),
        sharding=sharding,
        layout=_layout_refusals(request, rules),
    )
    # the memory of a layout on too many GPUs is worth mentioning in the same message
    impossible = refused.sharding or refused.layout or (spec.parallel == "auto" and refused.size)
    if not impossible:
        found = search(request, freedom_of(spec, profile))
        row = _chosen(found)
        if row is None:
            refused = replace(refused, memory=[_memory_refusal(found)])
    if found is None or row is None or refused.messages:
        raise _refusal(request, refused)
    return Decision(request, found, row, _assemble(found, row))


def _layout_refusals(request: PlanRequest, rules: Sequence[Rule]) -> list[str]:
    """List what is wrong with an explicit layout, except its memory."""
    spec = request.spec
    if spec.parallel == "auto":
        return []
    values = layout_values(spec, settled(spec, spec.parallel), spec.resources.gpus)
    return refusals(request, values, rules)


def _chosen(found: Found) -> int | None:
    """Find the first preferred row whose exact memory fits; None when none does."""
    for row in preferred(found)[:BORDERLINE]:
        memory = candidate_memory(found.request, found.candidate(int(row)))
        if max(stage.total_bytes for stage in memory) <= found.capacity_bytes:
            return int(row)
    return None


def _memory_refusal(found: Found) -> str:
    """Say why nothing was chosen: what the leanest candidate needs, or that there is none."""
    spec = found.request.spec
    if not len(found.columns):
        return (
            f"no layout of {spec.resources.gpus} GPUs divides layers {spec.model.layers}, heads "
            f"{spec.model.heads} and global batch {spec.batch.global_} (micro {spec.batch.micro})"
        )
    best = roomiest(found)
    refusal = memory_refusal(best, candidate_memory(found.request, best), found.capacity_bytes)
    if spec.parallel == "auto":
        how = "" if spec.recompute == "auto" else f" with recompute {spec.recompute}"
        refusal = f"no layout fits{how}; the leanest, {refusal}"
    return refusal


def _refusal(request: PlanRequest, refused: Refusals) -> HpctrainError:
    spec = request.spec
    kind = LimitError if refused.site else DoesNotFitError
    only_site = list(refused.site) == refused.messages
    too_many = allowed_gpus(spec, request.profile) != spec.resources.gpus
    # a sharding that the engine lacks has its hint in its message
    wanted = not refused.sharding and (too_many or not only_site)
    return kind("\n".join(refused.messages), _hint(request) if wanted else None)


def _hint(request: PlanRequest) -> str:
    """Say what would work: on the GPUs asked for, on fewer where those are too many, else on
    more."""
    spec, profile = request.spec, request.profile
    gpus, asked = allowed_gpus(spec, profile), spec.resources.gpus
    for number in (gpus, *powers_of_two_below(gpus)) if gpus != asked else (gpus,):
        found = proposal(nearest_fits(request, number))
        if found is not None:
            return found if number == asked else f"on {number} GPUs {found}"
    limit = usable_gpus(spec, profile)
    larger = larger_fit(request, limit)
    if larger is not None:
        needed = larger.layout.world_size
        return f"no layout of {asked} GPUs fits; {needed} GPUs would do: {larger}"
    return f"no layout was found on up to {limit} GPUs, the most that one run may have here"


def _ordered(found: Found, candidate: Candidate, nodes: NodeRequest) -> OrderChoice:
    """Choose the order of axes: the search's where it has priced slow links, or where there are
    none; else the one that sends less over them."""
    spec, profile = found.request.spec, found.request.profile
    own, several = candidate.layout.order, len(used_islands(nodes, profile)) > 1
    links = slow_links(nodes, profile)
    if not found.timed or (links and not several):
        return choose_order(spec, profile, candidate, nodes)
    if not links:
        return OrderChoice(own, ())
    other = choose_order(spec, profile, candidate, nodes)
    reasons = other.reasons if other.order == own else (f"order {own} has the shorter step.",)
    return OrderChoice(own, reasons)


def _assemble(found: Found, row: int) -> Plan:
    request, candidate = found.request, found.candidate(row)
    spec, profile, model = request.spec, request.profile, request.spec.model
    nodes = on_islands(node_request(candidate.layout.world_size, profile.gpu.per_node), profile)
    ordered = _ordered(found, candidate, nodes)
    layout = candidate.layout.model_copy(update={"order": ordered.order})
    candidate = replace(candidate, layout=layout)
    memory = candidate_memory(request, candidate)
    placements = place_axes(layout, profile, nodes)
    prediction = predict(request, candidate)
    facts = Facts(request, candidate, placements, memory, found.counts, prediction)
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
