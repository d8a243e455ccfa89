"""Comparing with the files below this directory."""

from __future__ import annotations

import pytest
from golden_files import Golden
from planned_once import planned_once
from reviewed_files import compare

__all__ = ["golden", "planned_once"]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with the file of that name below tests/golden."""
    return lambda name, text: compare(request.config, f"tests/golden/{name}", text)
