"""Quantities: what is read, what is refused, and that printing loses nothing."""

from __future__ import annotations

import random

import pytest

from hpctrain.base.units import (
    Bandwidth,
    ByteSize,
    Duration,
    FlopRate,
    Money,
    TokenCount,
    short_bytes,
    short_duration,
)

READ = [
    (Duration, "24:00:00", 86400),
    (Duration, "1-12:00:00", 129600),
    (Duration, "90s", 90),
    (Duration, "30min", 1800),
    (Duration, "1.5h", 5400),
    (Duration, " 2 d ", 172800),
    (ByteSize, "80GiB", 80 * 2**30),
    (ByteSize, "500 MB", 500e6),
    (ByteSize, "1,024MiB", 2**30),
    (Bandwidth, "200Gb/s", 25e9),
    (Bandwidth, "300GB/s", 300e9),
    (FlopRate, "989.4TFLOP/s", 989.4e12),
    (TokenCount, "300B", 300e9),
    (TokenCount, "1.5T", 1.5e12),
    (TokenCount, "1_000_000", 1e6),
    (TokenCount, 20, 20),
]


@pytest.mark.parametrize(("kind", "text", "number"), READ)
def test_reads(kind: type, text: object, number: float) -> None:
    assert kind.accept(text) == number


REFUSED = [
    (Duration, 1440),
    (Duration, "1440"),
    (Duration, "24:00"),
    (Duration, "00:60:00"),
    (Duration, "-5s"),
    (Duration, True),
    (ByteSize, "80"),
    (ByteSize, "80gb"),
    (ByteSize, "1,5TB"),  # fifteen to a parser that drops commas, one and a half to its author
    (ByteSize, "9" * 400 + "B"),
    (ByteSize, None),
    (Bandwidth, "200Gb"),
    (TokenCount, "300b"),
    (TokenCount, -1),
    (TokenCount, float("nan")),
    (TokenCount, float("inf")),
    (TokenCount, False),
]


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_refuses_with_an_example(kind: type, value: object) -> None:
    with pytest.raises(ValueError, match="such as `"):
        kind.accept(value)


@pytest.mark.parametrize("kind", [Duration, ByteSize, Bandwidth, FlopRate, TokenCount])
def test_what_is_printed_is_read_again(kind: type) -> None:
    rng = random.Random(1)
    scales = sorted(kind.suffixes.values())
    for _ in range(3000):
        number = float(rng.randrange(1, 10 ** rng.randrange(1, 13)))
        value = kind(number * rng.choice(scales))
        again = kind.parse(str(value))
        assert again == pytest.approx(value, rel=1e-15), str(value)
        assert len(str(value)) < 40


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ByteSize(80 * 2**30), "80GiB"),
        (ByteSize(123456789012), "123456789.012kB"),
        (ByteSize(12345678901234567), "12345678901234568B"),
        (TokenCount(12345678901), "12345678.901k"),
        (FlopRate(1e6), "0.001GFLOP/s"),
        (Bandwidth(300e9), "300GB/s"),  # not 2.4Tb/s, beside others in GB/s
        (Bandwidth(25e9), "25GB/s"),
        (Duration(86400 * 2 + 5), "2-00:00:05"),
        (Duration(0), "0s"),
        (Duration(0.25), "0.25s"),
    ],
)
def test_prints(value: object, text: str) -> None:
    assert str(value) == text


def test_slurm_form_of_a_duration() -> None:
    assert Duration.parse("7d").slurm() == "7-00:00:00"
    assert Duration.parse("90s").slurm() == "00:01:30"


def test_short_forms_for_people() -> None:
    assert short_bytes(55.44 * 2**30) == "55.4 GiB"
    assert short_bytes(12) == "12 B"
    assert short_duration(0.0125) == "12 ms"
    assert short_duration(200) == "3.33 min"
    assert short_duration(12) == "12 s"


@pytest.mark.parametrize(
    ("text", "amount", "currency"),
    [
        ("200000usd", 200_000, "USD"),
        ("200,000 USD", 200_000, "USD"),
        ("1.5M EUR", 1.5e6, "EUR"),
        ("200kchf", 200_000, "CHF"),
        ("12Mxn", 12, "MXN"),
        ("0.5usd", 0.5, "USD"),
    ],
)
def test_reads_money(text: str, amount: float, currency: str) -> None:
    money = Money.parse(text)
    assert (money.amount, money.currency) == (amount, currency)
    assert Money.parse(str(money)) == money


@pytest.mark.parametrize(
    "text", ["200000", "$200000", "usd", "-5usd", "0usd", "1,5usd", "5 dollars", "5musd", ""]
)
def test_refuses_money_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as `200000usd`"):
        Money.parse(text)
