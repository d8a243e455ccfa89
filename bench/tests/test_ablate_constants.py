"""What a constant is worth: a linear model of which the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from bench.ablate_constants import Linear, figures
from bench.calibration_table import Free


def model(noise: float = 0.0) -> Linear:
    """Three sources of 40 rows: log time = 0.3 x first for all, and 0 x second."""
    dice = np.random.default_rng(5)
    slopes = np.column_stack([dice.uniform(0.5, 1.5, 120), dice.uniform(0.5, 1.5, 120)])
    free = [Free(name, 1.0, 0.1, 3.0, 0.01, ()) for name in ("first", "second")]
    values = np.array([1.0, 1.0])
    measured = slopes @ np.array([0.3, 0.0]) + noise * dice.normal(size=120)
    return Linear(
        free=free,
        values=values,
        predicted=np.zeros(120),
        slopes=slopes,
        measured=measured,
        weights=np.ones(120),
        sources=np.repeat(["a", "b", "c"], 40),
    )


def test_the_fit_to_all_rows_finds_the_constants() -> None:
    one = model()
    assert one.solved(np.ones(120), None) == pytest.approx([1.3, 1.0], abs=1e-3)
    assert one.at(np.array([1.3, 1.0])) == pytest.approx(np.zeros(120), abs=1e-12)


def test_a_constant_that_matters_costs_when_it_is_left_and_another_does_not() -> None:
    one = model(noise=0.01)
    errors = [figures(one.unseen(fixed), one.sources)["rows median"] for fixed in (None, 0, 1)]
    assert errors[0] < 1.2
    assert errors[1] > 3 * errors[0]
    assert errors[2] == pytest.approx(errors[0], rel=0.1)


def test_what_is_left_stays_at_its_start_and_others_in_their_bounds() -> None:
    one = model()
    assert one.solved(np.ones(120), 0)[0] == 1.0
    assert 0.1 <= one.solved(np.ones(120), 0)[1] <= 3.0


def test_figures_weigh_every_source_the_same() -> None:
    errors = np.array([0.1, 0.1, 0.1, 0.1, -0.3])
    found = figures(errors, np.array(["a", "a", "a", "a", "b"]))
    assert found["rows median"] == pytest.approx(10)
    assert found["sources median"] == pytest.approx(20)
