"""Curves and timelines with fewer points: what can be seen stays."""

from __future__ import annotations

import random

from hpctrain.telemetry.thinning import averaged, coarse_segments, thinned
from hpctrain.telemetry.timeline import Category, Segment


def test_a_short_curve_is_left_as_it_is() -> None:
    points = [(1.0, 2.0), (2.0, None), (3.0, float("nan"))]
    assert thinned(points) == points


def test_every_extreme_of_a_long_curve_survives_in_order() -> None:
    dice = random.Random(1)
    points = [(float(step), dice.random()) for step in range(50_000)]
    points[123] = (123.0, 7.0)
    points[49_000] = (49_000.0, -7.0)
    found = thinned(points, 100)
    assert len(found) <= 400 and found == sorted(found)
    assert found[0] == points[0] and found[-1] == points[-1]
    assert {(123.0, 7.0), (49_000.0, -7.0)} <= set(found)


def test_a_gap_survives_and_takes_no_extreme_with_it() -> None:
    points: list[tuple[float, float | None]] = [(float(step), 1.0) for step in range(10_000)]
    points[5_001], points[5_002] = (5_001.0, None), (5_002.0, 3.0)
    assert {(5_001.0, None), (5_002.0, 3.0)} <= set(thinned(points, 100))


def test_steps_that_are_missing_leave_their_parts_empty() -> None:
    points = [(float(step), 1.0) for step in [*range(3_000), *range(90_000, 93_000)]]
    found = thinned(points, 100)
    assert not [x for x, _ in found if 3_000 <= x < 90_000] and found[-1][0] == 92_999.0


def test_means_are_of_what_is_known() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (3.0, None), (4.0, 5.0), (5.0, None), (6.0, float("nan"))]
    assert averaged(points, 3) == [(2.0, 2.0), (4.0, 5.0), (6.0, None)]


def test_a_coarse_timeline_has_no_gap_and_keeps_what_is_long() -> None:
    segments, now = [], 0
    for number in range(4_000):
        for category, length in ((Category.PRODUCTIVE, 90), (Category.SAVING, 10)):
            segments.append(Segment(now, now + length, category, None))
            now += length
        if number == 2_000:
            segments.append(Segment(now, now + 50_000, Category.DOWN, "crash"))
            now += 50_000
    found = coarse_segments(segments, 500)
    assert len(found) <= 1_000
    assert [one.end for one in found[:-1]] == [one.start for one in found[1:]]
    assert (found[0].start, found[-1].end) == (0, now)
    down = [one for one in found if one.category is Category.DOWN]
    assert [one.end - one.start for one in down] == [50_000]
    assert {one.category for one in found} == {Category.PRODUCTIVE, Category.DOWN}
