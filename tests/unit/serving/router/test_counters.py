"""Counts that processes share, and the rate of one client over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.serving.router.counters import Count, Counters


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Counters, Counters]:
    path = tmp_path / "counters"
    return Counters(path, create=True), Counters(path, 1)


def test_processes_add_up(rows: tuple[Counters, Counters]) -> None:
    first, second = rows
    first.ready = 3
    for counters, now in ((first, 100.0), (second, 90.0)):
        counters.begin()
        counters.arrived(now)
        counters.add(Count.IN_FLIGHT, 2.0)
        counters.answered_after(0.02, 700.0)
    assert second.ready == 3
    assert first.total(Count.ARRIVALS) == 2
    assert first.total(Count.LAST_ARRIVAL) == 100.0
    assert first.listening == 2
    assert first.first_bytes().counts[2] == 2, "up to 25 ms"
    assert first.durations().counts[-1] == 2, "beyond all ends"
    assert first.durations().sum_seconds == 1400.0
    second.begin()
    assert first.total(Count.IN_FLIGHT) == 2, "those of the process that has died are forgotten"


def test_the_rate_of_one_client(rows: tuple[Counters, Counters]) -> None:
    first, second = rows
    begun = [(first, second)[n % 2].too_fast(b"one", 4.0, 100.0) for n in range(6)]
    assert begun[:4] == [None] * 4, "a second's worth at once, whichever process it comes to"
    assert begun[4] == begun[5] == pytest.approx(0.25)
    assert first.too_fast(b"other", 4.0, 100.0) is None
    assert first.too_fast(b"one", 4.0, 100.24) is not None
    assert second.too_fast(b"one", 4.0, 100.26) is None
    assert first.too_fast(b"one", 4.0, 100.27) is not None


def test_a_rate_below_one(rows: tuple[Counters, Counters]) -> None:
    counters, _ = rows
    assert counters.too_fast(b"one", 0.1, 0.0) is None
    assert counters.too_fast(b"one", 0.1, 9.9) == pytest.approx(0.1)
    assert counters.too_fast(b"one", 0.1, 10.0) is None
