"""Parameters of a test of which most are variants: they run in `make nightly` (tests/parts.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def varied(values: Iterable[str], *always: str) -> list[Any]:
    """Give all values as parameters of a test; those not in `always` are variants."""
    values = list(values)
    assert always and set(always) <= set(values), f"{set(always) - set(values)} not in {values}"
    return [
        pytest.param(value, id=value, marks=() if value in always else (pytest.mark.variant,))
        for value in values
    ]
