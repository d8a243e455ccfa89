"""Files that people review: `make golden` writes them anew, git shows the change.

Belongs here: comparing with files of this directory and with the page about them. Does not belong
here: what stands in them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that path below the repository."""

    def compare(name: str, text: str) -> None:
        path = ROOT / name
        if request.config.getoption("--write-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), name, "now", lineterm=""
            )
            pytest.fail("\n".join(lines) + "\n\nIf it is meant, run `make golden`.", pytrace=False)

    return compare
