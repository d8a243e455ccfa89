"""Nobody pulls the plug while unit tests run."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds, longer on a busy disk; tests that look for it put their own in."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
