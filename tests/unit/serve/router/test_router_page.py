"""Numbers in docs/serving-router.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.serve.router import decide, haproxy, rotation, scaling

PAGE = Path(__file__).resolve().parents[4] / "docs" / "serving-router.md"


@pytest.mark.parametrize(
    ("words", "number", "expected"),
    [
        ("after 15 s", decide.FIRST_DELAY_SECONDS, 15),
        ("at most 10 min", decide.LONGEST_DELAY_SECONDS, 600),
        ("after six failures in an hour", decide.MOST_FAILURES, 6),
        ("more than half of its time", decide.MOST_OVERLAP_SHARE, 0.5),
        ("half as long again", decide.LOAD_MARGIN, 1.5),
        ("calm for ten minutes", scaling.LEAST_CALM_SECONDS, 600),
        ("with 30 % to spare", 1 - scaling.CALM_SHARE, 0.3),
        ("four times a second", 1 / rotation.PASS_SECONDS, 4),
        ("up to 512 KiB", haproxy.BUFFER_BYTES, 512 * 1024),
    ],
)
def test_a_number_of_the_page(words: str, number: float, expected: float) -> None:
    assert words in " ".join(PAGE.read_text().split())
    assert number == pytest.approx(expected)
