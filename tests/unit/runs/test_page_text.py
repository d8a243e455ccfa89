"""What the page of one run says of its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.runs.run_page import Planned, RunPage, page_lines, run_page
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus
from tests.judged_runs import submitted


def plan_told(measured: float | None, low: float | None = 30.5, high: float | None = 38.2) -> str:
    page = RunPage(
        status=RunStatus(
            run_id="one-1a2b", state=RunState.RUNNING, reason="", step_seconds=measured
        ),
        directory="runs/one-1a2b",
        planned=Planned(
            layout="tp 2",
            nodes="2 x 8",
            step_seconds=34.0,
            gpu_hours=None,
            low_step_seconds=low,
            high_step_seconds=high,
        ),
    )
    words = " ".join(" ".join(page_lines(page)).split())
    return words[words.index("Plan ") :].split(" Directory")[0]


def test_the_planned_step_has_its_interval() -> None:
    assert "34 s a step planned (80%: 30.5 s-38.2 s)" in plan_told(None)
    assert "80%" not in plan_told(None, low=None, high=None)


@pytest.mark.parametrize(("measured", "outside"), [(34.5, False), (38.1, False), (40.0, True)])
def test_a_step_outside_the_interval_is_said_to_be(measured: float, outside: bool) -> None:
    assert ("outside the interval" in plan_told(measured)) == outside
    assert "outside" not in plan_told(measured, low=None, high=None)


def test_the_interval_is_that_of_the_submitted_plan(tmp_path: Path) -> None:
    run, _ = submitted(tmp_path, "llama7b", "h100x16", ("resources.gpus=64",))
    found = run_page(run, RunStatus(run_id="one", state=RunState.PREPARED, reason="")).planned
    assert found is not None
    assert found.step_seconds is not None
    assert found.low_step_seconds is not None
    assert found.high_step_seconds is not None
    assert found.low_step_seconds < found.step_seconds < found.high_step_seconds
