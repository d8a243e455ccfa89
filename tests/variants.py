"""Leave out tests that vary another one, so that `make test` stays short; say which they were.

A variant has the mark `variant("test_name")`, with the test that shows the same kind of fault or
behaviour in every run. `make reliability` runs variants, and so does `--variants`, or the name of
the test on the command line. Belongs here: choosing and telling. Does not belong here: what a test
shows (see docs/reliability.md).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

MARK = "variant"
_KEY = "variants left out"


def chosen_by_name(node_id: str, arguments: Sequence[str]) -> bool:
    """Return whether an argument of the command line names this test, not only its file."""
    named = [argument.rpartition("/")[2] for argument in arguments if "::" in argument]
    own = node_id.rpartition("/")[2]
    return any(own == name or own.startswith(f"{name}[") for name in named)


class Variants:
    """A plugin; with pytest-xdist every worker leaves out the same tests, and one process tells."""

    def __init__(self) -> None:
        self._left_out: list[str] = []

    def leave_out(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take the variants out of `items`, in place, unless they were asked for."""
        if config.getoption("--variants"):
            return
        out = [
            item
            for item in items
            if item.get_closest_marker(MARK) and not chosen_by_name(item.nodeid, config.args)
        ]
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if item not in out]
        self._left_out = [item.nodeid for item in out]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Called by pytest-xdist when a worker is through."""
        output: Mapping[str, list[str]] = getattr(node, "workeroutput", {})
        self._left_out = sorted({*self._left_out, *output.get(_KEY, [])})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.write_line(summary(self._left_out))


def summary(left_out: Sequence[str]) -> str:
    """Describe what did not run, for the end of a run."""
    names = sorted(node_id.rpartition("::")[2] for node_id in left_out)
    head = f"not run: {len(names)} variants of other tests (`make reliability` runs them):"
    return "\n  ".join([head, *names])


def declared(paths: Iterable[Path]) -> dict[str, str]:
    """Read the variants from the sources: the name of each, and of the test that it varies."""
    found: dict[str, str] = {}
    for path in paths:
        text = path.read_text()
        if f"mark.{MARK}(" not in text:  # parsing all tests takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                found.update((node.name, test) for test in _marks(node))
    return found


def _marks(function: ast.FunctionDef) -> list[str]:
    calls = [one for one in function.decorator_list if isinstance(one, ast.Call)]
    own = [call for call in calls if ast.unparse(call.func) == f"pytest.mark.{MARK}"]
    return [str(ast.literal_eval(call.args[0])) for call in own]


def varied(values: Iterable[str], *always: str) -> list[Any]:
    """Give all values as parameters of a test; those not in `always` are variants."""
    values = list(values)
    assert always and set(always) <= set(values), f"{set(always) - set(values)} not in {values}"
    return [
        pytest.param(value, id=value, marks=() if value in always else (pytest.mark.variant,))
        for value in values
    ]
