"""How long a replica may take to leave, and what a shorter time breaks off, counted by hand."""

from __future__ import annotations

import random

import pytest

from hpctrain.base.units import Duration
from hpctrain.serve.plan.leaving import LeaveTimes, broken_off, short_grace, term_seconds
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile.slurm import PartitionProfile, PreemptionProfile

TIMES = LeaveTimes(notice_seconds=5.0, drain_seconds=40.0)


def partition(mode: str = "requeue", grace: float = 0.0) -> PartitionProfile:
    preemption = PreemptionProfile.model_validate({"mode": mode, "grace": f"{grace:g}s"})
    return PartitionProfile(name="train", preemption=preemption)


def test_the_warning_is_the_sum_of_the_parts_and_at_most_half_of_the_limit() -> None:
    assert TIMES.whole_seconds == 60.0
    assert TIMES.warning_seconds(3600.0) == 120
    assert "120 s before the time limit: 60 s for Slurm, 5 s until" in TIMES.warning_sentence(3600)
    assert TIMES.warning_seconds(100.0) == 50
    assert TIMES.warning_sentence(100.0).endswith("cut to half of the limit")


def test_what_is_broken_off_is_what_a_simulation_counts() -> None:
    """Poisson arrivals before the withdrawal; a request is lost if it would end too late."""
    chance = random.Random(7)
    sample = [chance.expovariate(1 / 8.0) for _ in range(400)]
    rate, left_seconds, rounds, lost = 3.0, 6.0, 2000, 0
    for _ in range(rounds):
        began = 0.0
        while (began := began + chance.expovariate(rate)) < 120.0:
            lost += chance.choice(sample) > began + left_seconds
    expected = broken_off(rate, left_seconds, sample)
    assert lost / rounds == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(
    ("grace", "words"),
    [
        (60.0, None),
        (20.0, "about 20 requests"),  # 2 x (25 - (20 - 5)): 10 s too late, at 2 a second
        (0.0, "about 50 requests"),  # everything that has begun: 2 x 25
        (32.0, "less than one request"),
    ],
)
def test_a_short_grace_is_said_with_what_it_costs(grace: float, words: str | None) -> None:
    found = short_grace(TIMES, partition(grace=grace), 2.0, [25.0] * 4)
    assert found is None if words is None else found is not None and words in found
    assert short_grace(TIMES, partition("off", grace), 2.0, [25.0]) is None


def test_a_job_takes_the_longer_of_grace_and_kill_wait() -> None:
    profile = load_profile(find_profile("sandbox")).document
    assert profile.slurm.kill_wait == Duration(5)
    assert term_seconds(profile, partition(grace=20.0)) == 20.0
    assert term_seconds(profile, partition(grace=2.0)) == 5.0
    assert term_seconds(profile, partition("off", 20.0)) == 5.0
