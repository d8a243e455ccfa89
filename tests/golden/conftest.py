"""Comparing with files that people review: `make golden` writes them anew, git shows the change."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from golden_files import Golden

HERE = Path(__file__).resolve().parent


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with the file of that name below tests/golden."""

    def compare(name: str, text: str) -> None:
        path = HERE / name
        if request.config.getoption("--write-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
            )
            pytest.fail(
                "\n".join(lines)
                + f"\n\nUsers will see this change of tests/golden/{name}."
                + "\nIf it is meant, run `make golden` and review the diff.",
                pytrace=False,
            )

    return compare
