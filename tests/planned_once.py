"""Plans are made once in a process of tests: a plan is a pure function of its request.

For unit tests and goldens, which plan the same few examples again and again. Does not belong to
tests of the planner, which replace parts of it.
"""

from __future__ import annotations

import pickle

import pytest

import hpctrain.job.plan
import hpctrain.plan.planner
from hpctrain.plan.planner import Decision, decide
from hpctrain.plan.request import PlanRequest

_DECIDED: dict[bytes, Decision] = {}


def _decide_once(request: PlanRequest) -> Decision:
    """As `decide`; what is refused is refused anew each time."""
    key = pickle.dumps((request.spec, request.profile, request.knowledge, request.goal))
    if key not in _DECIDED:
        _DECIDED[key] = decide(request)
    return _DECIDED[key]


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hpctrain.plan.planner, hpctrain.job.plan):
        monkeypatch.setattr(module, "decide", _decide_once)
