"""Search for the replicas that keep the objectives of a service at the least cost.

First every shape is bounded by its means, which needs no simulation. Then shapes are
simulated in the order of their least possible cost, until that is above the cost of one that holds.

Belongs here: these bounds, the order in which candidates are looked at, and how many replicas one
needs. Does not belong here: which candidates there are (`candidates`), the plan as a document
(`service_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from hpctrain.serve.plan.batching import BLOCK_TOKENS, BatchLimits
from hpctrain.serve.plan.candidates import (
    MOST_SEQUENCES,
    EngineFacts,
    ModelFacts,
    ReplicaShape,
    Unusable,
    replica_shapes,
    unusable,
)
from hpctrain.serve.plan.promises import (
    EXACT,
    ModelError,
    Objective,
    Simulated,
    promises,
    tightness,
)
from hpctrain.serve.plan.routing import Outcome, Policy, SimulatedService, Window, simulate_open
from hpctrain.serve.plan.serving_machine import Offer
from hpctrain.serve.plan.step_time import IterationTable
from hpctrain.serve.plan.traffic import Floats, Requests, Traffic, draw_requests

# -- Bound what one replica can do from means, without simulating a request ---------------------


_BISECTIONS, _ROUNDS = 10, 25


@dataclass(frozen=True)
class MeanTraffic:
    """Means of requests, and what shares of them do not exceed, in tokens.

    `prompt_tokens` are those that are computed; `shared_tokens` come from the prefix cache.
    """

    prompt_tokens: float
    shared_tokens: float
    output_tokens: float
    context_tokens: float  # of a sequence in the middle of its answer
    prompts: Floats  # sorted
    outputs: Floats  # sorted

    @classmethod
    def of(cls, requests: Requests, *, shares_prefixes: bool) -> MeanTraffic:
        prompts = requests.prompt_tokens.astype(float)
        outputs = requests.output_tokens.astype(float)
        shared = float(requests.shared_prefix_tokens if shares_prefixes else 0)
        own = (prompts - shared).clip(1)
        # a long answer is there for longer than a short one: mean over iterations
        context = float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
        prompts.sort()
        outputs.sort()
        return cls(
            prompt_tokens=float(own.mean()),
            shared_tokens=shared,
            output_tokens=float(outputs.mean()),
            context_tokens=context,
            prompts=prompts,
            outputs=outputs,
        )

    def prompt_at(self, share: float) -> float:
        return max(
            1.0, float(self.prompts[int(share * (len(self.prompts) - 1))]) - self.shared_tokens
        )

    def output_at(self, share: float) -> float:
        return float(self.outputs[int(share * (len(self.outputs) - 1))])


@dataclass(frozen=True)
class SteadyBatch:
    """The mean iteration at a rate of requests per replica."""

    iteration_seconds: float
    sequences: float


def alone(
    table: IterationTable, traffic: MeanTraffic, batch_tokens: int, objective: Objective
) -> float:
    """Return the seconds of a latency without any other request, at its percentile."""
    prompt = traffic.prompt_at(objective.share)
    shared = traffic.shared_tokens
    if objective.latency == "tpot":
        return table.seconds(0, 0.0, 1, traffic.context_tokens)
    first = _prompt_seconds(table, prompt, shared, batch_tokens, 0, 0.0)
    if objective.latency == "ttft":
        return first
    usual = _prompt_seconds(table, traffic.prompt_at(0.5), shared, batch_tokens, 0, 0.0)
    each = table.seconds(0, 0.0, 1, traffic.context_tokens)
    return usual + (traffic.output_at(objective.share) - 1) * each


def most_rate(
    table: IterationTable,
    limits: BatchLimits,
    traffic: MeanTraffic,
    objectives: Sequence[Objective],
    request_seconds: float,
) -> float:
    """Return the requests per second of one replica up to which its mean iteration keeps limits.

    By bisection; 0 where a single request is too slow.
    """

    def possible(rate: float) -> bool:
        batch = steady_batch(table, limits, traffic, rate)
        if batch is None:
            return False
        return all(
            _mean_keeps(table, limits, traffic, batch, one, request_seconds) for one in objectives
        )

    low, high = 1e-6, 1e-6
    if not possible(low):
        return 0.0
    while possible(high) and high < 1e6:
        low, high = high, high * 8
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def steady_batch(
    table: IterationTable, limits: BatchLimits, traffic: MeanTraffic, rate: float
) -> SteadyBatch | None:
    """Find the mean iteration at a rate; None where a replica does not keep up with it.

    In t seconds rate x t requests come: so many prompts have to be computed, and by Little's law
    rate x t x output tokens sequences decode. Prompts come in chunks of whole ones, up to the
    budget, and the other iterations have none.
    """
    most = limits.max_sequences
    held = min(float(most), limits.kv_capacity_tokens / traffic.context_tokens)
    seconds, sequences = table.seconds(0, 0.0, 1, traffic.context_tokens), 1.0
    for _ in range(_ROUNDS):
        before = seconds
        sequences = max(1.0, rate * seconds * (traffic.output_tokens - 1))
        prompt_tokens = rate * seconds * traffic.prompt_tokens
        if sequences > held or prompt_tokens + sequences > limits.batch_tokens:
            return None
        count = int(sequences)
        keys = sequences * traffic.context_tokens
        chunk = int(max(1, min(limits.batch_tokens - count, traffic.prompt_tokens)))
        share = prompt_tokens / chunk
        if share > 1:
            chunk, share = int(min(limits.batch_tokens - count, prompt_tokens)), 1.0
        pairs = chunk * (traffic.shared_tokens + traffic.prompt_tokens / 2)
        mixed = table.seconds(chunk, pairs, count, keys)
        seconds = share * mixed + (1 - share) * table.seconds(0, 0.0, count, keys)
        if abs(seconds - before) < 1e-4 * seconds:
            break
    return SteadyBatch(seconds, sequences)


def _mean_keeps(
    table: IterationTable,
    limits: BatchLimits,
    traffic: MeanTraffic,
    batch: SteadyBatch,
    objective: Objective,
    request_seconds: float,
) -> bool:
    """Whether the mean iteration leaves an objective possible."""
    if objective.latency == "tpot":
        return batch.iteration_seconds <= objective.limit_seconds
    keys = batch.sequences * traffic.context_tokens
    share = objective.share if objective.latency == "ttft" else 0.5
    first = request_seconds + _prompt_seconds(
        table,
        traffic.prompt_at(share),
        traffic.shared_tokens,
        limits.batch_tokens,
        int(batch.sequences),
        keys,
    )
    if objective.latency == "e2e":
        first += (traffic.output_at(objective.share) - 1) * batch.iteration_seconds
    return first <= objective.limit_seconds


def _prompt_seconds(
    table: IterationTable,
    tokens: float,
    shared: float,
    batch_tokens: int,
    sequences: int,
    keys: float,
) -> float:
    """Price a prompt that is computed beside decoding sequences, in chunks."""
    room = max(1, batch_tokens - sequences)
    whole, rest = divmod(max(1, int(tokens)), room)
    pairs = room * (shared + tokens / 2)
    seconds = whole * table.seconds(room, pairs, sequences, keys)
    if rest:
        seconds += table.seconds(rest, rest * (shared + tokens - rest / 2), sequences, keys)
    return seconds


# ----------------------------------------------------------------------------------------------


# Requests of a first look, of a second one where the first is near the limit, and of the plan.
FIRST_LOOK, SECOND_LOOK, LAST_LOOK = 500, 1500, 3600
RATE_LOOK = 1000  # requests for each rate that is tried
_NEAR_LOW, _NEAR_HIGH = 0.8, 1.2  # seconds over limit between which a second look is worth it
# Replicas that are simulated at most, and requests for each: with more replicas waits are shorter,
# because the router has a choice, and each has to be filled before anything is counted.
_MOST_SIMULATED, _REQUESTS_EACH = 12, 100
_MOST_TIMES = 4  # as many replicas as the bound says, above which a shape is given up
_WARM_UP, _COOL_DOWN = 0.1, 0.2
_MOST_ADDED = 3  # replicas after the last look, where another simulation breaks a limit
_HALVINGS = 3  # of the rate up to which objectives hold


Price: TypeAlias = Callable[[ReplicaShape, int], float]


def bare_price(shape: ReplicaShape, replicas: int) -> float:
    """Return what replicas cost per hour without spares."""
    return replicas * shape.hourly


@dataclass(frozen=True)
class Demand:
    """What has to be carried, and how: requests per second, their lengths, limits, the router.

    `count`: as many replicas as a person has decided; None: as few as it takes. At least `fewest`.
    `price`: what so many replicas of a shape cost per hour, with what they need beside them.
    """

    rate: float
    traffic: Traffic
    objectives: tuple[Objective, ...]
    policy: Policy = "least_loaded"
    error: ModelError = EXACT
    count: int | None = None
    fewest: int = 1
    price: Price = bare_price
    seed: int = 0

    @cached_property
    def requests(self) -> Requests:
        """The requests of the longest simulation; shorter ones have the first of them."""
        return draw_requests(self.traffic, LAST_LOOK, self.seed)


@dataclass(frozen=True)
class Bounded:
    """A usable shape with a budget of tokens, and its bound: requests per second of one replica."""

    shape: ReplicaShape
    limits: BatchLimits
    tables: Tables
    rate: float
    sequences: float

    def least_replicas(self, demand: Demand) -> int:
        if demand.count is not None:
            return demand.count
        return max(demand.fewest, math.ceil(demand.rate / self.rate))


@dataclass(frozen=True)
class Tables:
    """Seconds of iterations of one shape: as predicted, and as slow as a plan has to allow for."""

    usual: IterationTable
    cautious: IterationTable
    traffic: MeanTraffic


@dataclass(frozen=True)
class Verdict:
    """What a simulation of `count` replicas says: seconds over limit of the tightest objective."""

    bounded: Bounded
    count: int
    tightness: float
    objective: Objective
    hourly: float
    outcome: Outcome

    @property
    def holds(self) -> bool:
        return self.tightness <= 1


@dataclass(frozen=True)
class Found:
    """The result for one offer; `best` is None where nothing holds.

    `failing`: the nearest that does not hold, of each shape that was simulated and is cheaper than
    the best; `others`: of each other shape what holds; `bounds`: of shapes that were not simulated,
    because even their least number of replicas is no cheaper.
    """

    best: Verdict | None
    failing: tuple[Verdict, ...]
    others: tuple[Verdict, ...]
    bounds: tuple[Bounded, ...]
    unusable: tuple[Unusable, ...]


def search(offer: Offer, model: ModelFacts, engine: EngineFacts, demand: Demand) -> Found:
    """Find the cheapest replicas on one offer, among those that the spec has decided.

    Shapes that nobody has decided on (fewer bits) are looked at where they might be cheaper.
    """
    bounded, refused = bound(offer, model, engine, demand)

    def least_cost(one: Bounded) -> float:
        return demand.price(one.shape, one.least_replicas(demand))

    # cheapest first; among equals the one with the least load at its number of replicas
    ordered = sorted(
        bounded,
        key=lambda one: (
            least_cost(one[0]),
            demand.rate / (one[0].least_replicas(demand) * one[0].rate),
        ),
    )
    best: Verdict | None = None
    failing: list[Verdict] = []
    others: list[Verdict] = []
    unseen: list[Bounded] = []
    for decided in (True, False):
        for choices in ordered:
            if choices[0].shape.decided != decided:
                continue
            most = math.inf if best is None else best.hourly
            if least_cost(choices[0]) >= most:
                unseen.append(choices[0])
                continue
            holding, below = smallest(choices, demand, most)
            failing += [below] if below is not None else []
            if holding is None:
                continue
            if not decided:
                others.append(holding)
                break
            if best is not None:
                others.append(best)
            best = holding
    return Found(best, tuple(failing), tuple(others), tuple(unseen), tuple(refused))


def bound(
    offer: Offer, model: ModelFacts, engine: EngineFacts, demand: Demand
) -> tuple[list[tuple[Bounded, ...]], list[Unusable]]:
    """Bound all shapes: for each usable one its budgets of tokens, the best bound first.

    A pipeline is looked at only where one stage fewer does not fit.
    """
    requests = demand.requests
    traffic = MeanTraffic.of(requests, shares_prefixes=engine.shares_prefixes)
    mean = demand.traffic.mean_prompt_tokens + demand.traffic.mean_output_tokens
    given = engine.spec.max_length  # engines do not start where one such request does not fit
    longest = int((requests.prompt_tokens + requests.output_tokens).max())
    longest = longest if given == "auto" else given
    usable: set[tuple[str, str, int]] = set()
    bounded: list[tuple[Bounded, ...]] = []
    refused: list[Unusable] = []
    for shape in replica_shapes(offer, model, engine):
        formats = (shape.precision, shape.kv_precision, shape.tp)
        if shape.pp > 1 and formats in usable and engine.spec.pp == "auto":
            continue
        reason = unusable(shape, longest, mean)
        if reason is not None:
            refused.append(Unusable(shape, reason))
            continue
        usable.add(formats)
        choices = _bounded(shape, demand, traffic, mean, longest)
        if isinstance(choices, Unusable):
            refused.append(choices)
        else:
            bounded.append(choices)
    return bounded, refused


def _bounded(
    shape: ReplicaShape, demand: Demand, traffic: MeanTraffic, mean: float, longest: int
) -> tuple[Bounded, ...] | Unusable:
    """Bound one shape with each budget of tokens, or tell why it is too slow or too large."""
    usual = shape.table(traffic.context_tokens)
    tables = Tables(usual, usual.slower(demand.error.cautious), traffic)
    seconds = shape.engine.request_seconds(traffic.prompt_tokens)
    for objective in demand.objectives:
        least = alone(tables.cautious, traffic, max(shape.batch_choices), objective)
        if objective.latency != "tpot":
            least += seconds
        limit = objective.limit_seconds
        if least > limit:
            reason = (
                f"even without other requests {objective} is {least * 1e3:,.3g} ms, the limit is "
                f"{limit * 1e3:,.3g} ms"
            )
            return Unusable(shape, reason, least / limit)
    found = []
    for batch_tokens in shape.batch_choices:
        widest = shape.limits(batch_tokens, MOST_SEQUENCES, mean)
        if widest.kv_capacity_tokens < longest + BLOCK_TOKENS + traffic.shared_tokens:
            continue  # activations of so many tokens leave too little
        rate = most_rate(tables.cautious, widest, traffic, demand.objectives, seconds)
        batch = steady_batch(tables.cautious, widest, traffic, rate) if rate > 0 else None
        if batch is not None:
            limits = shape.limits(batch_tokens, batch.sequences, mean)
            found.append(Bounded(shape, limits, tables, rate, batch.sequences))
    if not found:
        return Unusable(shape, "even a request now and then is too slow", 1.0)
    found.sort(key=lambda one: -one.rate)
    least_replicas = found[0].least_replicas(demand)
    needed = least_replicas * shape.gpus
    if needed > shape.offer.most_gpus:
        reason = f"{least_replicas} replicas are {needed} GPUs, there are {shape.offer.most_gpus}"
        return Unusable(shape, reason, needed / shape.offer.most_gpus)
    return tuple(found)


def smallest(
    choices: Sequence[Bounded], demand: Demand, below_cost: float = math.inf
) -> tuple[Verdict | None, Verdict | None]:
    """Find the least number of replicas of one shape that holds, and the most that does not.

    The budget of tokens is chosen at the bound. Steps grow until it holds, and are halved then.
    """
    shape = choices[0].shape
    most = shape.offer.most_gpus // shape.gpus
    bounded = _best_budget(choices, demand)
    verdict = judge(bounded, bounded.least_replicas(demand), demand)
    first = verdict.count
    if demand.count is not None:
        return (verdict, None) if verdict.holds else (None, verdict)
    if verdict.holds:
        return verdict, judge(bounded, first - 1, demand) if first > demand.fewest else None
    most = min(most, _MOST_TIMES * first + 2)
    failing, holding, step = verdict, None, max(1, first // 8)
    while failing.count < most:
        count = min(most, failing.count + step)
        if demand.price(shape, count) >= below_cost:
            return None, failing
        tried = judge(bounded, count, demand)
        if tried.holds:
            holding = tried
            break
        failing, step = tried, step * 2
    while holding is not None and holding.count - failing.count > 1:
        tried = judge(bounded, (holding.count + failing.count) // 2, demand)
        holding, failing = (tried, failing) if tried.holds else (holding, tried)
    return holding, failing


def _best_budget(choices: Sequence[Bounded], demand: Demand) -> Bounded:
    """Choose the budget of tokens whose tightest objective is the least tight at first sight.

    Small budgets keep decoding even, large ones compute prompts at once: in between lies the best
    one, which is found by going up or down from the middle.
    """
    least = min(one.least_replicas(demand) for one in choices)
    by_tokens = sorted(choices, key=lambda one: one.limits.batch_tokens)
    place = min(range(len(by_tokens)), key=lambda i: abs(by_tokens[i].limits.batch_tokens - 2048))
    if len(by_tokens) == 1:
        return by_tokens[0]
    best = _glance(by_tokens[place], least, demand, FIRST_LOOK)
    for direction in (1, -1):
        moved = False
        while 0 <= place + direction < len(by_tokens):
            tried = _glance(by_tokens[place + direction], least, demand, FIRST_LOOK)
            if tried.tightness >= best.tightness * 0.995:
                break
            best, place, moved = tried, place + direction, True
        if moved:
            break
    return best.bounded


def judge(bounded: Bounded, count: int, demand: Demand) -> Verdict:
    """Simulate `count` replicas with cautious iterations; longer where the first look is near."""
    verdict = _glance(bounded, count, demand, FIRST_LOOK)
    if _NEAR_LOW < verdict.tightness < _NEAR_HIGH:
        verdict = _glance(bounded, count, demand, SECOND_LOOK)
    return verdict


def _glance(bounded: Bounded, count: int, demand: Demand, requests: int) -> Verdict:
    outcome = simulated(bounded, bounded.tables.cautious, count, demand, requests)
    worst, objective = tightness(outcome, demand.objectives)
    return Verdict(bounded, count, worst, objective, demand.price(bounded.shape, count), outcome)


def simulated(
    bounded: Bounded,
    table: IterationTable,
    count: int,
    demand: Demand,
    requests: int,
    *,
    patient: bool = False,
) -> Outcome:
    """Simulate some of `count` replicas under their share of the requests."""
    shown = min(count, _MOST_SIMULATED, max(1, requests // _REQUESTS_EACH))
    engine = bounded.shape.engine
    service = SimulatedService(
        table,
        bounded.limits,
        shown,
        demand.policy,
        engine.request_seconds(bounded.tables.traffic.prompt_tokens),
    )
    sent = demand.requests.first(requests)
    if not engine.shares_prefixes:
        sent = replace(sent, shared_prefix_tokens=0)
    per_replica = demand.rate / count
    batch = steady_batch(table, bounded.limits, bounded.tables.traffic, per_replica)
    begun = bounded.limits.max_sequences if batch is None else math.ceil(batch.sequences)
    held = bounded.limits.kv_capacity_tokens / bounded.tables.traffic.context_tokens
    return simulate_open(
        service,
        sent,
        per_replica * shown,
        Window(_WARM_UP, _COOL_DOWN, begun=min(begun, int(0.9 * held))),
        seed=demand.seed,
        patient=patient,
    )


def confirmed(verdict: Verdict, demand: Demand) -> tuple[Verdict, Verdict | None]:
    """Look longer: one replica more where it does not hold, one fewer where that holds as well.

    Returns the plan, and one replica fewer where that was looked at and does not hold.
    """
    shape = verdict.bounded.shape
    most = shape.offer.most_gpus // shape.gpus
    looked: dict[int, Verdict] = {}

    def look(count: int) -> Verdict:
        if count not in looked:
            looked[count] = _glance(verdict.bounded, count, demand, LAST_LOOK)
        return looked[count]

    count = verdict.count
    if demand.count is not None:
        return look(count), None
    while not look(count).holds and count < most:
        count += 1
    while count > demand.fewest and look(count).holds and look(count - 1).holds:
        count -= 1
    return look(count), looked.get(count - 1)


def promised(
    verdict: Verdict, fewer: Verdict | None, demand: Demand
) -> tuple[Verdict, Verdict | None, Simulated]:
    """Simulate a plan with its errors, with one replica more while that shows a limit broken.

    A percentile of a simulation has chance in it: what one look has kept another one may break.
    """
    simulated, shape = with_errors(verdict, demand), verdict.bounded.shape
    most = shape.offer.most_gpus // shape.gpus
    for _ in range(_MOST_ADDED):
        kept = all(one.holds for one in promises(simulated, demand.objectives))
        if kept or demand.count is not None or verdict.count >= most:
            break
        fewer, verdict = verdict, _glance(verdict.bounded, verdict.count + 1, demand, LAST_LOOK)
        simulated = with_errors(verdict, demand)
    return verdict, fewer, simulated


def with_errors(verdict: Verdict, demand: Demand) -> Simulated:
    """Simulate a plan with iterations as predicted, cautious, slow and fast."""
    bounded, usual = verdict.bounded, verdict.bounded.tables.usual

    def outcome(table: IterationTable, requests: int) -> Outcome:
        return simulated(bounded, table, verdict.count, demand, requests, patient=True)

    cautious = verdict.outcome
    if not math.isfinite(float(cautious.e2e_seconds.max())):
        cautious = outcome(bounded.tables.cautious, LAST_LOOK)
    return Simulated(
        usual=outcome(usual, LAST_LOOK),
        cautious=cautious,
        slow=outcome(usual.slower(demand.error.slow), SECOND_LOOK),
        fast=outcome(usual.slower(demand.error.fast), SECOND_LOOK),
    )


def highest_rate(verdict: Verdict, demand: Demand) -> float:
    """Find the requests per second up to which the replicas of a plan hold, at first sight."""
    low, high = demand.rate, verdict.count * verdict.bounded.rate
    if not verdict.holds:
        low, high = 0.0, demand.rate
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _glance(verdict.bounded, verdict.count, replace(demand, rate=middle), RATE_LOOK)
        low, high = (middle, high) if tried.holds else (low, middle)
    return low
