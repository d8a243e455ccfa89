"""Compare measured iterations of an engine with predicted ones, and correct the prediction.

Belongs here: iterations as they can be read off requests or counters, factors on predicted seconds
by least squares, what error is left. Does not belong here: the prediction (`step_time`), reading
files (`hpctrain.site.calibrate_service`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.plan.cost.case import Array
from hpctrain.serve.plan.step_time import CostFunction, IterationLoad
from hpctrain.serve.plan.traffic import Floats

_FEWEST = 8  # measured iterations that factors are fitted to
_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.05, 50.0
_LEAST_DEVIATION = 0.03  # of a fit: other prompts, other days
_ROUNDS = 20  # of the fit, in which far-off measurements count less
_OF_MEDIAN, _HUBER = 1.4826, 1.345  # median distance to deviation; Huber, "Robust Statistics"


@dataclass(frozen=True)
class MeasuredIteration:
    """Means over some iterations of one replica: prompt tokens and sequences in each, seconds.

    `context_tokens` are those of one decoding sequence.
    """

    prompt_tokens: float
    sequences: float
    context_tokens: float
    seconds: float


@dataclass(frozen=True)
class RequestTimes:
    """Requests that one service has answered: seconds of a common clock, and tokens."""

    begin_seconds: Floats
    first_token_seconds: Floats
    last_token_seconds: Floats
    prompt_tokens: Floats
    output_tokens: Floats

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float, float, float]]) -> RequestTimes:
        """Join requests, each with its five figures in the order of the fields."""
        return cls(*np.asarray(rows, dtype=float).reshape(-1, 5).T)


@dataclass(frozen=True)
class EngineCounters:
    """Totals that an engine has counted since its start, at one moment.

    As vLLM counts them: `vllm:prompt_tokens`, `vllm:generation_tokens`, and sum and count of the
    histogram of seconds per further token.
    """

    moment_seconds: float
    prompt_tokens: float
    generated_tokens: float
    tpot_sum_seconds: float
    tpot_count: float
    requests: float


@dataclass(frozen=True)
class MeasuredSpeed:
    """Factors on predicted seconds: of iterations without prompts, and of what prompts add.

    `log_deviation`: standard deviation of the logarithm of what is left. `iterations`: how many
    measurements that is from.
    """

    decode_factor: float = 1.0
    prompt_factor: float = 1.0
    request_seconds: float | None = None
    log_deviation: float | None = None
    iterations: int = 0

    def corrected(self, cost: CostFunction) -> CostFunction:
        """Return the cost function with the factors."""
        if self.decode_factor == self.prompt_factor == 1.0:
            return cost

        def seconds(load: IterationLoad) -> Array:
            none = np.zeros_like(np.asarray(load.prefill_tokens, dtype=float))
            decoding = (load.decode_sequences, load.decode_context_tokens)
            pure = cost(IterationLoad(none, 0.0, *decoding))
            return self.decode_factor * pure + self.prompt_factor * (cost(load) - pure)

        return seconds


AS_PREDICTED = MeasuredSpeed()


def iterations_of(requests: RequestTimes, replicas: int = 1) -> list[MeasuredIteration]:
    """Read off each answer what an iteration took and held while it was made.

    An answer of n tokens has n - 1 iterations between its first and its last token. Meanwhile
    sequences decode as long as they overlap with it, and prompts whose first token falls into that
    time were computed. Behind a router both are shared among the replicas.
    """
    first, last = requests.first_token_seconds, requests.last_token_seconds
    found = []
    for start, end, tokens in zip(first, last, requests.output_tokens, strict=True):
        iterations, lasting = tokens - 1, end - start
        if iterations < 2 or lasting <= 0:
            continue
        overlap = np.clip(np.minimum(last, end) - np.maximum(first, start), 0, None)
        others = float(overlap.sum()) / lasting - 1
        inside = (first > start) & (first <= end)
        # a sequence that overlaps is in the middle of its answer
        weights = overlap / overlap.sum()
        context = float((weights * (requests.prompt_tokens + requests.output_tokens / 2)).sum())
        prompts = float(requests.prompt_tokens[inside].sum())
        found.append(
            MeasuredIteration(
                prompt_tokens=prompts / replicas / float(iterations),
                sequences=1 + others / replicas,
                context_tokens=context,
                seconds=float(lasting / iterations),
            )
        )
    return found


def iteration_between(before: EngineCounters, after: EngineCounters) -> MeasuredIteration | None:
    """Read off the counters of one replica what its mean iteration held; None without traffic.

    A further token of a sequence takes one iteration. In that time so many tokens are made as
    sequences decode (Little's law), and so many tokens of prompts are computed.
    """
    lasting = after.moment_seconds - before.moment_seconds
    answers = after.tpot_count - before.tpot_count
    generated = after.generated_tokens - before.generated_tokens
    requests = after.requests - before.requests
    if lasting <= 0 or answers <= 0 or generated <= 0 or requests <= 0:
        return None
    seconds = (after.tpot_sum_seconds - before.tpot_sum_seconds) / answers
    prompts = after.prompt_tokens - before.prompt_tokens
    return MeasuredIteration(
        prompt_tokens=prompts / lasting * seconds,
        sequences=max(1.0, generated / lasting * seconds),
        context_tokens=prompts / requests + generated / requests / 2,
        seconds=seconds,
    )


def fit_speed(cost: CostFunction, measured: Sequence[MeasuredIteration]) -> MeasuredSpeed | None:
    """Fit both factors to measured iterations by least squares of the ratio; None for too few.

    Where prompts are computed in chunks of whole ones, some iterations have one and most have none:
    what a mean of p tokens adds is taken as the share p / P of what a whole prompt of P adds, with
    P the prompts' mean context. Distances are those of logarithms, and measurements
    that are far off count less (Huber's weights), so that neither fast nor slow ones decide.
    """
    if len(measured) < _FEWEST:
        return None
    pure, added = _predicted_parts(cost, measured)
    seconds = np.asarray([one.seconds for one in measured])
    parts = np.stack([pure / seconds, added / seconds], axis=1)
    factors = np.full(2, 1 / float(np.median(parts.sum(axis=1))))
    for _ in range(_ROUNDS):
        ratio = parts @ factors
        far = np.abs(np.log(ratio))
        scale = max(1e-3, _OF_MEDIAN * float(np.median(far)))
        weights = np.minimum(1.0, _HUBER * scale / np.maximum(far, 1e-12)) / ratio**2
        factors = _positive_factors(parts, weights)
    deviation = _OF_MEDIAN * float(np.median(np.abs(np.log(parts @ factors))))
    return MeasuredSpeed(
        decode_factor=float(factors[0]),
        prompt_factor=float(factors[1]),
        log_deviation=max(_LEAST_DEVIATION, deviation),
        iterations=len(measured),
    )


def typical_error(cost: CostFunction, measured: Sequence[MeasuredIteration]) -> float:
    """Return the median distance of the logarithms of measured and predicted seconds."""
    pure, added = _predicted_parts(cost, measured)
    seconds = np.asarray([one.seconds for one in measured])
    return float(np.median(np.abs(np.log((pure + added) / seconds))))


def _predicted_parts(
    cost: CostFunction, measured: Sequence[MeasuredIteration]
) -> tuple[Floats, Floats]:
    """Predict what decoding takes in each measured iteration, and what prompts add."""
    prompts = np.asarray([one.prompt_tokens for one in measured])
    sequences = np.asarray([one.sequences for one in measured])
    context = np.asarray([one.context_tokens for one in measured])
    whole = np.maximum(prompts, context)
    pure = np.asarray(cost(IterationLoad(np.zeros_like(whole), 0.0, sequences, context)))
    mixed = np.asarray(cost(IterationLoad(whole, whole / 2, sequences, context)))
    return pure, prompts / whole * (mixed - pure)


def _positive_factors(parts: Floats, weights: Floats) -> Floats:
    """Solve weighted least squares for ones; a part that is nearly nothing keeps factor 1."""
    root = np.sqrt(weights)[:, None]
    if float(np.median(parts[:, 1])) < 0.01:
        decode = float((weights * parts[:, 0]).sum() / (weights * parts[:, 0] ** 2).sum())
        return np.asarray([_bounded(decode), 1.0])
    solved, *_ = np.linalg.lstsq(parts * root, root[:, 0], rcond=None)
    return np.asarray([_bounded(float(factor)) for factor in solved])


def _bounded(factor: float) -> float:
    return min(_LARGEST_FACTOR, max(_SMALLEST_FACTOR, factor))


def request_seconds(requests: RequestTimes, cost: CostFunction) -> float:
    """Estimate what a request takes outside of iterations: that of the least delayed quarter.

    A request that comes to a quiet engine waits for half an iteration, and for its prompt's own.
    """
    tokens = requests.prompt_tokens
    own = np.asarray(cost(IterationLoad(tokens, tokens / 2, 0.0, 0.0)))
    waited = requests.first_token_seconds - requests.begin_seconds - own
    return max(0.0, float(np.quantile(waited, 0.25)) if len(waited) else 0.0)
