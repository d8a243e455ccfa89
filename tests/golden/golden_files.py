"""The type of the `golden` fixture, for annotations."""

from __future__ import annotations

from collections.abc import Callable

Golden = Callable[[str, str], None]  # (name below tests/golden, text)
