"""How many replicas are wanted: by hours, by load, by nobody asking, and by a person."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.records.service_records import ScalingMemory, ScalingSettings
from hpctrain.serve.router.scaling import (
    LEAST_CALM_SECONDS,
    Load,
    Replicas,
    Wanted,
    scheduled,
    wanted_now,
)

NOW = 1_000_000.0
POLICY = ScalingSettings(count=5, spare=1, least=1, most=8, capacity_rate=10.0)
LEAD_SECONDS = 300.0
QUIET = Load(arrival_rate=1.0, waiting=0.0, kv_share=0.1, idle_since=NOW - 5)


def changed(policy: ScalingSettings, **changes: object) -> ScalingSettings:
    return policy.model_copy(update=changes)


HOURS = changed(POLICY, hours=((480, 1.0), (1200, 0.25)), least=0)


def wanted(
    policy: ScalingSettings,
    load: Load = QUIET,
    memory: ScalingMemory | None = None,
    *,
    kept: int = 5,
    ready: int = 5,
    now: float = NOW,
    minute: float = 600.0,
    asked: int | None = None,
) -> tuple[Wanted, ScalingMemory]:
    return wanted_now(
        policy,
        load,
        Replicas(kept, ready),
        memory or ScalingMemory(),
        now=now,
        local_minute=minute,
        lead_seconds=LEAD_SECONDS,
        asked=asked,
    )


@pytest.mark.parametrize(
    ("minute", "count"),
    [
        (600, 5),  # 10:00
        (1199, 5),  # the evening begins in a minute: nobody leaves early
        (1200, 2),  # 4 carriers x 0.25, and the spare one
        (300, 2),  # 05:00, still last evening's share
        (474, 2),  # 07:54, replicas are ready in 5 min
        (475, 5),  # 07:55
        (1439, 2),
    ],
)
def test_the_table_of_hours(minute: int, count: int) -> None:
    assert scheduled(HOURS, minute, LEAD_SECONDS).count == count


def test_the_table_looks_over_midnight() -> None:
    early = changed(HOURS, hours=((2, 1.0), (1200, 0.25)))
    assert scheduled(early, 1438, 60.0).count == 2
    assert scheduled(early, 1438, LEAD_SECONDS).count == 5


def test_a_share_of_zero_is_no_replica() -> None:
    closed = changed(HOURS, hours=((480, 1.0), (1200, 0.0)))
    assert scheduled(closed, 1300, LEAD_SECONDS).count == 0
    assert wanted(changed(closed, least=2), minute=1300)[0].count == 2


def test_a_person_comes_first() -> None:
    assert wanted(HOURS, asked=3, minute=1300)[0] == Wanted(3, "as a person has asked")


class TestReaction:
    """A service that reacts to load: up at once, down slowly, never between the two."""

    policy = changed(POLICY, react=True, count=3)

    def test_more_requests_than_the_replicas_bear(self) -> None:
        found, memory = wanted(self.policy, replace(QUIET, arrival_rate=45.0), kept=3, ready=3)
        assert (found.count, memory.target) == (6, 6)

    def test_waiting_requests_add_one_at_a_time(self) -> None:
        busy = replace(QUIET, arrival_rate=15.0, waiting=12.0)
        found, memory = wanted(self.policy, busy, kept=3, ready=3)
        assert found == Wanted(4, "12 requests wait in the engines")
        # the one that was added loads: no further one, however long the queue
        again, memory = wanted(self.policy, busy, memory, kept=4, ready=3, now=NOW + 900)
        assert again.count == 4
        # it is ready, and it was not enough
        again, memory = wanted(
            self.policy, replace(busy, waiting=20.0), memory, kept=4, ready=4, now=NOW + 900
        )
        assert again.count == 5

    def test_full_keys_and_values_add_one(self) -> None:
        full = replace(QUIET, arrival_rate=15.0, kv_share=0.95)
        assert wanted(self.policy, full, kept=3, ready=3)[0].count == 4

    def test_no_more_than_the_most(self) -> None:
        assert wanted(self.policy, replace(QUIET, arrival_rate=500.0))[0].count == 8

    def test_one_leaves_after_a_long_calm(self) -> None:
        memory = ScalingMemory(target=5)
        found, memory = wanted(self.policy, QUIET, memory)
        assert found.count == 5
        almost, memory = wanted(self.policy, QUIET, memory, now=NOW + LEAST_CALM_SECONDS - 1)
        assert almost.count == 5
        after, memory = wanted(self.policy, QUIET, memory, now=NOW + LEAST_CALM_SECONDS)
        assert after.count == 4
        # and the next one after as long again
        later, memory = wanted(self.policy, QUIET, memory, now=NOW + LEAST_CALM_SECONDS + 60)
        assert later.count == 4

    @pytest.mark.parametrize(
        "load",
        [
            replace(QUIET, arrival_rate=25.0),  # 3 of the 4 that would remain carry 30, less 30 %
            replace(QUIET, waiting=1.0),
            replace(QUIET, arrival_rate=None),
            replace(QUIET, waiting=None),
        ],
    )
    def test_a_moment_that_is_not_calm_begins_the_wait_again(self, load: Load) -> None:
        _, memory = wanted(self.policy, QUIET, ScalingMemory(target=5))
        _, memory = wanted(self.policy, load, memory, now=NOW + 300)
        found, _ = wanted(self.policy, QUIET, memory, now=NOW + LEAST_CALM_SECONDS + 1)
        assert found.count == 5

    def test_the_table_is_the_floor(self) -> None:
        both = changed(HOURS, react=True)
        memory = ScalingMemory(target=2)
        assert wanted(both, QUIET, memory, minute=600)[0].count == 5
        assert wanted(both, replace(QUIET, arrival_rate=33.0), minute=1300)[0].count == 5

    def test_steady_load_does_not_flap(self) -> None:
        counts, memory = set(), ScalingMemory(target=4)
        for second in range(0, 36_000, 5):
            load = replace(QUIET, arrival_rate=22.0 + (second % 3))
            found, memory = wanted(self.policy, load, memory, kept=4, ready=4, now=NOW + second)
            counts.add(found.count)
        assert counts == {4}


class TestIdle:
    policy = changed(POLICY, least=0, idle_seconds=600.0)

    def test_nobody_asks(self) -> None:
        assert wanted(self.policy, replace(QUIET, idle_since=NOW - 599))[0].count == 5
        found = wanted(self.policy, replace(QUIET, idle_since=NOW - 600))[0]
        assert found == Wanted(0, "no request for 600 s")

    def test_the_first_request_wakes(self) -> None:
        asleep = replace(QUIET, idle_since=NOW - 9000, refused_lately=True)
        assert wanted(self.policy, asleep, kept=0, ready=0)[0].count == 5

    def test_a_request_outside_the_hours_wakes_one(self) -> None:
        closed = changed(self.policy, hours=((480, 1.0), (1200, 0.0)))
        asleep = replace(QUIET, refused_lately=True)
        assert wanted(closed, asleep, kept=0, ready=0, minute=1300)[0].count == 1

    def test_without_idle_the_last_one_stays(self) -> None:
        assert wanted(POLICY, replace(QUIET, idle_since=NOW - 99_999))[0].count == 5
