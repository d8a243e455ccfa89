"""Names beside texts, units beside numbers, and columns that a narrow terminal does without."""

from __future__ import annotations

import pytest

from hpctrain.page.text import Named, Whole, facts, fitting


@pytest.mark.parametrize(
    ("named", "lines"),
    [
        (("Left", None), []),
        (("Left", ()), []),
        (("Saved", "one checkpoint of 462 s"), ["Saved     one checkpoint of", "          462 s"]),
        (("Plan", "layout of pp 8"), ["Plan      layout of pp 8"]),
        (("Plan", "a layout, pipeline pp 8"), ["Plan      a layout, pipeline", "          pp 8"]),
        (("Next", ("stop", "hold")), ["Next      stop", "          hold"]),
        (("Next", Whole("a b c " * 6)), ["Next      " + "a b c " * 6]),
        (("a long name", "text"), ["a long name text"]),
    ],
)
def test_names_beside_texts(named: Named, lines: list[str]) -> None:
    assert facts(named, width=31) == lines


@pytest.mark.parametrize(
    ("width", "shown"), [(12, ["RUN", "JOB", "LEFT"]), (11, ["RUN", "LEFT"]), (1, ["RUN"])]
)
def test_columns_are_dropped_in_their_order(width: int, shown: list[str]) -> None:
    assert fitting({"RUN": 3, "JOB": 3, "LEFT": 4}, ("TRY", "JOB", "LEFT"), width, " ") == shown
