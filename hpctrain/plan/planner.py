"""Plan a spec on a cluster, or refuse it with a hint that lists what would work.

Belongs here: the order of decisions, refusals and their hints. Does not belong here: arithmetic,
reasons and warnings (`explain`), files, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.base.errors import DoesNotFitError, LimitError, Refusal
from hpctrain.plan.abilities.sharding import sharding_problems
from hpctrain.plan.abilities.trainable import untrainable
from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.prediction import candidate_memory, candidate_peak, predict, priced_split
from hpctrain.plan.divisors import or_list
from hpctrain.plan.documents import RECOMPUTES, Goal, Layout, NodeRequest, Plan
from hpctrain.plan.explain import fill_level, reasons, warnings
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.limits import (
    allowed_gpus,
    gpu_hour_problems,
    limit_problems,
    low_precision_problems,
    node_request,
    size_problems,
    usable_gpus,
)
from hpctrain.plan.mesh.candidate import Candidate, Columns, candidate_of, settled
from hpctrain.plan.mesh.placement import (
    island_warnings,
    nvlink_domain,
    on_islands,
    place_axes,
    requested_segment,
    slow_links,
    used_islands,
)
from hpctrain.plan.mesh.rank_order import OrderChoice, choose_order
from hpctrain.plan.mesh.rules import BATCH, MESH_RULES, RULES, refusals
from hpctrain.plan.mesh.stages import build_stages
from hpctrain.plan.model.parameters import pad_vocab
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.plan.search.layouts import Found, preferred, rivals, search
from hpctrain.plan.search.space import freedom_of, hint_freedom
from hpctrain.plan.uncertainty.intervals import certainty_of
from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.families.settings import unknown_note
from hpctrain.spec.profile import ClusterProfile, profile_remarks
from hpctrain.spec.run import RunSpec

# How many candidates just below the capacity are counted exactly before giving up.
BORDERLINE = 64
# Probability of fitting from which on a refusal names it.
_WORTH_TELLING = 0.01


@dataclass(frozen=True)
class Decision:
    """A plan and the search behind it: `row` of `found` became the plan."""

    request: PlanRequest
    found: Found
    row: int
    plan: Plan

    @property
    def job(self) -> TrainingJob:
        """The job of the plan."""
        return TrainingJob(self.request.spec, self.request.profile, self.plan)


def make_plan(
    spec: RunSpec,
    profile: ClusterProfile,
    knowledge: Knowledge | None = None,
    goal: Goal = "time",
) -> Plan:
    """Decide everything that a script needs.

    Without `knowledge` of a GPU no time is predicted, and memory alone decides. Raises LimitError
    when the site does not allow the run, else DoesNotFitError when layout, batch or memory do not
    work out. The message has one line per problem, with numbers; the hint has the nearest layouts
    that fit.
    """
    return decide(PlanRequest(spec, profile, knowledge, goal)).plan


def decide(request: PlanRequest) -> Decision:
    """Make a plan, and keep the search that led to it. Raises like `make_plan`."""
    spec, profile = request.spec, request.profile
    sharding = sharding_problems(spec)
    layout: list[Refusal] = []
    if spec.parallel != "auto":
        # what the engine lacks altogether makes the rules about sharding redundant
        rules = (*MESH_RULES, BATCH) if sharding else RULES
        values = candidate_of(spec, settled(spec, spec.parallel), spec.resources.gpus)
        layout = refusals(request, values, rules)
    site, size = limit_problems(request), size_problems(spec.resources.gpus, profile)
    precision = low_precision_problems(request)
    refused = [*site, *size, *precision, *sharding, *layout]
    # a precision or sharding that is not to be had has its hint in its message
    hinted = not precision and not sharding
    found: Found | None = None
    row: int | None = None
    # the memory of a layout on too many GPUs is worth mentioning in the same message
    impossible = precision or sharding or layout or (spec.parallel == "auto" and size)
    if not impossible:
        found = search(request, freedom_of(request))
        row = _first_that_fits(found)
    if found is not None and row is None:
        refused.append(Refusal(_memory_refusal(found), "parallel"))
    if found is None or row is None or refused:
        kind = LimitError if site else DoesNotFitError
        too_many = allowed_gpus(spec, profile) != spec.resources.gpus
        if not hinted or (site == refused and not too_many):
            raise kind(refused)
        hint = _hint(request)
        lighter = found is not None and row is None and not site
        if settings := lighter_settings(request) if lighter else ():
            hint += f"\nor leave the layout as it is, with {' and '.join(settings)}, as NVIDIA's "
            hint += "recipes have it"
        raise kind(refused, hint)
    plan = _assemble(found, row)
    if too_long := gpu_hour_problems(spec, profile, plan.training_seconds):
        raise LimitError(too_long)
    return Decision(request, found, row, plan)


def _first_that_fits(found: Found) -> int | None:
    """Find the first preferred row whose exact memory fits; None when none does."""
    for row in preferred(found)[:BORDERLINE]:
        peak = candidate_peak(found.request, found.candidate(int(row)))
        if found.exact_probability(int(row), peak) >= found.request.spec.fit_probability:
            return int(row)
    return None


def _memory_refusal(found: Found) -> str:
    """Explain why nothing was chosen: the needs of the leanest candidate, or that there is none."""
    spec, capacity = found.request.spec, found.capacity_bytes
    if not len(found.columns):
        return (
            f"no layout of {spec.resources.gpus} GPUs divides layers {spec.model.layers}, heads "
            f"{spec.model.heads} and global batch {spec.batch.global_} (micro {spec.batch.micro})"
        )
    row = int(np.argmin(found.peak_bytes))
    leanest = found.candidate(row)
    memory = candidate_memory(found.request, leanest)
    peak = max(memory, key=lambda stage: stage.total_bytes)
    unit = 2**30 if capacity >= 2**30 else 2**20  # as `fill_level` prints the capacity
    parts = ", ".join(
        f"{name.removesuffix('_bytes')} {count / unit:.1f}"
        for name, count in sorted(peak.model_dump().items(), key=lambda part: -part[1])
        if count >= 0.05 * unit
    )
    refusal = f"{leanest.layout} needs {fill_level(memory, capacity)} ({parts})"
    odds = found.exact_probability(row, peak.total_bytes)
    if odds >= _WORTH_TELLING:
        refusal += f", which fits with {odds:.0%}; `fit_probability` asks for "
        refusal += f"{spec.fit_probability:.0%}"
    if spec.parallel == "auto":
        how = "" if spec.recompute == "auto" else f" with recompute {spec.recompute}"
        refusal = f"no layout fits{how}; the leanest, {refusal}"
    return refusal


def _hint(request: PlanRequest) -> str:
    """List layouts that fit: on the GPUs of the spec, on fewer if these are too many, or more.

    Last the engine that shards where this one cannot, on the first size that suffices.
    """
    spec, profile = request.spec, request.profile
    gpus, wanted = allowed_gpus(spec, profile), spec.resources.gpus
    sizes = sizes_around(gpus, profile.gpu.per_node, usable_gpus(spec, profile))
    fewer = [size for size in sizes if size < gpus] if gpus != wanted else []
    for number in (gpus, *fewer):
        if fitting := nearest_fits(request, number):
            lines = "\n".join(["these fit:", *(f"  {candidate}" for candidate in fitting)])
            return lines if number == wanted else f"on {number} GPUs {lines}"
    if other := fit_around(request, sizes):
        return f"{other.layout.world_size} GPUs would do: {other}"
    if name := spec.engine.abilities.sharding_alternative:
        engine = spec.engine.model_copy(update={"name": name})
        optimizer = spec.optimizer.model_copy(update={"zero": None})
        changed = spec.model_copy(update={"engine": engine, "optimizer": optimizer})
        if other := fit_around(replace(request, spec=changed), (gpus, *sizes)):
            needed = other.layout.world_size
            return f"engine {name} shards the model, and {needed} GPUs would do: {other}"
    tried = f" (tried: {or_list(sorted((gpus, *sizes)))})" if sizes else ""
    return f"no number of GPUs that one run may have here helps{tried}: change model or batch"


def _scattered_seconds(
    request: PlanRequest, candidate: Candidate, nodes: NodeRequest
) -> float | None:
    """Predict the step with no two nodes in one NVLink domain or under one leaf switch.

    None without a plugin of Slurm that knows them, where nobody will compare.
    """
    profile = request.profile
    if profile.network.switches.plugin == "none" or nodes.nodes == 1:
        return None
    inside = min(profile.nvlink.domain, profile.gpu.per_node)
    nvlink = profile.nvlink.model_copy(update={"domain": inside})
    one = {"plugin": "tree", "nodes_per_leaf": 1, "usable_per_leaf": None, "segment": "auto"}
    switches = profile.network.switches.model_copy(update=one)
    network = profile.network.model_copy(update={"switches": switches})
    alone = profile.model_copy(update={"nvlink": nvlink, "network": network})
    scattered = predict(replace(request, profile=alone), candidate)
    return scattered.parts.total_seconds if scattered else None


def _assemble(found: Found, row: int) -> Plan:
    """Make the document of one row.

    The order of axes is the search's where it has priced slow links, or where there are none; else
    the one that sends less over them.
    """
    request, candidate, counts = found.request, found.candidate(row), found.request.counts
    spec, profile, model = request.spec, request.profile, request.spec.model
    nodes = on_islands(node_request(candidate.layout.world_size, profile.gpu.per_node), profile)
    ordered, order = choose_order(request, candidate, nodes), candidate.layout.order
    links, several = slow_links(nodes, profile), len(used_islands(nodes, profile)) > 1
    if found.timed and not links:
        ordered = OrderChoice(order, ())
    elif found.timed and several and ordered.order != order:
        ordered = OrderChoice(order, (f"order {order} has the shorter step.",))
    candidate = replace(candidate, order=ORDERS.index(ordered.order))
    layout = candidate.layout
    memory = candidate_memory(request, candidate)
    domain = nvlink_domain(candidate, spec.resources, profile)
    segment = requested_segment(candidate, spec.resources, profile)
    nodes = nodes.model_copy(update={"domain": domain, "segment": segment})
    placements = place_axes(layout, profile, nodes, domain)
    prediction = predict(request, candidate)
    certainty = certainty_of(request, candidate, prediction, memory)
    plan = Plan(
        run_name=spec.name,
        profile_name=profile.name,
        engine=spec.engine.name,
        accelerator=profile.accelerator,
        implementation=None if spec.engine.implementation == "auto" else spec.engine.implementation,
        layout=layout,
        layout_origin="auto" if spec.parallel == "auto" else "spec",
        nodes=nodes,
        batch=priced_split(request, candidate),
        recompute=candidate.mode,
        recompute_modules=candidate.modules,
        recompute_layers=(candidate.recompute_layers or None) if candidate.mode == "full" else None,
        activation_offload_layers=candidate.offloaded_layers,
        precision=spec.precision,
        fp8_recipe=request.fp8_recipe,
        zero=candidate.zero,
        shard_gpus=candidate.shard_gpus or None,
        offload=spec.optimizer.offload if candidate.offload else "none",
        padded_vocab=pad_vocab(model.vocab, layout.tp, counts.vocab_multiple),
        parameters=counts.parameters,
        learned_parameters=counts.trainable if spec.lora else None,
        stages=build_stages(
            model, layout, candidate.split, counts.vocab_multiple, counts.adapters_per_layer
        ),
        memory=memory,
        gpu_memory_bytes=int(profile.gpu.memory),
        placements=placements,
        step_seconds=prediction.parts.total_seconds if prediction else None,
        scattered_step_seconds=_scattered_seconds(request, candidate, nodes),
        prediction=prediction,
        certainty=certainty,
        unit="images" if model.reads_images else "tokens",
        search=found.counts,
        model_flops_per_step=counts.flops_per_step,
        reasons=(),
    )
    why = reasons(request, candidate, plan, rivals(found, row))
    remarks = (f"{remark}." for _, remark in profile_remarks(profile))
    known = (
        *island_warnings(nodes, profile),
        *untrainable(spec),
        *filter(None, (unknown_note(model),)),
        *remarks,
    )
    return plan.model_copy(
        update={
            "reasons": (*why, *ordered.reasons),
            "warnings": (*warnings(request, candidate, plan), *known),
        }
    )


# -- Hints: the layouts that fit and are nearest to a spec that does not --------------------------


def nearest_fits(
    request: PlanRequest, gpus: int | None = None, count: int = 3
) -> tuple[Candidate, ...]:
    """Find up to `count` layouts that leave memory to the allocator, the nearest first."""
    spec = request.spec
    freedom = hint_freedom(request, gpus or spec.resources.gpus)
    priced = search(request, freedom, timed=False)
    rows = np.flatnonzero(priced.roomy)
    distances = distance(spec, priced.columns.take(rows))
    nearest: dict[Layout, Candidate] = {}
    for row in rows[np.argsort(distances, kind="stable")]:
        candidate = priced.candidate(int(row))
        nearest.setdefault(candidate.layout, candidate)
        if len(nearest) == count:
            break
    return tuple(nearest.values())


def distance(spec: RunSpec, columns: Columns) -> Floats:
    """Compute how far candidates are from the spec, for ranking.

    A doubling of an axis counts 1, of the microbatch 0.5, a step of recomputation 0.6; among
    equals a small bubble and a large microbatch come first. Candidates without offload come
    before those with it.
    """
    total = np.zeros(len(columns))
    if spec.parallel != "auto":
        for name in ("tp", "pp", "vpp", "ep"):
            total += np.abs(np.log2(getattr(columns, name) / getattr(spec.parallel, name)))
    if spec.batch.micro != "auto":
        total += 0.5 * np.abs(np.log2(columns.micro_batch / spec.batch.micro))
    if spec.recompute != "auto":
        total += 0.6 * np.abs(columns.recompute - RECOMPUTES.index(spec.recompute))
    bubble = (columns.pp - 1) / (columns.vpp * columns.accumulation)
    tie_break = 0.1 * bubble + 0.01 * columns.recompute + 0.005 * columns.zero + 2 * columns.offload
    return np.asarray(total + tie_break - 0.001 * np.log2(columns.micro_batch), dtype=float)


def sizes_around(gpus: int, per_node: int, limit: int) -> tuple[int, ...]:
    """List other numbers of GPUs to try, up to `limit`, the nearest first, larger ones before.

    Whole nodes 1, 2, 4, ... away, or parts of one node; halves, doubles, and the limit.
    """
    if gpus < per_node:
        sizes = {*range(1, per_node), per_node}
    else:
        steps = [per_node << power for power in range(limit.bit_length())]
        sizes = {gpus - step for step in steps} | {gpus + step for step in steps}
        sizes |= {gpus >> power for power in range(1, gpus.bit_length())}
    sizes |= {gpus << power for power in range(1, limit.bit_length())} | {limit}
    possible = {n for n in sizes if 0 < n <= limit and n != gpus}
    whole = {n for n in possible if n <= per_node or n % per_node == 0}
    return tuple(sorted(whole, key=lambda n: (abs(n - gpus), -n)))


def fit_around(request: PlanRequest, sizes: Sequence[int]) -> Candidate | None:
    """Find a candidate on the first of `sizes` that has one; None if none has."""
    for gpus in sizes:
        fitting = nearest_fits(request, gpus, count=1)
        if fitting:
            return fitting[0]
    return None


def lighter_settings(request: PlanRequest) -> tuple[str, ...]:
    """Find the fewest settings of `engine.megatron` with which the spec's own layouts fit.

    Those of NVIDIA's recipes for 8 bits (Megatron-Bridge, training/mixed_precision.py): gradients
    in 16 bits, and with `precision: fp8` weights in 8 bits alone. Both change what is computed, so
    no plan chooses them. Empty where they do not help or do not exist.
    """
    spec, own = request.spec, request.spec.engine.megatron
    if spec.engine.abilities.model_classes != MEGATRON_CORE or spec.precision == "fp32":
        return ()
    known = [("grad_reduce_in_fp32", False)] if own.grad_reduce_in_fp32 else []
    sharded = spec.optimizer.zero != 0 and spec.optimizer.offload == "none"
    if spec.precision == "fp8" and sharded and not own.fp8_param_gather:
        known.append(("fp8_param_gather", True))
    for chosen in (*((one,) for one in known), tuple(known)):
        lighter = own.model_copy(update=dict(chosen))
        engine = spec.engine.model_copy(update=dict(megatron=lighter))
        changed = replace(request, spec=spec.model_copy(update={"engine": engine}))
        if chosen and search(changed, freedom_of(changed), timed=False).fits.any():
            return tuple(f"engine.megatron.{name}={str(on).lower()}" for name, on in chosen)
    return ()
