"""Prices of iterations from timed ones: found again from made ones, never negative."""

from __future__ import annotations

import numpy as np
import pytest

from bench.serving_iteration_fit import IterationFit, TimedIteration, fit_iterations
from hpctrain.base.errors import HpctrainError
from hpctrain.serve.plan.step_time import IterationLoad, IterationTable

MADE = IterationFit(0.005, 0.002, 1e-5, 3e-4, 1e-7, 0.0)


def timed(made: IterationFit, noise: float = 0.0) -> list[TimedIteration]:
    draws = np.random.default_rng(1)
    found = []
    for prompt in (0, 16, 64, 256):
        for sequences in (0, 1, 8, 32):
            for context in (64.0, 512.0):
                load = IterationLoad(prompt, 0.0, sequences, context)  # type: ignore[arg-type]
                seconds = float(made.seconds(load)) * float(np.exp(noise * draws.standard_normal()))
                found.append(TimedIteration(prompt, sequences, sequences * context, seconds))
    return found


def test_prices_are_found_again() -> None:
    fit = fit_iterations(timed(MADE))
    assert vars(fit) == pytest.approx(vars(MADE), rel=1e-6, abs=1e-12)


def test_the_error_is_that_of_the_measurements() -> None:
    fit = fit_iterations(timed(MADE, noise=0.1))
    assert 0.06 < fit.log_deviation < 0.14
    assert fit.iteration_seconds == pytest.approx(MADE.iteration_seconds, rel=0.2)


def test_no_price_is_negative() -> None:
    """A machine that gets faster while larger iterations are timed must not be believed."""
    odd = IterationFit(0.005, 0.002, -2e-6, 3e-4, -1e-8, 0.0)
    assert min(vars(fit_iterations(timed(odd))).values()) >= 0.0


def test_a_simulation_looks_up_what_was_fitted() -> None:
    table = IterationTable(MADE.seconds, 512, 64, usual_context_tokens=200.0)
    for prompt, sequences, context in ((0, 1, 40.0), (33, 7, 900.0), (512, 64, 6400.0)):
        mean = context / sequences
        load = IterationLoad(prompt, 0.0, sequences, mean)  # type: ignore[arg-type]
        assert table.seconds(prompt, 0.0, sequences, context) == pytest.approx(
            float(MADE.seconds(load)), rel=0.02
        )


def test_too_little_is_an_error() -> None:
    with pytest.raises(HpctrainError, match="two lengths of prompts"):
        fit_iterations([one for one in timed(MADE) if one.prefill_tokens])
