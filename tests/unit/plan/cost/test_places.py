"""Where configurations lie among others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.multipliers import AXES, alike, places_of, weights_of
from tests.unit.plan.uncertainty.uncertain_cases import the_case


@pytest.fixture(scope="module")
def case() -> Case:
    return the_case("gpt175b", "a100x64")


def moved(case: Case, **mesh: float) -> dict[str, float]:
    """By how much each axis moves that moves at all."""
    other = replace(case, mesh=replace(case.mesh, **mesh))
    away = places_of(other)[0] - places_of(case)[0]
    return {name: float(value) for name, value in zip(AXES, away, strict=True) if value}


def test_a_place_counts_doublings_and_switches(case: Case) -> None:
    assert moved(case, tp=4 * np.asarray(case.mesh.tp)) == {"tp": 2}
    assert moved(case, micro_batch=np.asarray(case.mesh.micro_batch) / 2 + 0.0) in (
        {"micro batch": -1},
        {},  # of 1: below there is nothing
    )
    assert moved(case, low=1) == {"low precision": pytest.approx(np.sqrt(2))}


def test_more_of_the_same_is_the_same_place(case: Case) -> None:
    assert moved(case, dp=8 * np.asarray(case.mesh.dp)) == {}


def test_axes_can_be_chosen_as_an_older_version_had_them(case: Case) -> None:
    some = places_of(case, ("tp", "hidden"))
    assert some.shape[1] == 2
    assert some[0, 0] == places_of(case)[0, AXES.index("tp")]


def test_what_is_alike_falls_with_distance() -> None:
    places = np.array([[0.0, 0.0], [0.0, 2.0], [3.0, 9.0]])
    shared = alike(places, places[:1], 2.0)[:, 0]
    assert shared[0] == 1
    assert shared[1] == pytest.approx(np.exp(-0.5))
    assert shared[2] < 0.001


def test_weights_interpolate() -> None:
    seen = np.array([[0.0], [2.0]])
    weights = weights_of(np.array([[0.0], [2.0], [1.0], [50.0]]), seen, 2.0)
    assert weights[:2] == pytest.approx(np.eye(2), abs=1e-4)
    assert weights[2, 0] == pytest.approx(weights[2, 1])
    assert weights[2].sum() > 1 - 0.1
    assert weights[3] == pytest.approx([0, 0])
