"""The update of multipliers: against integrals by brute force, on synthetic sites, and odd runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.plan.cost.case import Case, Floats
from hpctrain.plan.cost.multipliers import AXES, alike, places_of, weights_of
from hpctrain.plan.uncertainty.belief import Belief, Observations, Rest, updated
from tests.unit.plan.uncertainty.uncertain_cases import the_case

EDGE = 1.2815515655446004  # of the normal distribution: 80 % lie within


def gaussian(prior: Belief, seen: Observations) -> Belief:
    return updated(prior, seen, freedom=np.inf, trust=np.inf)


def test_the_posterior_is_that_of_an_integral_by_brute_force() -> None:
    """Two multipliers on a fine grid: prior times likelihood, summed."""
    prior = Belief(np.array([0.02, -0.1]), np.array([[0.04, 0.01], [0.01, 0.09]]))
    effects = np.array([[0.8, 0.1], [0.3, 0.6], [0.5, 0.5]])
    seen = Observations(np.array([0.11, -0.05, 0.2]), effects, np.array([0.05, 0.08, 0.03]))
    axis = np.linspace(-1.2, 1.2, 481)
    first, second = np.meshgrid(axis, axis, indexing="ij")
    points = np.stack([first, second], axis=-1)
    away = points - prior.mean
    log = -0.5 * np.einsum("xyi,ij,xyj->xy", away, np.linalg.inv(prior.covariance), away)
    for error, effect, noise in zip(seen.errors, effects, seen.noise, strict=True):
        log += -0.5 * ((error - points @ effect) / noise) ** 2
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    mean = np.einsum("xy,xyi->i", weight, points)
    spread = points - mean
    covariance = np.einsum("xy,xyi,xyj->ij", weight, spread, spread)
    found = gaussian(prior, seen)
    assert found.mean == pytest.approx(mean, abs=1e-4)
    assert found.covariance == pytest.approx(covariance, abs=1e-5)


def test_without_runs_the_prior_stays() -> None:
    prior = Belief(np.zeros(2), np.eye(2))
    none = Observations(np.zeros(0), np.zeros((0, 2)), np.zeros(0))
    assert updated(prior, none) is prior


def test_the_order_of_runs_changes_nothing() -> None:
    random = np.random.default_rng(3)
    prior = Belief(np.zeros(4), np.diag(np.square([0.1, 0.3, 0.05, 0.5])))
    effects, errors = random.uniform(0, 1, (7, 4)), random.normal(0.1, 0.1, 7)
    noise = random.uniform(0.02, 0.05, 7)
    one = updated(prior, Observations(errors, effects, noise))
    turned = random.permutation(7)
    other = updated(prior, Observations(errors[turned], effects[turned], noise[turned]))
    assert np.array_equal(one.mean, other.mean)
    assert np.array_equal(one.covariance, other.covariance)
    assert one.noise_factor == other.noise_factor


def test_the_same_configuration_twice_is_no_second_witness() -> None:
    prior = Belief(np.zeros(1), np.array([[0.04]]))
    effects, noise = np.ones((1, 1)), np.array([0.05])
    once = updated(prior, Observations(np.array([0.1]), effects, noise))
    many = updated(
        prior, Observations(np.full(9, 0.1), np.repeat(effects, 9, axis=0), np.repeat(noise, 9))
    )
    assert many.covariance == pytest.approx(once.covariance)


def test_one_odd_run_moves_little() -> None:
    """Five runs agree on 10 % slower, one says five times as long."""
    prior = Belief(np.zeros(1), np.array([[0.04]]))
    effects = np.linspace(0.9, 1.1, 6)[:, None]
    errors, noise = np.array([0.1, 0.11, 0.09, 0.1, 0.1, 1.6]), np.full(6, 0.03)
    seen = Observations(errors, effects, noise)
    robust, plain = updated(prior, seen), gaussian(prior, seen)
    assert robust.mean[0] == pytest.approx(0.1, abs=0.03)
    assert plain.mean[0] > 0.25, "what the weights protect from"


def test_runs_that_disagree_make_a_noisy_site() -> None:
    prior = Belief(np.zeros(1), np.array([[0.04]]))
    effects, noise = np.linspace(0.9, 1.1, 8)[:, None], np.full(8, 0.03)
    steady = updated(prior, Observations(np.full(8, 0.1), effects, noise))
    errors = np.array([0.3, -0.2, 0.25, -0.15, 0.2, -0.3, 0.3, -0.1])
    noisy = updated(prior, Observations(errors, effects, noise))
    assert steady.noise_factor < 0.6
    assert noisy.noise_factor > 5


def covered(sites: int, runs: int, draw_noise: float, spikes: float) -> float:
    """Share of further runs inside the 80 % interval after `runs` runs of each of many sites."""
    random = np.random.default_rng(11)
    deviations = np.array([0.08, 0.3, 0.1])
    prior, noise = Belief(np.zeros(3), np.diag(deviations**2)), 0.04
    inside: list[Floats] = []
    for _ in range(sites):
        truth = random.normal(0, deviations)
        effects = np.column_stack([random.uniform(0.3, 0.8, (runs + 20, 2)), np.ones(runs + 20)])
        errors = effects @ truth + random.normal(0, draw_noise, len(effects))
        errors = errors + spikes * (random.uniform(size=len(errors)) < 0.1)
        shown = Observations(errors[:runs], effects[:runs], np.full(runs, noise))
        belief = updated(prior, shown)
        rest = effects[runs:]
        deviation = belief.deviation(rest, noise)
        inside.append(np.abs(errors[runs:] - belief.shift(rest)) <= EDGE * deviation)
    return float(np.mean(inside))


@pytest.mark.parametrize("runs", [0, 1, 3, 10])
def test_intervals_hold_on_sites_drawn_from_the_model(runs: int) -> None:
    assert covered(100, runs, draw_noise=0.04, spikes=0.0) == pytest.approx(0.8, abs=0.07)


def test_intervals_hold_on_sites_that_are_not_like_the_model() -> None:
    """Twice the noise, or every tenth run held up: own runs show it."""
    blind, seeing = (covered(60, runs, draw_noise=0.07, spikes=0.0) for runs in (1, 25))
    assert seeing > blind
    assert seeing == pytest.approx(0.8, abs=0.12)
    assert covered(60, 10, draw_noise=0.04, spikes=0.3) == pytest.approx(0.8, abs=0.1)


REST = Belief(np.zeros(1), np.array([[0.01]]), rest=Rest(0.1, 2.0, np.zeros((0, 2))))


def test_the_rest_is_that_of_a_gaussian_process_computed_at_once() -> None:
    """One joint normal distribution of what was seen and of what was not, conditioned."""
    random = np.random.default_rng(8)
    effects, places = random.uniform(0, 1, (6, 1)), random.uniform(0, 6, (6, 2))
    errors, noise = random.normal(0, 0.1, 4), np.full(4, 0.03)
    apart = ((places[:, None] - places) ** 2).sum(axis=-1)
    joint = 0.01 * effects @ effects.T + 0.01 * np.exp(-apart / 8)
    seen = joint[:4, :4] + np.diag(noise**2)
    mean = joint[4:, :4] @ np.linalg.solve(seen, errors)
    left = joint[4:, 4:] - joint[4:, :4] @ np.linalg.solve(seen, joint[:4, 4:])
    found = gaussian(REST, Observations(errors, effects[:4], noise, places[:4]))
    assert found.shift(effects[4:], places[4:]) == pytest.approx(mean, abs=1e-5)
    assert found.variance(effects[4:], places[4:]) == pytest.approx(np.diag(left), abs=1e-5)


def test_a_configuration_like_one_that_was_seen_is_known_nearly_exactly() -> None:
    effects, noise = np.ones((1, 1)), np.array([0.01])
    here, near, far = (np.array([[place, 3.0]]) for place in (2.0, 2.5, 40.0))
    belief = updated(REST, Observations(np.array([0.15]), effects, noise, here))
    shifts = [belief.shift(effects, one)[0] for one in (here, near, far)]
    assert shifts[0] == pytest.approx(0.15, abs=0.005)
    assert shifts[1] == pytest.approx(shifts[0], abs=0.01)
    assert shifts[2] == pytest.approx(0.075, abs=0.01), "the multiplier's half of it"
    deviations = [belief.deviation(effects, noise, one)[0] for one in (here, near, far)]
    assert deviations[0] < 0.02 < deviations[1] < deviations[2]


def test_places_in_any_order_and_twice_teach_the_same() -> None:
    random = np.random.default_rng(9)
    effects, errors = random.uniform(0, 1, (5, 1)), random.normal(0, 0.1, 5)
    places, noise = random.integers(0, 3, (5, 2)).astype(float), np.full(5, 0.03)
    one, other = (
        updated(REST, Observations(errors[rows], effects[rows], noise[rows], places[rows]))
        for rows in (np.arange(5), random.permutation(5))
    )
    assert np.array_equal(one.mean, other.mean)
    assert one.rest is not None
    assert other.rest is not None
    assert np.array_equal(one.rest.seen, other.rest.seen)


def test_rates_without_places_leave_the_rest_open() -> None:
    rate = Observations(np.array([0.05]), np.ones((1, 1)), np.array([0.02]))
    belief = updated(REST, rate)
    assert belief.rest == REST.rest
    assert belief.variance(np.ones((1, 1)), np.zeros((1, 2)))[0] > 0.1**2


# -- Where configurations lie among others ------------------------------------------------------


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
