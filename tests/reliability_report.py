"""docs/reliability.md: its tables are what a run of tests/slurm/faults has seen.

Belongs here: gathering the entries of all tests (of all workers of xdist) and writing each table
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
# Where each table begins in the document, and the first row of the fault table that is in it.
BEGINS = {
    "<!-- written by the test run -->": 1,
    "<!-- written by the test run, second table -->": 51,
}
END = "<!-- end of what the test run writes -->"
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
        """Rows of tests that did not run stay as they were; those of a failed test go."""
        failed = {name for report in self.failed if (name := _function(report))}
        rows = [row for row in known_rows() if test_of(row) in declared_tests() - failed]
        seen = [entry for entry in self.entries if entry["test"] not in failed]
        tests = {str(entry["test"]) for entry in seen}
        kept = [row for row in rows if test_of(row) not in tests]
        write_table([*kept, *(_cells(entry) for entry in seen)])
        missing = sorted(declared_tests() - tests - {test_of(row) for row in kept})
        words = f"; without {', '.join(missing)}" if missing else ""
        terminalreporter.write_line(f"{DOCUMENT.name}: {len(seen)} rows written{words}")


def _function(report_id: str) -> str:
    return report_id.rpartition("::")[2].partition("[")[0]


def known_rows() -> list[list[str]]:
    """The rows that the document has now, as cells."""
    text = DOCUMENT.read_text()
    between = [text.partition(begin)[2].partition(END)[0] for begin in BEGINS]
    lines = [line for part in between for line in part.splitlines() if line.startswith("| ")]
    return [row for row in (line[2:-2].split(" | ") for line in lines) if row[0].isdigit()]


def test_of(row: list[str]) -> str:
    """The test that has shown what a row says."""
    return row[-1].strip("` ")


def declared_tests() -> set[str]:
    """Tests that take part, by the source: those that ask for `survival`."""
    found = set()
    for path in FAULTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                arguments = {argument.arg for argument in node.args.args}
                found |= {node.name} if "survival" in arguments else set()
    return found


def write_table(rows: Iterable[list[str]]) -> None:
    """Replace the tables, ordered by row of the fault table and then by test."""
    text = DOCUMENT.read_text()
    ordered = sorted(rows, key=lambda row: (int(row[0]), row[-1]))
    for begin, first in BEGINS.items():
        own = [row for row in ordered if first == _first_row_of_table(int(row[0]))]
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        lines = [_line(cells) for cells in (HEAD, ["---"] * len(HEAD), *own)]
        text = "\n".join([f"{before}{begin}", *lines, f"{END}{after}"])
    DOCUMENT.write_text(text)


def _first_row_of_table(row: int) -> int:
    return max(first for first in BEGINS.values() if first <= row)


def _cells(entry: Entry) -> list[str]:
    compared = entry.get("identical")
    return [
        str(entry["row"]),
        str(entry["fault"]).replace("|", "/"),
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
    return f"| {' | '.join(cells)} |"
