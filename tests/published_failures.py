"""Failure rates and a formula that others have published, for tests of forecasts."""

from __future__ import annotations

# Kokolis et al. 2024 (arXiv 2410.21680), RSC-2.
RSC2_FAILURES_PER_NODE_DAY = 2.34e-3

# "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in
# 54 days on 16,384 H100 (2,048 nodes), software included; more than 90% effective training time.
LLAMA3_FAILURES_PER_NODE_DAY = 419 / (54 * 2048)


def first_order_ettr(
    failures_per_second: float, start_seconds: float, interval_seconds: float, stall_seconds: float
) -> float:
    """(1 - N r_f (u0 + dt/2)) / (1 + w/dt): Kokolis et al. 2024, arXiv 2410.21680, E[ETTR].

    N r_f is `failures_per_second` of the whole job; u0 the restart, dt the interval, w the stall.
    Good while failures are rare within one interval; may be negative beyond that.
    """
    unlost = 1 - failures_per_second * (start_seconds + interval_seconds / 2)
    return unlost / (1 + stall_seconds / interval_seconds)
