from __future__ import annotations

from hpctrain.plan.divisors import common_divisors, divisors, multiples_around, nearest, or_list


def test_divisors_are_complete_and_ascending() -> None:
    for number in range(1, 400):
        assert divisors(number) == tuple(
            part for part in range(1, number + 1) if number % part == 0
        )


def test_common_divisors() -> None:
    assert common_divisors(12, 18, 30) == (1, 2, 3, 6)


def test_nearest_leaves_out_the_value_itself() -> None:
    assert nearest(12, (1, 2, 4, 8, 12, 16, 32)) == (8, 16)
    assert nearest(1, (1, 2, 4)) == (2, 4)
    assert nearest(5, ()) == ()


def test_multiples_around() -> None:
    assert multiples_around(100, 8) == (96, 104)
    assert multiples_around(5, 8) == (8,)
    assert multiples_around(510, 8, limit=508) == (504,)
    assert multiples_around(96, 8) == (104,)


def test_or_list_reads_like_a_sentence() -> None:
    assert or_list([8]) == "8"
    assert or_list([8, 16]) == "8 or 16"
    assert or_list([4, 8, 16]) == "4, 8 or 16"
    assert or_list([]) == "none"
