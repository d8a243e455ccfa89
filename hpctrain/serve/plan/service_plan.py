"""Plan a service on one cluster, or refuse it with a reason for each way that was looked at.

Belongs here: the order of decisions, and the plan as a document, with words for
its figures. Does not belong here: arithmetic
(the other modules of this folder), the columns of the command line (`serve_text`), files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpctrain.base.errors import DoesNotFitError, LimitError, Refusal
from hpctrain.base.units import short_bytes, short_duration
from hpctrain.plan.limits import resource_problems
from hpctrain.serve.plan.availability import (
    ENGINE_START_SECONDS,
    OVERLAP_OF_LOAD,
    Drained,
    Outages,
    availability,
    drained,
    load_seconds,
    outages,
    overlap_share,
    shares_of_day,
    spares_for,
)
from hpctrain.serve.plan.candidates import EngineFacts, ModelFacts, ReplicaShape
from hpctrain.serve.plan.disaggregation import pools_sentence
from hpctrain.serve.plan.documents import (
    Alternative,
    Clarification,
    Promise,
    Reading,
    ReplicaPlan,
    ServicePlan,
    seconds_text,
)
from hpctrain.serve.plan.measured_speed import AS_PREDICTED
from hpctrain.serve.plan.promises import (
    ModelError,
    Objective,
    Simulated,
    objectives_of,
    promises,
)
from hpctrain.serve.plan.search import (
    Demand,
    Found,
    Verdict,
    confirmed,
    highest_rate,
    promised,
    search,
)
from hpctrain.serve.plan.serving_machine import Offer
from hpctrain.serve.plan.step_time import kv_bytes_per_token
from hpctrain.serve.plan.traffic import Trace, Traffic
from hpctrain.spec.profile import ClusterProfile, profile_remarks
from hpctrain.spec.service import LATENCY_NAMES, LatencyName, ServiceSpec

_MANY_TIMES = 2.0  # above which a multiple is read more easily than a percentage


@dataclass(frozen=True)
class ServiceRequest:
    """What to plan: the spec, the cluster as it is for its partition, the model and the engine.

    `trace` is the content of `traffic.trace`, `error` that of the cost model for this GPU and
    engine.
    """

    spec: ServiceSpec
    profile: ClusterProfile
    offer: Offer
    model: ModelFacts
    engine: EngineFacts
    error: ModelError
    trace: Trace | None = None
    seed: int = 0

    @cached_property
    def demand(self) -> Demand:
        spec = self.spec
        return Demand(
            rate=spec.traffic.rate,
            traffic=Traffic.of(spec.traffic, self.trace),
            objectives=objectives_of(spec.objectives),
            policy=spec.router.policy,
            error=self.error,
            count=None if spec.replicas.count == "auto" else spec.replicas.count,
            fewest=max(1, spec.replicas.min),
            price=self.hourly,
            seed=self.seed,
        )

    @property
    def walltime_seconds(self) -> float | None:
        """The time limit of one job: the spec's, else the least of the site's; None without."""
        resources, profile = self.spec.resources, self.profile
        partition = profile.slurm.partition(resources.partition)
        if resources.walltime is not None:
            return float(resources.walltime)
        limits = (partition.max_walltime if partition else None, profile.limits.max_walltime)
        return min((float(limit) for limit in limits if limit is not None), default=None)

    def load_seconds(self, shape: ReplicaShape) -> float:
        nodes = -(-shape.gpus // self.offer.per_node)
        size = shape.weight_bytes * shape.gpus
        return load_seconds(self.profile, size, nodes, self.spec.load_time)

    def outages(self, shape: ReplicaShape) -> Outages:
        return outages(
            self.profile,
            self.spec.resources.partition,
            gpus=shape.gpus,
            load=self.load_seconds(shape),
            drain=float(self.spec.drain.longest),
        )

    def spares(self, shape: ReplicaShape, replicas: int) -> int | None:
        return spares_for(self.outages(shape), replicas, self.spec.availability)

    def gpus_paid(self, shape: ReplicaShape, replicas: int) -> float:
        """Count GPUs that are paid for: with spares, and with successors beside predecessors."""
        spare = self.spares(shape, replicas)
        if spare is None:
            return math.inf
        overlap = overlap_share(self.walltime_seconds, self.load_seconds(shape))
        return (replicas + spare) * self.offer.billed_gpus(shape.gpus) * (1 + overlap)

    def hourly(self, shape: ReplicaShape, replicas: int) -> float:
        """Return what so many replicas cost per hour with their spares (GPUs without a price)."""
        price = self.offer.price
        return self.gpus_paid(shape, replicas) * (1.0 if price is None else price)


def plan_on_cluster(request: ServiceRequest) -> ServicePlan:
    """Plan a service on one cluster.

    Raises DoesNotFitError with a reason for each shape of a replica if none keeps the objectives,
    LimitError for what the site does not allow.
    """
    found = search(request.offer, request.model, request.engine, request.demand)
    nearest = max(found.failing, key=lambda one: one.hourly, default=None)
    chosen = found.best
    if chosen is None and request.demand.count is not None:
        chosen = min(found.failing, key=lambda one: one.tightness, default=None)
    if chosen is None and found.bounds:  # no number of replicas has a price
        shape = found.bounds[0].shape
        least = found.bounds[0].least_replicas(request.demand)
        raise LimitError(_job_problems(request, shape, least))
    if chosen is None:
        raise DoesNotFitError(
            [Refusal(line, "objectives") for line in _refusals(found, request.demand)],
            _refusal_hint(request.demand, nearest),
        )
    chosen, fewer, simulated = promised(*confirmed(chosen, request.demand), request.demand)
    shape = chosen.bounded.shape
    problems = resource_problems(request.spec.resources.of_replica(shape.gpus), request.profile)
    problems += _job_problems(request, shape, chosen.count)
    if problems:
        raise LimitError(problems)
    return _document(request, found, chosen, fewer, simulated)


def _job_problems(request: ServiceRequest, shape: ReplicaShape, replicas: int) -> list[Refusal]:
    """Compare the whole service with the site: spares, jobs in the queue, the time limit."""
    spare, limits = request.spares(shape, replicas), request.profile.limits
    if spare is None:
        away = request.outages(shape).away_share
        return [
            Refusal(
                f"no number of spares reaches an availability of {request.spec.availability:g}: a "
                f"replica is away {away:.0%} of the time",
                "availability",
            )
        ]
    problems, jobs = [], replicas + spare + 2  # the router, and a successor at a time
    gpus = (replicas + spare) * shape.gpus
    if gpus > request.offer.most_gpus:
        problems.append(
            Refusal(
                f"{replicas} replicas and {spare} spare of {shape.gpus} GPUs are {gpus} GPUs, and "
                f"{request.offer.most_gpus} are allowed",
                "resources.max_gpus",
            )
        )
    if limits.max_submit is not None and jobs > limits.max_submit:
        problems.append(
            Refusal(
                f"{replicas + spare} replicas with the router and a successor are {jobs} jobs, and "
                f"this site takes {limits.max_submit} of one user",
                "replicas",
            )
        )
    most = request.spec.replicas.max
    if most is not None and replicas + spare > most:
        problems.append(
            Refusal(
                f"{replicas} replicas and {spare} spare are more than `replicas.max` {most}",
                "replicas.max",
            )
        )
    load = request.load_seconds(shape)
    if math.isinf(overlap_share(request.walltime_seconds, load)):
        problems.append(
            Refusal(
                f"a job of {request.walltime_seconds:,.0f} s ends before its successor is ready: "
                f"loading takes {load:,.0f} s",
                "resources.walltime",
            )
        )
    return problems


def _document(
    request: ServiceRequest,
    found: Found,
    chosen: Verdict,
    fewer: Verdict | None,
    simulated: Simulated,
) -> ServicePlan:
    """Write the plan down, with what it promises and what else there is."""
    demand, shape = request.demand, chosen.bounded.shape
    kept = promises(simulated, demand.objectives)
    spare = request.spares(shape, chosen.count)
    assert spare is not None, "the plan was refused"
    drain = drained(
        request.profile,
        request.spec.resources.partition,
        request.spec.drain,
        replica_rate=demand.rate / chosen.count,
        e2e_seconds=simulated.cautious.e2e_seconds,
    )
    priced = request.offer.price is not None
    cost = request.hourly(shape, chosen.count) if priced else None
    tokens = demand.rate * demand.traffic.mean_output_tokens * 3600
    up = availability(request.outages(shape), chosen.count, chosen.count + spare)
    return ServicePlan(
        profile=request.profile.name,
        replica=replica_plan(request, chosen),
        replicas=chosen.count,
        spare=spare,
        rate=demand.rate,
        capacity_rate=highest_rate(chosen, demand),
        availability=up,
        promises=kept,
        currency=request.offer.currency,
        cost_per_hour=cost,
        cost_per_million_output_tokens=None if cost is None else cost / tokens * 1e6,
        load_seconds=request.load_seconds(shape),
        drain_seconds=drain.seconds,
        lost_per_preemption=drain.lost_requests,
        gpu_hours_per_hour=request.gpus_paid(shape, chosen.count),
        alternatives=_alternatives(request, found, chosen, fewer),
        reasons=_reasons(request, chosen, simulated, spare),
        warnings=_warnings(request, chosen, kept, drain),
    )


def replica_plan(request: ServiceRequest, chosen: Verdict) -> ReplicaPlan:
    """Describe one replica, and the memory of one of its GPUs."""
    shape, limits = chosen.bounded.shape, chosen.bounded.limits
    given, needed = request.spec.engine.max_length, request.demand.traffic.longest_tokens
    return ReplicaPlan(
        engine=request.spec.engine.name,
        gpu=request.offer.gpu.name,
        gpus=shape.gpus,
        nodes=-(-shape.gpus // request.offer.per_node),
        tp=shape.tp,
        pp=shape.pp,
        precision=shape.precision,
        kv_precision=shape.kv_precision,
        max_sequences=limits.max_sequences,
        batch_tokens=limits.batch_tokens,
        max_length=min(request.model.longest_tokens, needed) if given == "auto" else given,
        weight_bytes=shape.weight_bytes,
        activation_bytes=shape.activation_bytes(limits.batch_tokens, limits.max_sequences),
        overhead_bytes=float(request.engine.constants.overhead_bytes),
        kv_bytes_per_token=float(kv_bytes_per_token(shape.served, shape.layout)),
        kv_capacity_tokens=int(limits.kv_capacity_tokens),
        gpu_memory_bytes=float(request.offer.gpu.memory),
    )


def _alternatives(
    request: ServiceRequest, found: Found, chosen: Verdict, fewer: Verdict | None
) -> tuple[Alternative, ...]:
    """List what else was looked at: the next cheaper plan first, then by cost."""
    demand, priced, shape = request.demand, request.offer.price is not None, chosen.bounded.shape
    listed: list[tuple[float, Alternative]] = []

    def add(cost: float, summary: str, holds: bool, reason: str) -> None:
        money = cost if priced and math.isfinite(cost) else None
        listed.append(
            (cost, Alternative(summary=summary, cost_per_hour=money, holds=holds, reason=reason))
        )

    failing = [one for one in found.failing if one.bounded.shape is not shape]
    same = [one for one in found.failing if one.bounded.shape is shape and not one.holds]
    failing += [fewer or same[0]] if same else []
    for one in failing:
        if one.count != chosen.count or one.bounded.shape is not shape:
            add(one.hourly, _replicas_of(one), False, _failure(one, demand))
    for one in found.others:
        reason = f"it holds, and costs {one.hourly / chosen.hourly - 1:.1%} more"
        other = one.bounded.shape
        if not other.decided:
            fields = []
            if other.precision != shape.precision:
                fields.append(f"--set engine.precision={other.precision}")
            if other.kv_precision != shape.kv_precision:
                fields.append(f"--set engine.kv_precision={other.kv_precision}")
            reason = "it holds, but fewer bits change the answers: decide by "
            reason += f"`{' '.join(fields)}`"
        add(one.hourly, _replicas_of(one), True, reason)
    for bounded in found.bounds:
        least = bounded.least_replicas(demand)
        reason = "no cheaper, even with as few as means allow"
        cost = demand.price(bounded.shape, least)
        add(cost, f"at least {least} x {bounded.shape}", False, reason)
    listed.sort(key=lambda one: one[0])
    cheaper = [one for cost, one in reversed(listed) if cost < chosen.hourly]
    dearer = [one for cost, one in listed if cost >= chosen.hourly]
    impossible = [
        Alternative(summary=str(one.shape), cost_per_hour=None, holds=False, reason=one.reason)
        for one in found.unusable
        if one.shape.decided
    ]
    return (*cheaper, *dearer, *impossible)


def _reasons(
    request: ServiceRequest, chosen: Verdict, simulated: Simulated, spare: int
) -> tuple[str, ...]:
    """Say why the plan is so, one sentence for each decision."""
    demand, shape, limits = request.demand, chosen.bounded.shape, chosen.bounded.limits
    outages, load = request.outages(shape), request.load_seconds(shape)
    usual, profile = simulated.usual, request.profile

    count = f"{chosen.count} replica{'s' if chosen.count > 1 else ''}"
    least = chosen.bounded.least_replicas(demand)
    if demand.count is not None:
        count += ", as `replicas.count` says"
    elif least >= chosen.count:
        count += ": as few as mean iterations without any queue allow"
    else:
        count += f": means without any queue would allow {least}, the rest is for percentiles"

    share = usual.most_kv_tokens / limits.kv_capacity_tokens
    mean = max(1.0, usual.requests_in_service / usual.replicas)
    iteration = (
        f"an iteration holds {limits.batch_tokens:,} tokens and {limits.max_sequences} sequences; "
        f"a replica has {mean:,.0f} requests at a time in the mean, and at most {share:.0%} of its "
        "memory for keys and values is in use"
    )
    if usual.preemptions:
        iteration += f"; {usual.preemptions} sequences gave theirs up"

    together = ""
    if outages.replicas_per_node > 1:
        together = f"; up to {outages.replicas_per_node} of them are on one node and fail with it"
    found = [
        count,
        _caution(chosen, demand),
        iteration,
        *outages.reasons,
        f"a replica is away {100 * outages.away_share:.2g}% of the time: {spare} "
        f"spare{'s' if spare != 1 else ''} beside {chosen.count} for an availability of "
        f"{request.spec.availability:g}{together}",
    ]
    if spec_load := request.spec.load_time:
        found.append(f"loading takes {float(spec_load):,.0f} s (`load_time`)")
    else:
        size = short_bytes(shape.weight_bytes * shape.gpus)
        found.append(
            f"loading takes about {short_duration(load)}: {size} from "
            f"{profile.filesystems[0].name}, then {ENGINE_START_SECONDS:.0f} s for the engine's "
            "own start (assumed; measured once the service has run)"
        )
    walltime = request.walltime_seconds
    if walltime is not None:
        lasting = OVERLAP_OF_LOAD * load
        found.append(
            f"jobs last {short_duration(walltime)}, and each successor begins "
            f"{short_duration(lasting)} before that: {lasting / (walltime - lasting):.1%} more "
            "replica-hours"
        )
    if request.spec.replicas.hours:
        found.append(_daily(request, chosen, spare))
    found.append(pools_sentence(chosen, demand))
    return tuple(found)


def _daily(request: ServiceRequest, chosen: Verdict, spare: int) -> str:
    """Compare a day by the table of hours with a day of the busiest hour."""
    offer, fewest = request.offer, request.spec.replicas.min
    replica_hours = sum(
        lasting * max(fewest, math.ceil(share * chosen.count) + (spare if share else 0))
        for lasting, share in shares_of_day(request.spec.replicas.hours)
    )
    gpus = offer.billed_gpus(chosen.bounded.shape.gpus)
    by_table, all_day = replica_hours * gpus, 24 * (chosen.count + spare) * gpus
    saved = 1 - by_table / all_day
    text = f"by `replicas.hours` a day takes {by_table:,.0f} GPU-hours instead of {all_day:,.0f}"
    if offer.price is None or offer.currency is None:
        return f"{text} ({saved:.0%} fewer)"
    return f"{text}: {by_table * offer.price:,.0f} {offer.currency}, {saved:.0%} less"


def _warnings(
    request: ServiceRequest, chosen: Verdict, kept: Sequence[Promise], drain: Drained
) -> tuple[str, ...]:
    found = [remark for _, remark in profile_remarks(request.profile)]
    if drain.warning is not None:
        found.append(drain.warning)
    if request.profile.gpu.emulated and request.engine.speed == AS_PREDICTED:
        found.append(
            "GPUs are emulated: how fast processors are in their place is guessed until "
            "`hpctrain calibrate` has read what the service measured"
        )
    given, needed = request.spec.engine.max_length, request.demand.traffic.longest_tokens
    longest = min(request.model.longest_tokens, given if given != "auto" else math.inf)
    if needed > longest:
        found.append(
            f"requests of up to {needed:,} tokens are drawn from `traffic`, and the model takes "
            f"{longest:,.0f}: longer ones are refused by the engine"
        )
    broken = [one for one in kept if not one.holds]
    if broken:
        names = ", ".join(f"{one.percentile} of {one.latency}" for one in broken)
        found.append(f"with {chosen.count} replicas {names} will not hold")
    return tuple(found)


def clarify(request: ServiceRequest) -> Clarification:
    """Plan each reading of a limit that does not say of which latency, and compare the prices."""
    limit = request.spec.objectives.p99
    assert limit is not None, "there is a limit without a latency"
    return Clarification(
        profile=request.profile.name,
        limit_seconds=float(limit),
        currency=request.offer.currency,
        readings=tuple(_reading(request, name, float(limit)) for name in LATENCY_NAMES),
    )


def _reading(request: ServiceRequest, name: LatencyName, limit: float) -> Reading:
    objectives = (*request.demand.objectives, Objective(name, "p99", limit))
    demand = replace(request.demand, objectives=objectives)
    found = search(request.offer, request.model, request.engine, demand)
    if found.best is None:
        return Reading(
            latency=name,
            summary="cannot be kept",
            cost_per_hour=None,
            holds=False,
            reason=_refusals(found, demand)[0],
        )
    best, _ = confirmed(found.best, demand)
    return Reading(
        latency=name,
        summary=_replicas_of(best),
        cost_per_hour=best.hourly if request.offer.price is not None else None,
        holds=True,
        reason=_caution(best, demand),
    )


# -- sentences: why a plan is so, and why others are not ------------------------------------------


def _replicas_of(verdict: Verdict) -> str:
    """`11 x H100-80GB SXM, tp 4, bf16 weights`"""
    return f"{verdict.count} x {verdict.bounded.shape}"


def _failure(verdict: Verdict, demand: Demand) -> str:
    """Tell which limit a plan breaks, and by how much."""
    objective = verdict.objective
    if verdict.tightness == float("inf"):
        return f"requests come faster than they are answered, so {objective} grows without end"
    reached = seconds_text(verdict.tightness * objective.limit_seconds)
    limit = seconds_text(objective.limit_seconds)
    over = f"{verdict.tightness - 1:.1%} above its limit of {limit}"
    if verdict.tightness >= _MANY_TIMES:
        over = f"{verdict.tightness:.1f} times its limit of {limit}"
    return f"{objective} would be {reached}{_allowance(demand)}, {over}"


def _allowance(demand: Demand) -> str:
    slower = demand.error.cautious - 1
    return f" with iterations {slower:.0%} slower than predicted" if slower >= 0.005 else ""


def _caution(chosen: Verdict, demand: Demand) -> str:
    """Tell which limit is the nearest, and for which error there is room."""
    objective = chosen.objective
    return (
        f"{objective} is the nearest to its limit: {chosen.tightness:.0%} of "
        f"{seconds_text(objective.limit_seconds)}{_allowance(demand)}"
        + (", which 9 of 10 measured ones do not exceed" if _allowance(demand) else "")
    )


def _refusals(found: Found, demand: Demand) -> list[str]:
    """List why no shape keeps the objectives, those with the nearest miss first."""
    failing = sorted(found.failing, key=lambda one: one.tightness)
    lines = [f"{_replicas_of(one)}: {_failure(one, demand)}" for one in failing]
    refused = sorted(found.unusable, key=lambda one: one.tightness)
    lines += [f"{one.shape}: {one.reason}" for one in refused if one.shape.decided]
    return lines or ["the engine and this cluster leave no shape of a replica"]


def _refusal_hint(demand: Demand, nearest: Verdict | None) -> str:
    """Say what would help."""
    ends = [one for one in demand.objectives if one.latency == "e2e"]
    if ends:
        tokens = demand.traffic.mean_output_tokens
        return (
            f"e2e includes {tokens:,.0f} tokens of the answer: limits of ttft and tpot are what "
            "streaming clients notice (MLPerf's interactive scenario: 450 ms and 40 ms)"
        )
    if nearest is None:
        return "a higher limit, shorter requests, faster or more GPUs"
    reached = nearest.tightness * nearest.objective.limit_seconds * 1.02
    return f"a limit of {seconds_text(reached)} for {nearest.objective} would hold"
