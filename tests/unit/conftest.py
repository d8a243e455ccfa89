"""What costs every unit test time and shows none of them anything."""

from __future__ import annotations

import os

import pytest
from planned_once import planned_once

import hpctrain.simulate.forecasts

__all__ = ["planned_once"]

# Enough for every sentence that a forecast gives rise to.
_PLAYED_RUNS = 12


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug. It takes milliseconds, longer on a busy disk; tests that look for it
    put their own in."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _few_runs_are_played(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A forecast plays fewer runs than users get; the mark `all_runs_played` has as many.

    What the goldens and the examples' pages print is played in full.
    """
    if request.node.get_closest_marker("all_runs_played") is None:
        monkeypatch.setattr(hpctrain.simulate.forecasts, "MOST_TRIALS", _PLAYED_RUNS)
