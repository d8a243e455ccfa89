"""Sentences about the plan of a service: why it is so, and why others are not.

Belongs here: words for figures that the planner has found. Does not belong here: the figures, the
columns of the command line (`hpctrain.serve.plan_text`).
"""

from __future__ import annotations

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.serve.plan.availability import ENGINE_START_SECONDS, OVERLAP_OF_LOAD, Outages
from hpctrain.serve.plan.candidates import ReplicaShape
from hpctrain.serve.plan.offers import Offer
from hpctrain.serve.plan.routing import Outcome
from hpctrain.serve.plan.search import Demand, Found, Verdict
from hpctrain.spec.profile import ClusterProfile

_MANY_TIMES = 2.0  # above which a multiple is read more easily than a percentage


def seconds_text(seconds: float) -> str:
    """Format a latency with three digits: `36.1 ms`, `378 ms`, `6.54 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else short_duration(seconds)


def replicas_of(verdict: Verdict) -> str:
    """`11 x H100-80GB SXM, tp 4, bf16 weights`"""
    return f"{verdict.count} x {verdict.bounded.shape}"


def failure(verdict: Verdict, demand: Demand) -> str:
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


def not_chosen(verdict: Verdict, chosen: Verdict) -> str:
    """Tell why a plan that holds is not the plan."""
    shape = verdict.bounded.shape
    if not shape.decided:
        fields = []
        if shape.precision != chosen.bounded.shape.precision:
            fields.append(f"engine.precision={shape.precision}")
        if shape.kv_precision != chosen.bounded.shape.kv_precision:
            fields.append(f"engine.kv_precision={shape.kv_precision}")
        settings = " ".join(f"--set {field}" for field in fields)
        return f"it holds, but fewer bits change the answers: decide by `{settings}`"
    return f"it holds, and costs {verdict.hourly / chosen.hourly - 1:.1%} more"


def count(chosen: Verdict, demand: Demand) -> str:
    """Tell where the number of replicas comes from."""
    replicas = f"{chosen.count} replica{'s' if chosen.count > 1 else ''}"
    if demand.count is not None:
        return f"{replicas}, as `replicas.count` says"
    least = chosen.bounded.least_replicas(demand)
    if least >= chosen.count:
        return f"{replicas}: as few as mean iterations without any queue allow"
    return f"{replicas}: means without any queue would allow {least}, the rest is for percentiles"


def caution(chosen: Verdict, demand: Demand) -> str:
    """Tell which limit is the nearest, and for which error there is room."""
    objective = chosen.objective
    return (
        f"{objective} is the nearest to its limit: {chosen.tightness:.0%} of "
        f"{seconds_text(objective.limit_seconds)}{_allowance(demand)}"
        + (", which 9 of 10 measured ones do not exceed" if _allowance(demand) else "")
    )


def iteration(chosen: Verdict, usual: Outcome) -> str:
    """Describe a replica at work."""
    limits = chosen.bounded.limits
    share = usual.most_kv_tokens / limits.kv_capacity_tokens
    mean = max(1.0, usual.requests_in_service / usual.replicas)
    text = (
        f"an iteration holds {limits.batch_tokens:,} tokens and {limits.max_sequences} sequences; "
        f"a replica has {mean:,.0f} requests at a time in the mean, and at most {share:.0%} of its "
        "memory for keys and values is in use"
    )
    return f"{text}; {usual.preemptions} sequences gave theirs up" if usual.preemptions else text


def spares(outages: Outages, replicas: int, spare: int, wanted: float) -> list[str]:
    """Tell how often replicas are away, and how many spares that takes."""
    together = ""
    if outages.replicas_per_node > 1:
        together = f"; up to {outages.replicas_per_node} of them are on one node and fail with it"
    plural = "s" if spare != 1 else ""
    away = f"{100 * outages.away_share:.2g}%"
    return [
        *outages.reasons,
        f"a replica is away {away} of the time: {spare} spare{plural} beside {replicas} for an "
        f"availability of {wanted:g}{together}",
    ]


def loading(profile: ClusterProfile, shape: ReplicaShape, load: float) -> str:
    """Tell what the load time is made of."""
    size = short_bytes(shape.weight_bytes * shape.gpus)
    return (
        f"loading takes about {short_duration(load)}: {size} from {profile.filesystems[0].name}, "
        f"then {ENGINE_START_SECONDS:.0f} s for the engine's own start (assumed; measured once the "
        "service has run)"
    )


def overlap(walltime: float, load: float) -> str:
    """Tell what successors before the time limit cost."""
    lasting = OVERLAP_OF_LOAD * load
    share = lasting / (walltime - lasting)
    return (
        f"jobs last {short_duration(walltime)}, and each successor begins "
        f"{short_duration(lasting)} before that: {share:.1%} more replica-hours"
    )


def day(by_table: float, all_day: float, offer: Offer) -> str:
    """Tell what the table of hours saves, in GPU-hours and money of a day."""
    saved = 1 - by_table / all_day
    text = f"by `replicas.hours` a day takes {by_table:,.0f} GPU-hours instead of {all_day:,.0f}"
    if offer.price is None or offer.currency is None:
        return f"{text} ({saved:.0%} fewer)"
    money = f"{by_table * offer.price:,.0f} {offer.currency}"
    return f"{text}: {money}, {saved:.0%} less"


def refusals(found: Found, demand: Demand) -> list[str]:
    """List why no shape keeps the objectives, those with the nearest miss first."""
    failing = sorted(found.failing, key=lambda one: one.tightness)
    lines = [f"{replicas_of(one)}: {failure(one, demand)}" for one in failing]
    refused = sorted(found.unusable, key=lambda one: one.tightness)
    lines += [f"{one.shape}: {one.reason}" for one in refused if one.shape.decided]
    return lines or ["the engine and this cluster leave no shape of a replica"]


def refusal_hint(demand: Demand, nearest: Verdict | None) -> str:
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
