"""The prior and the learning curve, on made sources whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from bench.fit_uncertainty import Source, hidden, prior_from, widened
from bench.learning_curve import curve, weighted_quantile
from bench.left_out import LeftOut
from hpctrain.plan.uncertainty.intervals import TIME_NAMES, prior_of

TRUTH = {"everything": 0.12, "network": 0.4}
NOISE = 0.03


def made(seed: int, count: int = 14, rows: int = 15) -> list[Source]:
    """Sources that are off by `everything` and `network` alone."""
    random = np.random.default_rng(seed)
    sources = []
    for _ in range(count):
        effects = np.zeros((rows, len(TIME_NAMES)))
        effects[:, TIME_NAMES.index("everything")] = 1.0
        effects[:, TIME_NAMES.index("network")] = random.uniform(0, 0.5, rows)
        effects[:, TIME_NAMES.index("products")] = random.uniform(0.3, 0.6, rows)
        errors = random.normal(0, NOISE, rows)
        for name, deviation in TRUTH.items():
            errors += effects[:, TIME_NAMES.index(name)] * random.normal(0, deviation)
        sources.append(Source(errors, effects, np.zeros((rows, 3)), np.zeros((rows, 2))))
    return sources


@pytest.fixture(scope="module")
def doubt():  # type: ignore[no-untyped-def]
    return prior_from(made(1), TIME_NAMES, TIME_NAMES[8:], rest=False)


def test_the_fit_finds_how_much_sources_vary(doubt) -> None:  # type: ignore[no-untyped-def]
    assert doubt.multipliers["network"] == pytest.approx(TRUTH["network"], rel=0.5)
    alike = np.hypot(doubt.multipliers["everything"], 0.45 * doubt.multipliers["products"])
    assert alike == pytest.approx(TRUTH["everything"], rel=0.4)
    assert doubt.noise == pytest.approx(NOISE, rel=0.4)
    assert 0.7 < doubt.widening < 1.3


def test_own_rows_teach_unseen_sources(doubt) -> None:  # type: ignore[no-untyped-def]
    errors = {}
    for count in (0, 1, 5):
        parts = [hidden(source, doubt, TIME_NAMES, count, 3, seed=5) for source in made(2)]
        errors[count] = float(np.median(np.abs(np.concatenate([one.after for one in parts]))))
        inside = np.concatenate([np.abs(one.after) <= 1.2816 * one.deviation for one in parts])
        assert inside.mean() == pytest.approx(0.8, abs=0.12)
    assert errors[5] < errors[1] < errors[0]
    assert errors[5] < 1.5 * 0.6745 * NOISE, "what is left is noise"


def test_hidden_rows_are_the_others(doubt) -> None:  # type: ignore[no-untyped-def]
    source = made(3, count=1, rows=8)[0]
    assert len(hidden(source, doubt, TIME_NAMES, 3, 4, seed=1).after) == 4 * 5
    none = hidden(source, doubt, TIME_NAMES, 0, 4, seed=1)
    assert np.array_equal(none.before, none.after), "nothing was seen"
    belief = prior_of(doubt, TIME_NAMES)
    assert belief.noise_factor == 1.0


def made_alike(seed: int, count: int = 8, rows: int = 9) -> list[Source]:
    """Sources whose rows err by what those at the same of three places share, and by nothing else.

    Places are 10 doublings apart, sources have nothing in common.
    """
    random = np.random.default_rng(seed)
    sources = []
    for _ in range(count):
        at = random.integers(0, 3, rows)
        errors = random.normal(0, 0.1, 3)[at] + random.normal(0, 0.01, rows)
        effects = np.zeros((rows, len(TIME_NAMES)))
        effects[:, TIME_NAMES.index("everything")] = 1.0
        sources.append(Source(errors, effects, np.zeros((rows, 3)), 10.0 * at[:, None]))
    return sources


def test_what_is_alike_is_found_and_predicted() -> None:
    found = prior_from(made_alike(1), TIME_NAMES, TIME_NAMES[8:])
    assert found.rest == pytest.approx(0.1, rel=0.3)
    assert found.noise == pytest.approx(0.01, rel=0.5)
    assert found.multipliers["everything"] < 0.05
    blind = found.model_copy(update={"rest": 0.0, "noise": 0.1})
    errors = {
        name: float(np.median(np.abs(np.concatenate([one.after for one in parts]))))
        for name, parts in (
            (name, [hidden(source, doubt, TIME_NAMES, 5, 3, seed=5) for source in made_alike(2)])
            for name, doubt in (("seeing", found), ("blind", blind))
        )
    }
    assert errors["seeing"] < 0.4 * errors["blind"]


def test_widenings_make_intervals_hold_for_sources_and_rows_alike(doubt) -> None:  # type: ignore[no-untyped-def]
    """One large source that is far off, many small ones that are not."""
    random = np.random.default_rng(4)

    def source(rows: int, scale: float) -> Source:
        effects = np.zeros((rows, len(TIME_NAMES)))
        places = 100.0 * np.arange(rows)[:, None]
        errors = random.choice([-1, 1], rows) * scale * random.uniform(0.5, 1.5, rows)
        return Source(errors, effects, np.zeros((rows, 3)), places)

    sources = [source(90, 0.3), *(source(9, 0.03) for _ in range(9))]
    found = widened(sources, doubt, TIME_NAMES)
    rows = [hidden(one, found, TIME_NAMES, 0, 1, seed=0) for one in sources]
    inside = [np.abs(one.after) <= 1.2816 * one.deviation for one in rows]
    by_source = np.mean([one.mean() for one in inside])
    assert (by_source + np.concatenate(inside).mean()) / 2 == pytest.approx(0.8, abs=0.02)


def test_the_curve_ends_where_no_source_has_enough_rows(doubt) -> None:  # type: ignore[no-untyped-def]
    source = made(4, count=1, rows=5)[0]
    rows = LeftOut(
        ("A",) * 5,
        np.exp(source.errors),
        np.ones(5),
        source.effects,
        source.classes,
        source.places,
        ("H100",) * 5,
    )
    assert [point.count for point in curve(rows, {"A": doubt})] == [0, 1, 2]


def test_a_weighted_quantile() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 8.0])
    assert weighted_quantile(values, weights, 0.5) == 2.0
    assert weighted_quantile(values, weights, 0.05) == 1.0
