"""Price separate pools of replicas: some compute prompts, others the answers.

Prompts then disturb no answer, each pool is sized for its own limit, and the keys of every prompt
go over the network once (Splitwise, arXiv 2311.18677; DistServe, arXiv 2401.09670). `serve up`
starts no such pools: the price tells whether it would pay to.

Belongs here: the size of both pools. Does not belong here: replicas that do both (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.serve.plan.promises import Objective, quantile
from hpctrain.serve.plan.routing import SimulatedService, Window, simulate_open
from hpctrain.serve.plan.search import SECOND_LOOK, Bounded, Demand, Verdict
from hpctrain.serve.plan.step_time import sequence_bytes
from hpctrain.serve.plan.traffic import Floats, Requests

_MOST_SIMULATED = 8
_WINDOW = Window(warm_up=0.1, cool_down=0.2)
_MOST_TIMES = 3  # as many GPUs as without pools, above which no further size is tried


@dataclass(frozen=True)
class Pools:
    """Replicas that compute prompts and answers, and the seconds of a mean prompt's transfer."""

    prompt_replicas: int
    answer_replicas: int
    transfer_seconds: float
    gpus: int


def disaggregated(together: Verdict, demand: Demand) -> Pools | None:
    """Size both pools for the shape of a plan; None where they cannot keep the limits at all."""
    first = [one for one in demand.objectives if one.latency == "ttft"]
    further = [one for one in demand.objectives if one.latency == "tpot"]
    bounded, shape = together.bounded, together.bounded.shape
    requests = demand.requests.first(SECOND_LOOK)
    each = transfer_seconds(bounded, requests.prompt_tokens.astype(float))
    most = min(_MOST_TIMES * together.count, shape.offer.most_gpus // shape.gpus)
    prompts = _least(lambda count: _prompts_hold(bounded, requests, demand, first, count), most)
    answers = _least(
        lambda count: _answers_hold(bounded, requests, demand, further, each, count), most
    )
    if prompts is None or answers is None:
        return None
    gpus = (prompts + answers) * shape.offer.billed_gpus(shape.gpus)
    return Pools(prompts, answers, float(each.mean()), gpus)


def transfer_seconds(bounded: Bounded, prompt_tokens: Floats) -> Floats:
    """Return how long the keys of each prompt take: every GPU sends its part over its own card."""
    shape = bounded.shape
    size = sequence_bytes(shape.served, shape.layout, prompt_tokens)
    return np.asarray(size) / shape.offer.network_bandwidth


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """Find the least number that holds, by doubling and halving; None where `most` does not."""
    low, high = 0, 1
    while not holds(high):
        if high >= most:
            return None
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _service(bounded: Bounded, demand: Demand, count: int, *, prefilled: bool) -> SimulatedService:
    engine = bounded.shape.engine
    return SimulatedService(
        bounded.tables.cautious,
        bounded.limits,
        min(count, _MOST_SIMULATED),
        demand.policy,
        0.0 if prefilled else engine.request_seconds(bounded.tables.traffic.prompt_tokens),
        prefilled,
    )


def _prompts_hold(
    bounded: Bounded,
    requests: Requests,
    demand: Demand,
    objectives: list[Objective],
    count: int,
) -> bool:
    """Simulate the pool that makes the first token of each answer, and nothing else."""
    one = replace(requests, output_tokens=np.ones_like(requests.output_tokens))
    service = _service(bounded, demand, count, prefilled=False)
    got = simulate_open(service, one, demand.rate * service.replicas / count, _WINDOW)
    return _keeps(got.ttft_seconds, objectives)


def _answers_hold(
    bounded: Bounded,
    requests: Requests,
    demand: Demand,
    objectives: list[Objective],
    transfer: Floats,
    count: int,
) -> bool:
    """Simulate the pool that makes all other tokens; transfer and wait are part of their time."""
    several = requests.output_tokens > 1
    rest = Requests(
        requests.arrival_units[several],
        requests.prompt_tokens[several] + 1,
        requests.output_tokens[several] - 1,
    )
    service = _service(bounded, demand, count, prefilled=True)
    share = float(several.mean()) * service.replicas / count
    window = replace(_WINDOW, begun=bounded.limits.max_sequences // 4)
    got = simulate_open(service, rest, demand.rate * share, window)
    counted = window.counted(rest.count)
    kept = slice(counted.start, counted.stop)
    each = (got.e2e_seconds + transfer[several][kept]) / rest.output_tokens[kept]
    return _keeps(each, objectives)


def _keeps(seconds: Floats, objectives: list[Objective]) -> bool:
    values = [(quantile(seconds, one.share).value, one.limit_seconds) for one in objectives]
    return all(math.isfinite(value) and value <= limit for value, limit in values)


def pools_sentence(together: Verdict, demand: Demand) -> str:
    """Say whether separate pools would pay, with their figures.

    Limits of e2e belong to neither pool: without one of ttft and one of tpot there is no size.
    """
    shape, limited = together.bounded.shape, {one.latency for one in demand.objectives}
    if not {"ttft", "tpot"} <= limited:
        return (
            "separate pools for prompts and answers are priced where both ttft and tpot have limits"
        )
    pools = disaggregated(together, demand)
    here = together.count * shape.offer.billed_gpus(shape.gpus)
    if pools is None:
        return "separate pools for prompts and answers keep the limits with no number of GPUs"
    figures = (
        f"{pools.prompt_replicas} + {pools.answer_replicas} replicas "
        f"({pools.gpus} GPUs, and {pools.transfer_seconds * 1e3:.1f} ms for the keys of a prompt)"
    )
    if pools.gpus < here:
        saved = 1 - pools.gpus / here
        return f"separate pools for prompts and answers would save {saved:.0%}: {figures}"
    return f"separate pools for prompts and answers do not pay: {figures} instead of {here} GPUs"
