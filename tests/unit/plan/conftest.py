"""Tests of the planner replace parts of it, so here each plan is made anew."""

import pytest


@pytest.fixture(autouse=True)
def planned_once() -> None:
    """Plans nothing in advance, in place of the fixture of the other rooms."""
