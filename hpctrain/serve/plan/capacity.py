"""Bound what one replica can do from means, without simulating a request.

Belongs here: the rate at which mean iterations still keep the limits, and latencies without other
requests. Both are better than what a simulation finds, so that they rule out and order candidates.
Does not belong here: queues and percentiles of them (`routing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.serve.plan.batching import BatchLimits
from hpctrain.serve.plan.iteration_table import IterationTable
from hpctrain.serve.plan.promises import Objective
from hpctrain.serve.plan.traffic import Floats, Requests

_HALVINGS, _ROUNDS = 10, 25


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
    for _ in range(_HALVINGS):
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
