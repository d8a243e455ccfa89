"""The bench of the trainer's overhead: turns, and what it says of them."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.overhead.__main__ import told
from bench.overhead.jobs import JOBS
from bench.overhead.turns import BARE, LEAST_PAIRS, OURS, STEPS_PER_TURN, Took, Turns
from bench.pairs import interval, ratio
from hpctrain.spec.engines.registry import ENGINES


def kinds_of(seconds: float, round_seconds: float) -> tuple[list[str], Turns]:
    turns = Turns(seconds, lambda: None, lambda own: round_seconds)
    return list(turns), turns


def test_both_have_as_many_turns_and_come_first_as_often() -> None:
    kinds, turns = kinds_of(seconds=30.0, round_seconds=1.0)
    assert {len(took.wall) for took in turns.found.values()} == {30}
    assert {len(took.cpu) for took in turns.found.values()} == {30}
    assert len(kinds) == (30 + 4) * 2 * STEPS_PER_TURN, "four rounds warm up"
    first = kinds[4 * 2 * STEPS_PER_TURN :: 2 * STEPS_PER_TURN]
    assert Counter(first) == {BARE: 15, OURS: 15}


def test_a_slow_machine_still_gives_pairs() -> None:
    _, turns = kinds_of(seconds=1.0, round_seconds=60.0)
    assert len(turns.found[OURS].wall) == LEAST_PAIRS


@pytest.mark.parametrize(
    ("ours", "kept", "words"),
    [
        ([1.01] * 20, True, "1.0100"),
        ([1.05] * 20, False, "1.0500"),
        ([0.9] * 10 + [1.2] * 10, True, "not sure"),
    ],
)
def test_only_what_is_beyond_doubt_breaks_the_limit(
    ours: list[float], kept: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {BARE: Took([1.0] * 20, [1.0] * 20), OURS: Took(ours, ours)}
    assert told("ddp", found, 1.02) is kept
    line = capsys.readouterr().out
    assert words in line
    assert ("not sure" in line) == (words == "not sure")


def test_the_interval_of_a_median() -> None:
    """Conover's table: for 100 values the 40th and the 60th, here counted from 0."""
    assert interval([float(n) for n in range(100)]) == (40.0, 59.0)
    found = ratio([1.0, 3.0, 2.0])
    assert (found.median, found.count) == (2.0, 3)
    assert found.low <= found.median <= found.high


def test_every_engine_is_measured_on_the_same_work() -> None:
    assert set(JOBS) == set(ENGINES)
    sizes = {(job.global_batch_size, job.seq_length, job.vocab_size) for job in JOBS.values()}
    assert len(sizes) == 1
