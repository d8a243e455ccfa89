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


def test_a_terminal_without_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown = on_terminal(100, "top")
    assert "cannot move its cursor" in shown and shown.endswith("exit code 2\n")


def test_looks_that_are_too_frequent_are_refused() -> None:
    shown = on_terminal(100, "top", "--every", "1s")
    assert "too often for this site" in shown and shown.endswith("exit code 2\n")


def test_a_run_that_is_not_there() -> None:
    shown = on_terminal(100, "top", "nobody")
    assert "no run `nobody`" in shown and shown.endswith("exit code 6\n")


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "hpctrain.observe.top_screen", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    shown = on_terminal(200, "top")
    assert "pip install 'hpctrain[top]'" in shown and shown.endswith("exit code 2\n")
