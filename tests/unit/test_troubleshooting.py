"""docs/troubleshooting.md quotes messages that hpctrain has, and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "hpctrain").rglob("*.py")))
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)


def test_there_are_messages() -> None:
    assert len(QUOTED) > 20 and len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("words", QUOTED)
def test_a_message_that_is_quoted_is_said(words: str) -> None:
    assert words in SOURCES


def test_its_commands_exist() -> None:
    assert set(re.findall(r"`hpctrain ([a-z]+)", PAGE)) <= set(COMMANDS)
