"""Seconds of collectives: a GPU sends 1e11 bytes/s over NVLink and 1e10 over the network."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cost_specimens import case, changed

from hpctrain.plan.cost.blocks import (
    HOP_SECONDS,
    exchange_seconds,
    gather_seconds,
    members_inside,
    network,
    nvlink,
    reduce_seconds,
    send_seconds,
)

GB = 1e9


def hops(size: float) -> float:
    """Start of a collective: 6 microseconds for each doubling."""
    return 6e-6 * math.log2(size + 1)


@pytest.mark.parametrize(
    ("size", "stride", "inside"),
    [(4, 1, 4), (8, 1, 8), (16, 1, 8), (4, 4, 2), (4, 8, 1), (4, 16, 1), (2, 2, 2), (1, 1, 1)],
)
def test_members_of_one_domain_of_eight(size: int, stride: int, inside: int) -> None:
    assert members_inside(case(), size, stride) == inside


class TestRings:
    def test_inside_a_domain_the_ring_moves_three_quarters(self) -> None:
        assert gather_seconds(case(), 4 * GB, 4, 1) == pytest.approx(0.03 + hops(4))

    def test_all_reduce_is_both_halves(self) -> None:
        assert reduce_seconds(case(), 4 * GB, 4, 1) == pytest.approx(0.06 + 2 * hops(4))

    def test_across_two_domains_all_cards_work_together(self) -> None:
        # half of the tensor comes in over 8 cards of 1e10: 0.05 s; NVLink of 2e11 takes 0.0375
        fast = case(nvlink_bandwidth=2e11)
        assert gather_seconds(fast, 8 * GB, 16, 1) == pytest.approx(0.05 + hops(16))

    def test_the_slower_of_both_links_counts(self) -> None:
        # 15/16 of 8e9 over NVLink of 1e10
        slow = case(nvlink_bandwidth=1e10)
        assert gather_seconds(slow, 8 * GB, 16, 1) == pytest.approx(0.75 + hops(16))

    def test_one_rank_in_each_domain_has_its_own_card_only(self) -> None:
        # stride 8: 4 domains of one member: 3/4 of 4e9 over 1e10
        assert gather_seconds(case(), 4 * GB, 4, 8) == pytest.approx(0.3 + hops(4))

    def test_two_ranks_in_each_domain(self) -> None:
        # stride 4: 2 of the 8 ranks share a domain, 4 domains, two cards: 3/4 x 4e9 / 2e10
        assert gather_seconds(case(), 4 * GB, 8, 4) == pytest.approx(0.15 + hops(8))

    def test_a_wide_domain_keeps_it_on_nvlink(self) -> None:
        assert gather_seconds(case(domain=64), 4 * GB, 4, 8) == pytest.approx(0.03 + hops(4))

    @pytest.mark.parametrize("seconds", [gather_seconds, reduce_seconds])
    def test_alone_costs_nothing(self, seconds) -> None:  # type: ignore[no-untyped-def]
        assert seconds(case(), 4 * GB, 1, 1) == 0
        assert seconds(case(), 4 * GB, 2, 1) > 0

    def test_small_messages_wait_for_their_start(self) -> None:
        assert gather_seconds(case(), 0, 3, 1) == pytest.approx(2 * HOP_SECONDS)


class TestAllToAll:
    def test_inside_a_domain(self) -> None:
        assert exchange_seconds(case(), 3 * GB, 0, 4) == pytest.approx(0.03 + hops(4))

    def test_the_slower_of_both_links_counts(self) -> None:
        assert exchange_seconds(case(), 3 * GB, 2 * GB, 16) == pytest.approx(0.2 + hops(16))
        slow = case(nvlink_bandwidth=1e9)
        assert exchange_seconds(slow, 1.75 * GB, 2 * GB, 16) == pytest.approx(1.75 + hops(16))

    def test_alone_costs_nothing(self) -> None:
        assert exchange_seconds(case(), 0, 0, 1) == 0


class TestMessages:
    def test_to_a_neighbour_and_to_another_domain(self) -> None:
        assert send_seconds(case(), 1 * GB, 4) == pytest.approx(0.01 + 6e-6)
        assert send_seconds(case(), 1 * GB, 8) == pytest.approx(0.1 + 6e-6)


class TestBandwidth:
    def test_shares_of_the_data_sheet(self) -> None:
        one = case(nvlink_efficiency=0.5, network_efficiency=0.2)
        assert (nvlink(one), network(one)) == (pytest.approx(5e10), pytest.approx(2e9))

    @pytest.mark.parametrize(
        ("gpus", "leaf", "expected"), [(64, 64, 1e10), (128, 64, 2.5e9), (128, 0, 1e10)]
    )
    def test_spines_are_oversubscribed_beyond_one_leaf(
        self, gpus: int, leaf: int, expected: float
    ) -> None:
        one = case(dp=gpus, leaf_gpus=leaf, oversubscription=4)
        assert network(one) == pytest.approx(expected)

    def test_nvlink_does_not_pass_the_spine(self) -> None:
        one = case(dp=128, leaf_gpus=64, oversubscription=4)
        assert gather_seconds(one, 4 * GB, 4, 1) == pytest.approx(0.03 + hops(4))


def test_groups_of_any_number_of_cases_at_once() -> None:
    sizes, strides = np.array([1, 4, 16, 4]), np.array([1, 1, 1, 8])
    expected = [0.0, 0.015 + hops(4), 0.01875 + hops(16), 0.15 + hops(4)]
    one = changed(case(), nvlink_bandwidth=np.full(4, 1e11))
    seconds = gather_seconds(one, 2 * GB, sizes, strides)
    assert seconds == pytest.approx(expected)
