"""Compute the latencies of one replica under a constant load, without simulating requests.

Belongs here: closed forms for closed loops of C streams, for open loops of a rate, and for pools of
prefill and decode replicas. Does not belong here: seconds of one iteration (`step_time`),
simulated arrivals (`batching`), several replicas behind a router (`routing`).

Letters: I prompt tokens, O output tokens, C streams, K sequences in service, D of them decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.case import Array
from hpctrain.serve.plan.serving_machine import ReplicaCase
from hpctrain.serve.plan.step_time import (
    IterationLoad,
    iteration_seconds,
    largest_batch,
    sequence_bytes,
)
from hpctrain.spec.calibration import ServingEngineCalibration

ROUNDS = 6  # of the fixed point; it is damped and settles to 1e-3 in fewer

OPEN_ROUNDS = 24  # of an open loop's, which is slower near saturation


@dataclass(frozen=True)
class ClosedLoad:
    """C streams, each of which sends its next request when the last one is answered.

    All streams begin at once, so that the first prompts of a measurement wait for each other:
    `requests_per_stream` says how many later ones share that. With equal lengths
    (`equal_lengths`: 1) streams that began together also end together. `waited_iterations`: what a
    request waits for in the mean where an engine is set to look for new ones in every n-th
    iteration only, or to hold prompts back until a batch of them is full.
    """

    prompt_tokens: Array
    output_tokens: Array
    streams: Array
    requests_per_stream: Array = 10.0
    equal_lengths: Array = 0.0
    drafted_tokens: Array = 0.0
    waited_iterations: Array = 0.0


@dataclass(frozen=True)
class OpenLoad:
    """Requests that arrive at random (Poisson), `rate` per second and replica."""

    prompt_tokens: Array
    output_tokens: Array
    rate: Array


@dataclass(frozen=True)
class Latencies:
    """Seconds per request, and requests per second of the replica."""

    ttft_mean: Array
    ttft_p99: Array
    tpot_mean: Array
    request_rate: Array
    in_service: Array  # sequences that the replica holds

    def e2e_mean(self, output_tokens: Array) -> Array:
        return self.ttft_mean + self.tpot_mean * np.maximum(output_tokens - 1, 0)


def closed_loop(case: ReplicaCase, load: ClosedLoad) -> Latencies:
    """Price continuous batching with prompts in chunks between decoding sequences.

    In one cycle of a stream every other stream has one prompt computed, so that a sequence's O
    tokens take O iterations and the prompts that fall into them. Prompts that arrive together are
    computed in groups of as many as the token budget holds, and have their first tokens together.
    Later requests come one by one where lengths differ. Where they are equal, streams that began
    together also end together, and `bunched_prompts` of them stay so: a few in engines that compute
    prompts beside decoding sequences, nearly all where prompts go before (`prompts_first`), as all
    streams then decode in step.
    """
    i, o = load.prompt_tokens, np.maximum(load.output_tokens, 1.0)
    first = case.engine.prompts_first
    counted = i + o * case.engine.reserved_output
    room = largest_batch(case, counted)
    held = np.minimum(load.streams, np.maximum(1.0, room))
    context = i + o / 2
    group = np.clip(case.engine.token_budget * case.layout.dp / i, 1.0, held)
    dense = grouped_prompt_seconds(case, i, group)
    ranks = np.minimum(case.layout.dp, held)  # that compute prompts at the same time
    # prompts of others that a request meets before its first token, instead of while it decodes
    before = load.equal_lengths * np.minimum((held - 1) / 2, case.engine.bunched_prompts)
    kept = kept_tokens(case.engine, load.drafted_tokens)
    decoding = np.asarray(held * 0.8, dtype=float)
    for _ in range(ROUNDS):
        busy = IterationLoad(0.0, 0.0, np.maximum(decoding, 1.0), context, load.drafted_tokens)
        pure = iteration_seconds(case, busy)
        mixed = prompt_seconds(case, i, busy, pure)
        prompt = first * grouped_prompt_seconds(case, i, ranks) + (1 - first) * mixed
        met = np.maximum(0.0, held - 1 - before) * decoding / held
        tpot = pure / kept + met / o * prompt
        cycle = o * tpot + prompt + before * dense
        decoding = 0.5 * decoding + 0.5 * held * o * tpot / cycle
    queue = np.maximum(0.0, load.streams / held - 1) * cycle
    stall = (1 - first) * pure / group  # what a prompt's iteration takes for those that decode
    mixed = prompt_seconds(case, i, busy, pure, prompts=1.0)
    own = first * grouped_prompt_seconds(case, i, 1.0) + (1 - first) * mixed
    # mean of prompts that all came at once: a group has its first tokens together
    wave = own + ((held + group) / 2 - 1) * (dense + stall)
    used = np.minimum(1.0, (held - 1) * prompt / cycle)
    # those that came while an engine did not look: it takes them together
    missed = 2 * load.waited_iterations * held * kept / o
    before = np.minimum(np.maximum(before, missed), (held - 1) / 2)
    usual = own + prompt * used / 2 + before * dense
    share = 1 / np.maximum(load.requests_per_stream, 1.0)
    least = first_token_seconds(case, load, pure)
    ttft = least + share * wave + (1 - share) * usual + queue
    late = np.clip(1 - 0.01 / share, 0.0, 1.0) * held * dense
    worst = least + np.maximum(late, 2.0 * usual) + queue
    return Latencies(ttft, worst, tpot, load.streams / (ttft + o * tpot), held)


def open_loop(case: ReplicaCase, load: OpenLoad) -> Latencies:
    """Price a replica at a rate of arrivals; a rate that it cannot serve fills its batch.

    By Little's law D = rate x O x TPOT sequences decode. An iteration computes the prompts that
    arrived during the last one, a Poisson number. A request waits for the rest of an iteration and
    is in the next one; its 99th percentile meets a whole iteration and its own with as many
    prompts as 1 % of iterations have more of (2.33 standard deviations).
    """
    i, o = load.prompt_tokens, np.maximum(load.output_tokens, 1.0)
    counted = i + o * case.engine.reserved_output
    room = np.maximum(1.0, largest_batch(case, counted))
    decoding = np.minimum(room, 8.0)
    for _ in range(OPEN_ROUNDS):
        busy = IterationLoad(0.0, 0.0, decoding, i + o / 2)
        pure = iteration_seconds(case, busy)
        prompt = prompt_seconds(case, i, busy, pure)
        tpot = pure / (1 - np.minimum(0.9, load.rate * prompt))
        wanted = np.clip(load.rate * o * tpot, 1.0, room)
        decoding = 0.5 * decoding + 0.5 * wanted
    arrivals = load.rate * tpot
    server = case.engine.request_seconds + case.engine.token_seconds * i
    spread = arrivals * (prompt / tpot) ** 2  # squared coefficient of variation of iterations
    mean = server + tpot * (1.5 + spread / 2)
    longest = tpot + 2.33 * np.sqrt(arrivals) * prompt
    served = np.minimum(load.rate, decoding / (o * tpot))
    return Latencies(mean, server + 2 * longest, tpot, served, decoding)


def first_token_seconds(case: ReplicaCase, load: ClosedLoad, pure: Array) -> Array:
    """Return what a first token takes beside prompts: the server, and iterations waited for."""
    waited = case.engine.waited_iterations + load.waited_iterations
    server = case.engine.request_seconds + case.engine.token_seconds * load.prompt_tokens
    return server + waited * pure


def kept_tokens(engine: ServingEngineCalibration, drafted: Array) -> Array:
    """Return the tokens that a sequence gains in one iteration in the mean.

    Each of n drafted tokens is kept with probability a if those before it were: 1 + a + ... + a^n
    (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
    """
    a = np.asarray(engine.draft_acceptance, dtype=np.float64)
    kept: Array = (1 - a ** (1 + np.asarray(drafted))) / (1 - a)
    return kept


def disaggregated(
    prefill: ReplicaCase, decode: ReplicaCase, pools: tuple[Array, Array], load: ClosedLoad
) -> Latencies:
    """Price replicas that compute prompts only, and others that decode only.

    `pools`: how many of each. Prompts wait for a free prefill replica, which computes those that
    wait together; where these are the narrowest part, streams gather in front of them. The cache
    of a prompt travels over the network cards of the prefill replica.
    """
    prefillers, decoders = pools
    i, o = load.prompt_tokens, np.maximum(load.output_tokens, 1.0)
    context = i + o / 2
    counted = i + o * decode.engine.reserved_output
    room = largest_batch(decode, counted)
    each = np.minimum(load.streams / decoders, np.maximum(1.0, room))
    kept = kept_tokens(decode.engine, load.drafted_tokens)
    idle = IterationLoad(0.0, 0.0, 0.0, context)
    prompt = prompt_seconds(prefill, i, idle, iteration_seconds(prefill, idle), prompts=1.0)
    dense = dense_prompt_seconds(prefill, i)
    sent = sequence_bytes(prefill.served, prefill.layout, i) / prefill.gpu.links.network_bandwidth
    alone = first_token_seconds(decode, load, 0.0) + prompt + sent + decode.engine.handover_seconds
    decoding = np.asarray(each, dtype=float)
    for _ in range(ROUNDS):
        busy = IterationLoad(0.0, 0.0, np.maximum(decoding, 1.0), context, load.drafted_tokens)
        pure = iteration_seconds(decode, busy)
        tpot = pure / kept
        free = alone + o * tpot  # of a stream that waits for nobody
        cycle = np.maximum(free, load.streams * dense / prefillers)
        busy_streams = load.streams / decoders * o * tpot / cycle
        decoding = 0.5 * decoding + 0.5 * np.minimum(each, busy_streams)
    used = np.minimum(0.95, load.streams / cycle * dense / prefillers)
    waiting = np.maximum(used / (2 * (1 - used)) * dense / prefillers, cycle - free)
    ahead = load.streams / prefillers
    group = np.clip(prefill.engine.token_budget * prefill.layout.dp / i, 1.0, np.maximum(1, ahead))
    wave = np.maximum(0.0, (ahead + group) / 2 * dense - prompt)
    share = 1 / np.maximum(load.requests_per_stream, 1.0)
    waited = decode.engine.waited_iterations * pure
    queue = np.maximum(0.0, load.streams / decoders / each - 1) * o * tpot
    later = np.minimum(waiting, ahead * dense)
    ttft = alone + waited + share * wave + (1 - share) * later + queue
    worst = ttft + 1.6 * waiting
    return Latencies(ttft, worst, tpot, load.streams / (ttft + o * tpot), decoding * decoders)


def prompt_seconds(
    case: ReplicaCase,
    tokens: Array,
    busy: IterationLoad,
    pure: Array,
    prompts: Array = np.inf,
) -> Array:
    """Return what one prompt adds to iterations of `pure` seconds that it is computed in.

    A prompt longer than the token budget goes in several chunks. With so many `prompts` at once
    attention data parallel ranks share them; each one is computed by one rank.
    """
    chunk = np.minimum(tokens, case.engine.token_budget)
    mixed = iteration_seconds(
        case,
        replace(busy, prefill_tokens=chunk, prefill_context_tokens=tokens / 2, prompts=prompts),
    )
    return tokens / chunk * (mixed - pure)


def grouped_prompt_seconds(case: ReplicaCase, tokens: Array, prompts: Array) -> Array:
    """Return a prompt's share of iterations that hold so many prompts and nothing else.

    A prompt longer than the token budget goes in several iterations.
    """
    together = tokens * prompts
    chunk = np.minimum(together, case.engine.token_budget * case.layout.dp)
    alone = iteration_seconds(case, IterationLoad(chunk, tokens / 2, 0.0, 0.0, prompts=prompts))
    return alone * together / chunk / prompts


def dense_prompt_seconds(case: ReplicaCase, tokens: Array) -> Array:
    """Return a prompt's share of an iteration that is full of prompts on every attention rank."""
    full = np.maximum(tokens, case.engine.token_budget * case.layout.dp)
    return tokens / full * iteration_seconds(case, IterationLoad(full, tokens / 2, 0.0, 0.0))
