"""Ranges, ticks and numbers of axes."""

from __future__ import annotations

import pytest

from hpctrain.page.scales import clock, compact_number, log_scale, percent, scale_of, time_scale

GIB = 2**30


@pytest.mark.parametrize(
    "values, ticks",
    [
        ([0.3, 9.7], (0, 2, 4, 6, 8, 10)),
        ([5.0], (4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6)),
        ([], (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([None, float("nan")], (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([-1.0, 1.0], (-1, -0.5, 0, 0.5, 1)),
    ],
)
def test_ticks_are_round_numbers_around_the_data(values: list[float | None],
                                                 ticks: tuple[float, ...]) -> None:  # fmt: skip
    assert scale_of(values).ticks == pytest.approx(ticks)


def test_a_constant_has_a_place_in_the_middle() -> None:
    scale = scale_of([5.0, 5.0])
    assert scale.low < 5 < scale.high and 0.2 < scale.place(5.0) < 0.8


def test_ticks_of_bytes_and_of_time_are_round_in_their_units() -> None:
    bytes_ticks = scale_of([70 * GIB], from_zero=True, quantity="bytes").ticks
    assert [tick / GIB for tick in bytes_ticks] == [0, 20, 40, 60, 80]
    hours = scale_of([9 * 3600], from_zero=True, quantity="seconds").ticks
    assert [tick / 3600 for tick in hours] == [0, 2, 4, 6, 8, 10]


def test_elapsed_time_has_ticks_at_whole_units() -> None:
    assert time_scale(90).ticks == (0, 15, 30, 45, 60, 75, 90)
    assert [tick / 3600 for tick in time_scale(20 * 3600).ticks] == [0, 6, 12, 18]
    assert [tick / 86400 for tick in time_scale(40 * 86400).ticks] == [0, 10, 20, 30, 40]
    assert time_scale(0).high > 0 and time_scale(float("nan")).high > 0


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    scale = log_scale([0.02, 300.0, -1.0, 0.0])
    assert scale.ticks == pytest.approx((0.01, 0.1, 1, 10, 100, 1000))
    assert scale.place(1.0) == pytest.approx(0.4) and scale.place(0.0) == 0.0


@pytest.mark.parametrize(
    "number, text",
    [(0, "0"), (0.5, "0.5"), (999, "999"), (12_500, "12.5k"), (3e6, "3M"), (1.8e11, "180B"),
     (8e-05, "8e-5"), (1.2e20, "1.2e20"), (-2000, "-2k")],
)  # fmt: skip
def test_numbers_of_axes_are_short(number: float, text: str) -> None:
    assert compact_number(number) == text


def test_elapsed_time_and_shares_are_written_for_people() -> None:
    assert [clock(s) for s in (0, 0.25, 45, 300, 5400, 194_400)] == [
        *("0 s", "0.25 s", "45 s", "5 min", "1 h 30 min", "2 d 6 h"),
    ]
    assert [percent(v) for v in (0.005, 0.42, 0.992)] == ["0.5%", "42%", "99.2%"]
