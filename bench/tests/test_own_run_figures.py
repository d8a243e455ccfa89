"""What three rows of a source teach about its others, on rows that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import row_specimens as specimens

from bench.own_run_figures import after_own_runs
from bench.predictions import Predicted, predict_file

SLOWER = 1.12
LAYOUTS = [(tp, batch) for tp in (1, 2, 4, 8) for batch in ("256", "512")]


@pytest.fixture
def slow(tmp_path: Path) -> Predicted:
    """Eight layouts of a source, each of which takes 12 % longer than planned."""
    rows = [
        specimens.GPT | {"tp": str(tp), "dp": str(128 // tp), "global_batch": batch}
        for tp, batch in LAYOUTS
    ]
    found = predict_file(specimens.write(tmp_path / "runs.csv", *rows), product=True)
    cases = [
        replace(case, row=replace(case.row, step_seconds=SLOWER * float(seconds)))
        for case, seconds in zip(found.cases, found.seconds, strict=True)
    ]
    return Predicted(cases, [], [])


def test_three_rows_teach_what_a_source_is_off_by(slow: Predicted) -> None:
    for report in after_own_runs(slow).values():
        (site,) = (name for name in report.lines if name.startswith("Narayanan2021 T1"))
        line = report.lines[site]
        assert line["rows"] == len(LAYOUTS)
        assert line["without %"] == pytest.approx(100 * (1 - 1 / SLOWER), abs=0.1)
        assert line["median %"] < 0.4 * line["without %"]
        assert line["inside %"] > 80
        assert report.lines["all"]["median %"] == line["median %"]


def test_rows_that_may_be_shown_are_not_predicted(slow: Predicted) -> None:
    found = after_own_runs(slow, lambda row: row.tp != 8)["each source one site"]
    assert found.lines["all"]["rows"] == 2
    nothing = after_own_runs(slow, lambda row: row.tp == 8)["each source one site"]
    assert nothing.lines == {}, "two rows are fewer than three"
    few = Predicted(slow.cases[:5], [], [])
    assert after_own_runs(few)["each source one site"].lines == {}
    assert after_own_runs(Predicted([], [], [])) == {}
