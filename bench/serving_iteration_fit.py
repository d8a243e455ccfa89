"""From timed iterations of one running engine to what an iteration of it costs. Pure.

The planner's cost model knows GPUs and shapes; this one knows nothing but what was timed, so it
holds for one engine with one model on one machine. Belongs here: the fit and its error. Does not
belong here: timing iterations (see `bench/serving_on_cpu.py`), factors on the planner's own
prediction (`hpctrain.serve.plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.base.errors import HpctrainError
from hpctrain.plan.cost.case import Array
from hpctrain.serve.plan.step_time import IterationLoad
from hpctrain.serve.plan.traffic import Floats

_COLUMNS = 5


@dataclass(frozen=True)
class TimedIteration:
    """One kind of iteration and how long it took.

    `prefill_tokens` of prompts, `decode_sequences` that made one token each, and the
    `context_tokens` that all of these had together.
    """

    prefill_tokens: int
    decode_sequences: int
    context_tokens: float
    seconds: float


@dataclass(frozen=True)
class IterationFit:
    """Seconds of an iteration as a sum; `log_deviation` is that of measured over fitted.

    iteration_seconds      of every iteration
    prompt_seconds         more, if there is any token of a prompt
    prompt_token_seconds   more, for each token of prompts
    sequence_seconds       more, for each decoding sequence
    key_seconds            more, for each token that a decoding sequence has in the cache
    """

    iteration_seconds: float
    prompt_seconds: float
    prompt_token_seconds: float
    sequence_seconds: float
    key_seconds: float
    log_deviation: float

    def seconds(self, load: IterationLoad) -> Array:
        """Price iterations; what a prompt's token sees is in its own price."""
        prompts, sequences = np.asarray(load.prefill_tokens), np.asarray(load.decode_sequences)
        seconds: Array = (
            self.iteration_seconds
            + self.prompt_seconds * (prompts > 0)
            + self.prompt_token_seconds * prompts
            + self.sequence_seconds * sequences
            + self.key_seconds * sequences * np.asarray(load.decode_context_tokens)
        )
        return seconds


def fit_iterations(timed: Sequence[TimedIteration]) -> IterationFit:
    """Fit the least relative squares without negative prices.

    Raises HpctrainError if iterations with and without prompts, of several sizes, are not there.
    """
    prompts = {one.prefill_tokens for one in timed}
    sequences = {one.decode_sequences for one in timed if not one.prefill_tokens}
    if len(prompts) < 3 or len(sequences) < 2 or 0 not in prompts:
        message = "iterations with two lengths of prompts, and two numbers of sequences without"
        raise HpctrainError(f"too few timed iterations to fit: {message} are needed")
    seconds = np.asarray([one.seconds for one in timed])
    columns = np.asarray([_columns(one) for one in timed])
    prices = _without_negative(columns / seconds[:, None])
    deviation = float(np.std(np.log(seconds / (columns @ prices))))
    iteration, prompt, prompt_token, sequence, key = (float(price) for price in prices)
    return IterationFit(iteration, prompt, prompt_token, sequence, key, deviation)


def _columns(one: TimedIteration) -> tuple[float, ...]:
    prompt = float(one.prefill_tokens > 0)
    return 1.0, prompt, one.prefill_tokens, one.decode_sequences, one.context_tokens


def _without_negative(relative: Floats) -> Floats:
    """Solve for prices that make every row 1; a price that would be negative is none."""
    kept = list(range(_COLUMNS))
    while True:
        solved = np.linalg.lstsq(relative[:, kept], np.ones(len(relative)), rcond=None)[0]
        lowest = int(np.argmin(solved * np.abs(relative[:, kept]).max(axis=0)))
        if solved[lowest] >= 0:
            prices = np.zeros(_COLUMNS)
            prices[kept] = solved
            return prices
        del kept[lowest]
