"""Played runs lie around the published ones; few trials, so only roughly."""

from __future__ import annotations

import pytest

from bench.simulate_published import CASES, played, report

PUBLISHED = {"Llama 3": 0.90, "Meta RSC-1": 0.89, "OPT-175B": 0.59}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_ratio_lies_within_what_is_not_published(name: str) -> None:
    case = next(case for case in CASES if case.name.startswith(name))
    worst, _, _ = played(case, case.low, 4)
    best, _, _ = played(case, case.high, 4)
    assert worst < PUBLISHED[name] < best + 0.01


def test_every_case_says_its_sources_and_what_is_assumed() -> None:
    lines = report(1)
    for case in CASES:
        assert case.sources and case.assumed and f"  published  {case.published}" in lines
