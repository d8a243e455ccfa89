"""Where `top` refuses to begin, and with which words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import hpctrain, on_terminal
from fabricated_runs import fabricate


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fabricate(tmp_path)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    return tmp_path


def test_without_a_terminal_it_names_what_needs_none() -> None:
    outcome = hpctrain("top")
    assert outcome.exit_code == 2 and "`top` needs a terminal" in outcome.stderr
    assert "`hpctrain status`" in outcome.stderr


@pytest.mark.parametrize(
    ("term", "arguments", "words", "code"),
    [
        ("dumb", (), "cannot move its cursor", 2),
        ("xterm", ("--every", "1s"), "too often for this site", 2),
        ("xterm", ("nobody",), "no run `nobody`", 6),
    ],
)
def test_what_it_refuses(
    term: str, arguments: tuple[str, ...], words: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    shown = on_terminal(100, "top", *arguments)
    assert words in shown and shown.endswith(f"exit code {code}\n")


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "hpctrain.observe.top_screen", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    shown = on_terminal(200, "top")
    assert "pip install 'hpctrain[top]'" in shown and shown.endswith("exit code 2\n")
