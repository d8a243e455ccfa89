"""Compare texts with reviewed files: `make golden` writes them anew, and git shows the change.

Belongs here: comparing. Does not belong here: which files there are (tests/golden, tests/sites).
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def compare(config: pytest.Config, name: str, text: str) -> None:
    """Fail if a text differs from the file of that path below the repository, or write the file."""
    path = ROOT / name
    if config.getoption("--write-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    expected = path.read_text() if path.exists() else ""
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), name, "now", lineterm=""
        )
        pytest.fail(
            "\n".join(lines)
            + f"\n\nUsers will see this change of {name}."
            + "\nIf it is meant, run `make golden` and review the diff.",
            pytrace=False,
        )
