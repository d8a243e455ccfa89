"""Pauses between calls of the controller."""

from __future__ import annotations

from hpctrain.slurm.client import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    pauses = Backoff(draw=lambda: 0.0)
    assert [pauses.next_seconds() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_pause_is_shortened_by_up_to_a_half() -> None:
    shortest = Backoff(draw=lambda: 1.0)
    assert [shortest.next_seconds() for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.5]


def test_jobs_that_begin_together_do_not_stay_together() -> None:
    assert len({Backoff().next_seconds() for _ in range(100)}) > 90
