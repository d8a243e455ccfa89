"""docs/reliability.md: its table is what a run of tests/slurm/faults has seen.

Belongs here: gathering the entries of all tests (of all workers of xdist) and writing the table
between two marks of the document. Does not belong here: asserting anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "reliability.md"
FAULTS = ROOT / "tests" / "slurm" / "faults"
BEGIN, END = "<!-- written by the test run -->", "<!-- end of what the test run writes -->"
HEAD = (
    "#",
    "fault",
    "cause found",
    "action",
    "resumed at",
    "steps lost",
    "losses",
    "seconds",
    "test",
)
Entry = dict[str, object]


class ReliabilityReport:
    """A plugin of pytest; xdist passes the properties of tests on to the process that reports."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "teardown":
            found = [value for name, value in report.user_properties if name == "reliability"]
            self.entries += [value for value in found if isinstance(value, dict)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        missing = sorted(declared_tests() - {str(entry["test"]) for entry in self.entries})
        if self.failed or missing:
            words = f"{len(self.failed)} failed; not seen: {', '.join(missing) or 'none'}"
            terminalreporter.write_line(f"{DOCUMENT.name} is left as it was: {words}")
            return
        write_table(self.entries)
        terminalreporter.write_line(f"{DOCUMENT.name}: {len(self.entries)} faults")


def declared_tests() -> set[str]:
    """Tests that take part, by the source: those that ask for `survival`."""
    found = set()
    for path in FAULTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                arguments = {argument.arg for argument in node.args.args}
                found |= {node.name} if "survival" in arguments else set()
    return found


def write_table(entries: Iterable[Entry]) -> None:
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(entries)}\n{END}{after}")


def table(entries: Iterable[Entry]) -> str:
    """Markdown, by row of the fault table and then by test."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    ordered = sorted(entries, key=lambda entry: (int(str(entry["row"])), str(entry["test"])))
    return "\n".join(lines + [_line(_cells(entry)) for entry in ordered])


def _cells(entry: Entry) -> list[str]:
    compared = entry.get("identical")
    return [
        str(entry["row"]),
        str(entry["fault"]),
        str(entry.get("cause") or ""),
        str(entry.get("action") or ""),
        _number(entry, "resumed_step"),
        _number(entry, "lost_steps"),
        f"{compared} of {compared} equal" if compared else "",
        _number(entry, "seconds"),
        f"`{entry['test']}`",
    ]


def _number(entry: Entry, name: str) -> str:
    return "" if entry.get(name) is None else str(entry[name])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
