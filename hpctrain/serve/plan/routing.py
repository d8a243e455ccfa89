"""Simulate replicas behind a router: who gets each request.

Belongs here: the router's policies and the order of events over all replicas. Does not belong here:
what a replica does with its requests (`batching`), quantiles (`promises`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from hpctrain.serve.plan.batching import BatchLimits, Journal, Replica
from hpctrain.serve.plan.step_time import IterationTable
from hpctrain.serve.plan.traffic import Floats, Requests

Policy: TypeAlias = Literal["least_loaded", "round_robin", "cache_aware"]
# Defaults of vllm-router 0.1.17 (--cache-threshold, --balance-abs-threshold and
# --balance-rel-threshold): the share of a prompt that has to be known somewhere; above both of the
# others, the shortest queue counts and not the cache.
_CACHED_SHARE, _IMBALANCE_REQUESTS, _IMBALANCE_RATIO = 0.3, 64, 1.5
# Requests at one replica above which nothing is gained by going on: for each sequence that it may
# compute, and in all.
_HOPELESS_PER_SEQUENCE, _HOPELESS = 4, 256


@dataclass(frozen=True)
class SimulatedService:
    """Equal replicas behind a router.

    `request_seconds`: of a request outside of iterations. `prefilled`: keys of prompts come from
    elsewhere.
    """

    table: IterationTable
    limits: BatchLimits
    replicas: int
    policy: Policy = "least_loaded"
    request_seconds: float = 0.0
    prefilled: bool = False


@dataclass(frozen=True)
class Outcome:
    """Latencies of the requests that were answered after the warm-up, in seconds, and totals.

    `tpot_seconds` has the requests with at least two tokens. `arrival_seconds` are of the same
    requests as `ttft_seconds`. Totals are over all requests and replicas.
    """

    arrival_seconds: Floats
    ttft_seconds: Floats
    tpot_seconds: Floats
    e2e_seconds: Floats
    replicas: int
    prompt_tokens_computed: int
    output_tokens_produced: int
    preemptions: int
    iterations: int
    most_kv_tokens: float

    @property
    def requests_in_service(self) -> float:
        """The mean number of requests that are not answered yet (Little's law)."""
        span = float(self.arrival_seconds[-1] - self.arrival_seconds[0])
        rate = (len(self.arrival_seconds) - 1) / span if span > 0 else 0.0
        return rate * float(self.e2e_seconds.mean())


@dataclass(frozen=True)
class Window:
    """Which requests of a simulation are counted, and how it begins.

    Each replica begins with `begun` sequences that decode, so that it takes fewer requests until
    the service is as it is for long. The first share `warm_up` of the requests is not counted, nor
    the last share `cool_down`, which keeps the replicas busy until all others are answered.
    """

    warm_up: float = 0.1
    cool_down: float = 0.0
    begun: int = 0

    def counted(self, count: int) -> range:
        return range(int(self.warm_up * count), count - int(self.cool_down * count))


def simulate_open(
    service: SimulatedService,
    requests: Requests,
    rate: float,
    window: Window = Window(),
    *,
    seed: int = 0,
    patient: bool = False,
) -> Outcome:
    """Send requests at `rate` per second, whatever becomes of them.

    Where far more requests wait than can be computed, the simulation ends unless it is `patient`,
    and no latency is finite.
    """
    arrivals = requests.arrivals(rate)
    return simulate_arrivals(service, requests, arrivals, window, seed=seed, patient=patient)


def simulate_arrivals(
    service: SimulatedService,
    requests: Requests,
    arrival_seconds: Floats,
    window: Window = Window(),
    *,
    seed: int = 0,
    patient: bool = False,
) -> Outcome:
    """Send requests at the given times; see `simulate_open`."""
    journal, replicas, loads = _begin(service, requests, window.begun, seed)
    choose = _chooser(service.policy, loads, journal, seed)
    before = len(journal.prompt_tokens) - requests.count
    for request in range(before):
        replicas[request % len(replicas)].submit(request, 0.0)
    arrivals: list[float] = arrival_seconds.tolist()
    hopeless = _HOPELESS + _HOPELESS_PER_SEQUENCE * service.limits.max_sequences
    counted = window.counted(requests.count)
    unanswered = counted.start + before  # the first counted one that may be
    for request, seconds in enumerate(arrivals, before):
        for replica in replicas:
            if replica.next_event <= seconds:
                replica.advance(seconds)
        chosen = choose(request)
        replicas[chosen].submit(request, seconds)
        if loads[chosen] > hopeless and not patient:
            break
        if request >= counted.stop + before:
            while unanswered < counted.stop + before and journal.finished[unanswered] < math.inf:
                unanswered += 1
            if unanswered == counted.stop + before:
                break
    else:
        for replica in replicas:
            replica.advance(math.inf)
    return _outcome(service, journal, replicas, arrival_seconds, counted)


def _begin(
    service: SimulatedService, requests: Requests, begun: int, seed: int
) -> tuple[Journal, list[Replica], list[int]]:
    """Make the replicas with their loads, and put what they begin with in front of the requests.

    One that is met in the middle of its answer is a long one more often than a short one, and any
    of its tokens is as likely as any other.
    """
    count = min(begun * service.replicas, 4 * requests.count)
    generator = np.random.default_rng(seed)
    outputs = requests.output_tokens
    chosen = generator.choice(requests.count, count, p=outputs / outputs.sum())
    left = np.ceil(generator.random(count) * outputs[chosen]).astype(np.int64)
    prompts = requests.prompt_tokens[chosen] + outputs[chosen] - left
    whole = count + requests.count if service.prefilled else count
    journal = Journal(
        [*prompts.tolist(), *requests.prompt_tokens.tolist()],
        [*left.tolist(), *outputs.tolist()],
        requests.shared_prefix_tokens,
        prefilled=whole,
    )
    loads = [0] * service.replicas
    replicas = [
        Replica(service.table, service.limits, journal, loads, index) for index in range(len(loads))
    ]
    return journal, replicas, loads


def _chooser(policy: Policy, loads: list[int], journal: Journal, seed: int) -> Callable[[int], int]:
    """Return the function from a request to the replica that gets it."""
    count = len(loads)
    if count == 1:
        return lambda request: 0
    turn = -1
    generator = np.random.default_rng(seed)
    draws: list[float] = []

    def drawn(choices: int) -> int:
        if not draws:
            draws.extend(generator.random(1024).tolist())
        return int(draws.pop() * choices)

    def next_in_turn(request: int) -> int:
        nonlocal turn
        turn = (turn + 1) % count
        return turn

    def least_loaded(request: int) -> int:
        least = min(loads)
        first = loads.index(least)
        ties = loads.count(least)
        for _ in range(drawn(ties) if ties > 1 else 0):
            first = loads.index(least, first + 1)
        return first

    def longest_prefix(request: int) -> int:
        """The replica that was asked last has what all prompts share, if that is much of them."""
        nonlocal turn
        if journal.shared_prefix_tokens < _CACHED_SHARE * journal.prompt_tokens[request]:
            return least_loaded(request)
        most, least = max(loads), min(loads)
        if turn < 0 or (most - least > _IMBALANCE_REQUESTS and most > _IMBALANCE_RATIO * least):
            turn = loads.index(least)
        return turn

    return {
        "round_robin": next_in_turn,
        "least_loaded": least_loaded,
        "cache_aware": longest_prefix,
    }[policy]


def _outcome(
    service: SimulatedService,
    journal: Journal,
    replicas: Sequence[Replica],
    arrivals: Floats,
    counted: range,
) -> Outcome:
    count = len(arrivals)
    first = np.asarray(journal.first_token[-count:]) - arrivals + service.request_seconds
    whole = np.asarray(journal.finished[-count:]) - arrivals + service.request_seconds
    tokens = np.asarray(journal.output_tokens[-count:])
    order = np.argsort(arrivals, kind="stable")
    kept = order[counted.start : counted.stop]
    several = kept[tokens[kept] > 1]
    begun = np.where(np.isfinite(whole), first, 0.0)  # the rest is never answered
    return Outcome(
        arrival_seconds=arrivals[kept],
        ttft_seconds=first[kept],
        tpot_seconds=(whole - begun)[several] / (tokens[several] - 1),
        e2e_seconds=whole[kept],
        replicas=len(replicas),
        prompt_tokens_computed=sum(one.prompt_tokens_computed for one in replicas),
        output_tokens_produced=sum(one.output_tokens_produced for one in replicas),
        preemptions=sum(one.preemptions for one in replicas),
        iterations=sum(one.iterations for one in replicas),
        most_kv_tokens=max(one.most_kv_tokens for one in replicas),
    )
