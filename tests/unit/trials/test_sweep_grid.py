"""The grid of a sweep: its grammar, its product, names of runs, and a smaller grid."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.trials.sweep_grid import (
    GridAxis,
    grid_points,
    nearest_smaller,
    parse_grid,
    short_fields,
)


def test_the_product_in_the_order_of_the_options() -> None:
    axes = parse_grid(["optimizer.lr=1e-4, 3e-4", "batch.global=256,512"])
    points = grid_points(axes, "gpt-tiny")
    assert [point.name for point in points] == [
        "gpt-tiny-lr1e-4-gb256",
        "gpt-tiny-lr1e-4-gb512",
        "gpt-tiny-lr3e-4-gb256",
        "gpt-tiny-lr3e-4-gb512",
    ]
    assert points[1].overrides == ("optimizer.lr=1e-4", "batch.global=512")
    assert str(axes[0]) == "--grid optimizer.lr=1e-4,3e-4"


def test_commas_in_lists_and_quotes_do_not_separate() -> None:
    (axis,) = parse_grid(["parallel.stages=[1,2],[2,1],'a,b'"])
    assert axis.values == ("[1,2]", "[2,1]", "'a,b'")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "a sweep needs a grid"),
        (["optimizer.lr"], "expected FIELD=VALUE,VALUE"),
        (["optimizer.lr=1,,2"], "expected FIELD=VALUE,VALUE"),
        (["=1,2"], "expected FIELD=VALUE,VALUE"),
        (["name=a,b"], "names of the runs are made from their values"),
        (["seed=1,2", "seed=3"], "`seed` is given twice"),
        (["seed=1,2,1"], "`1` is there twice"),
        (["parallel.stages=[1,2,[2,1]"], r"a `\]` is missing at the end"),
        (["parallel.stages=[1,2],2,1]"], r"`\]` closes nothing that is open"),
        (["model={a: [1}]"], "`}` closes nothing that is open"),
        (["data.path='a,b"], "a `'` is missing at the end"),
        (["seed=" + ",".join(map(str, range(1001)))], "1,001 points"),
    ],
)
def test_what_makes_no_sense(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_grid(texts)


def test_names_are_distinct_and_short_enough() -> None:
    axes = parse_grid(["data.sources[0].path=/a/b/one,/a/b-one,/ab/one"])
    names = [point.name for point in grid_points(axes, "run")]
    assert names == ["run-p1", "run-p2", "run-p3"], "the values alone give one name"
    long = parse_grid([f"seed={','.join(str(10**8 + n) for n in range(12))}", "optimizer.lr=1,2"])
    names = [point.name for point in grid_points(long, "a" * 63)]
    assert len(set(names)) == 24 and max(map(len, names)) <= 63
    assert names[0].endswith("a-seed100000000-lr1")
    deep = [f"environment.variables.{'X' * 30}{n}=1,2" for n in range(3)]
    names = [point.name for point in grid_points(parse_grid(deep), "gpt")]
    assert names == [f"gpt-p{n}" for n in range(1, 9)]


def test_two_fields_with_one_last_word_are_told_apart() -> None:
    assert short_fields(["optimizer.zero", "other.zero"]) == ["optimizerzero", "otherzero"]
    assert short_fields(["optimizer.lr", "seed"]) == ["lr", "seed"]


AXES = (GridAxis("a", ("1", "2", "3")), GridAxis("b", ("x", "y")))
HOURS = {
    (0, 0): 1.0,
    (0, 1): 2.0,
    (1, 0): 1.0,
    (1, 1): 2.0,
    (2, 0): 1.0,
    (2, 1): 2.0,
}


def test_the_nearest_smaller_grid_leaves_out_as_little_as_possible() -> None:
    found = nearest_smaller(AXES, HOURS, 8.0)
    assert found is not None
    axes, total = found
    assert total == 6.0 and [axis.values for axis in axes] == [("2", "3"), ("x", "y")]
    found = nearest_smaller(AXES, HOURS, 3.5)
    assert found is not None and found[1] == 3.0
    assert nearest_smaller(AXES, HOURS, 0.5) is None
    assert nearest_smaller(AXES, {}, 0.5) is None


def test_what_cannot_run_costs_nothing() -> None:
    hours = {at: one for at, one in HOURS.items() if at[1] == 0}
    found = nearest_smaller(AXES, hours, 2.5)
    assert found is not None and found[1] == 2.0
