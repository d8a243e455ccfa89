"""Spares against the binomial formula and against drawn outages; what a preemption breaks off."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpctrain.base.units import Duration
from hpctrain.serve.plan.availability import (
    ENGINE_START_SECONDS,
    Outages,
    availability,
    drained,
    load_seconds,
    outages,
    overlap_share,
    shares_of_day,
    spares_for,
)
from hpctrain.spec.loader import PACKAGED_PROFILES, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import DrainSpec

PREEMPTIBLE = "preemptible"


def packaged_profile(name: str) -> ClusterProfile:
    return load_profile(PACKAGED_PROFILES / f"{name}.yaml").document


@pytest.mark.parametrize(("needed", "count"), [(1, 1), (4, 5), (10, 13)])
def test_one_replica_per_node_is_the_binomial_distribution(needed: int, count: int) -> None:
    away = 0.03
    expected = sum(
        math.comb(count, up) * (1 - away) ** up * away ** (count - up)
        for up in range(needed, count + 1)
    )
    assert availability(Outages(away, 0.0, 1), needed, count) == pytest.approx(expected)
    assert availability(Outages(0.0, away, 1), needed, count) == pytest.approx(expected)


def test_replicas_on_one_node_fail_together() -> None:
    """Drawn: nodes of two replicas, of which each is taken by itself as well."""
    both = Outages(node_share=0.05, own_share=0.04, replicas_per_node=2)
    generator = np.random.default_rng(1)
    nodes = generator.random((200_000, 3)) >= both.node_share
    replicas = generator.random((200_000, 6)) >= both.own_share
    up = (np.repeat(nodes, 2, axis=1) & replicas)[:, :5].sum(axis=1)
    assert availability(both, 4, 5) == pytest.approx(float((up >= 4).mean()), abs=0.003)
    alone = Outages(node_share=0.05, own_share=0.04, replicas_per_node=1)
    assert availability(both, 4, 5) < availability(alone, 4, 5)


def test_as_few_spares_as_it_takes() -> None:
    found = Outages(0.01, 0.05, 1)
    spare = spares_for(found, 8, 0.999)
    assert spare is not None and spare > 0
    assert availability(found, 8, 8 + spare) >= 0.999 > availability(found, 8, 8 + spare - 1)
    assert spares_for(Outages(0.0, 0.0, 1), 8, 0.999999) == 0
    assert spares_for(Outages(0.0, 0.9, 1), 50, 0.99) is None


def test_outages_come_from_the_profile() -> None:
    profile = packaged_profile("h100x16")
    assert profile.reliability is not None and profile.reliability.preemption_mtbf is not None
    steady = outages(profile, "gpu", gpus=4, load=300.0, drain=60.0)
    mtbf, restart = float(profile.reliability.node_mtbf), float(profile.reliability.restart)
    assert steady.node_share == pytest.approx(restart / (mtbf + restart))
    assert steady.own_share == 0 and steady.replicas_per_node == 2
    taken = outages(profile, PREEMPTIBLE, gpus=16, load=900.0, drain=60.0)
    every = float(profile.reliability.preemption_mtbf)
    assert taken.own_share == pytest.approx(960 / (every + 960))
    assert taken.node_share == pytest.approx(900 / (mtbf / 2 + 900))
    assert "12 h" in taken.reasons[1] and taken.replicas_per_node == 1


def test_a_preemption_breaks_off_what_the_grace_does_not_hold() -> None:
    """Drawn: requests of 30 or 200 s; those with more than 115 s to go are lost."""
    profile, rate = packaged_profile("h100x16"), 0.5
    generator = np.random.default_rng(3)
    seconds = generator.choice([30.0, 200.0], 60_000)
    found = drained(
        profile,
        PREEMPTIBLE,
        DrainSpec(longest=Duration(180)),
        replica_rate=rate,
        e2e_seconds=seconds,
    )
    assert found.seconds == 115  # 2 min of grace without 5 s of notice
    begins = np.cumsum(generator.exponential(1 / rate, len(seconds)))
    ends = begins + seconds
    moments = generator.uniform(begins[1000], begins[-1000], 500)
    lost = [np.sum((begins < moment) & (ends > moment + 115)) for moment in moments]
    assert found.lost_requests == pytest.approx(float(np.mean(lost)), rel=0.05)
    assert found.warning is not None and "broken off" in found.warning
    short = drained(
        profile,
        PREEMPTIBLE,
        DrainSpec(longest=Duration(100)),
        replica_rate=rate,
        e2e_seconds=seconds,
    )
    assert short.seconds == 100 and short.warning is None
    fixed = drained(profile, "gpu", DrainSpec(), replica_rate=rate, e2e_seconds=seconds)
    assert fixed.seconds == 120 and fixed.warning is None


def test_weights_are_read_and_engines_start() -> None:
    profile = packaged_profile("h100x16")
    rate = float(profile.filesystems[0].read_bandwidth)
    assert load_seconds(profile, 140e9, 1, None) == 140e9 / rate + ENGINE_START_SECONDS
    assert load_seconds(profile, 140e9, 1, Duration(17)) == 17


def test_successors_overlap() -> None:
    assert overlap_share(None, 300) == 0
    assert overlap_share(86400, 400) == pytest.approx(600 / 85800)
    assert overlap_share(600, 400) == math.inf


def test_the_last_time_of_a_day_holds_until_the_first() -> None:
    assert shares_of_day({"20:00": 0.3, "08:30": 1}) == [(11.5, 1), (12.5, 0.3)]
    assert shares_of_day({"00:00": 1}) == [(24, 1)]
