"""Comparing with files of this directory, and with the page about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from reviewed_files import compare


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that path below the repository."""
    return lambda name, text: compare(request.config, name, text)
