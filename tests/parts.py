"""Which tests run where: `make test` (every landing), `make nightly`, `make gpu`.

Every test belongs to the first part whose path holds it; one that belongs to none is an error. It
runs in `make test`, unless its part or a mark says otherwise: `variant("name")` varies that test,
which shows the same kind of fault in every run; `nightly("reason")` needs what a landing has no
time for.
`make nightly` and `--nightly` run both, and so does the command line by naming one. The tables of
docs/tests.md are written from the parts and the marks by `python tests/parts.py`. Belongs here:
choosing and telling. Does not belong here: what a test shows.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "tests.md"
BEGIN, END = "<!-- written by tests/parts.py -->", "<!-- end of what tests/parts.py writes -->"
VARIANT, NIGHTLY = "variant", "nightly"
_KEY = "left_out"


@dataclass(frozen=True)
class Part:
    """Some of the tests.

    `lane`: what they spend their time with. Tests that compute share the cores; for those that
    wait, mostly for Slurm, more processes than cores pay (tests/lanes.py). `runs`: where all of
    them run, by default. `why`: the reason when that is not `make test`.
    """

    path: str
    shows: str
    lane: Literal["compute", "wait"] = "compute"
    runs: Literal["test", "nightly", "gpu"] = "test"
    why: str = ""


PARTS = (
    Part("tests/unit/supervise", "the supervisor, against processes and virtual time", "wait"),
    Part("tests/unit/serve", "replicas, routers and clients as processes", "wait"),
    Part("tests/unit/trainer", "agents and trainers of one's own as processes", "wait"),
    Part("tests/unit/tracking", "followers as processes, what they write", "wait"),
    Part("tests/unit", "each other room by itself, commands, pages"),
    Part("tests/golden", "scripts, help, references and transcripts, byte by byte"),
    Part("tests/sites", "scripts for known clusters, byte by byte"),
    Part("tests/test_house.py", "the rules of the house"),
    Part("tests/mutants", "broken lines that the tests must notice"),
    Part("tests/engines", "real trainers on CPU: resume, saving, layouts, losses"),
    Part("tests/slurm", "a real Slurm: supervision, faults, commands", "wait"),
    Part("tests/tutorial", "the commands of the tutorial, typed into a shell", "wait"),
    Part(
        "tests/as_gpu",
        "settings and steps of the GPU path, emulated",
        runs="nightly",
        why="an emulated GPU",
    ),
    Part(
        "tests/serving",
        "vLLM and Transformers behind hpctrain's replicas",
        "wait",
        "nightly",
        "real serving engines, an environment of their own",
    ),
    Part("tests/gpu", "training, failures and messages on a GPU", runs="gpu", why="a real GPU"),
)


def part_of(node_id: str) -> Part:
    """Look up the part of a test or file. Raises LookupError if there is none."""
    file = node_id.partition("::")[0]
    for part in PARTS:
        if file == part.path or file.startswith(f"{part.path}/"):
            return part
    raise LookupError(f"{file} belongs to no part, so no run has it: add a row to tests/parts.py")


def chosen_by_name(node_id: str, arguments: Sequence[str]) -> bool:
    """Return whether an argument of the command line names this test, not only its file."""
    named = [argument.rpartition("/")[2] for argument in arguments if "::" in argument]
    own = node_id.rpartition("/")[2]
    return any(own == name or own.startswith(f"{name}[") for name in named)


def is_left_out(item: pytest.Item, arguments: Sequence[str]) -> bool:
    """Return whether a run without --nightly leaves the test out.

    A part that runs elsewhere is not left out where the command line names it, or a file of it.
    """
    part = part_of(item.nodeid)
    if part.runs == "nightly" and not any(word.startswith(part.path) for word in arguments):
        return True
    marked = any(item.get_closest_marker(mark) for mark in (VARIANT, NIGHTLY))
    return marked and not chosen_by_name(item.nodeid, arguments)


class LeavesOut:
    """A plugin; with pytest-xdist every worker leaves out the same tests, and one process tells."""

    def __init__(self) -> None:
        self._left_out: list[str] = []

    def leave_out(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take out of `items`, in place, what was not asked for.

        Raises pytest.UsageError for a test that is in no part.
        """
        try:
            out = [item for item in items if is_left_out(item, config.args)]
        except LookupError as error:
            raise pytest.UsageError(str(error)) from error
        if config.getoption("--nightly") or not out:
            return
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]
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
    return f"not run: {len(left_out)} tests that `make nightly` runs (docs/tests.md says which)"


@dataclass(frozen=True)
class Marked:
    """A test, or a whole file (no test), that has a mark, and what the mark says."""

    file: str
    test: str
    mark: str
    text: str


def marked(paths: Iterable[Path]) -> list[Marked]:
    """Read from the sources which tests are variants or nightly.

    A single parameter that is marked is not among them: its test runs in `make test`.
    """
    found = []
    for path in paths:
        text = path.read_text()
        if not any(f"mark.{mark}" in text for mark in (VARIANT, NIGHTLY)):
            continue  # parsing all tests takes seconds
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                decorators, name = node.decorator_list, node.name
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                value = node.value
                decorators = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                name = ""
            else:
                continue
            file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
            found += [Marked(file, name, *words) for words in _marks(decorators)]
    return found


def _marks(decorators: Iterable[ast.expr]) -> Iterator[tuple[str, str]]:
    for call in decorators:
        if isinstance(call, ast.Call):
            _, _, mark = ast.unparse(call.func).rpartition("pytest.mark.")
            if mark in (VARIANT, NIGHTLY):
                yield mark, str(ast.literal_eval(call.args[0]))


def test_files() -> list[Path]:
    """List all files of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def tables() -> str:
    """Write down what runs where: a row a part, then a row for each mark `nightly`."""
    files = test_files()
    marks = marked(files)
    whole = {one.file for one in marks if not one.test}
    single = {(one.file, one.test) for one in marks}
    lines = ["| tests | show | make test | make nightly | where else |", "|---|---|---|---|---|"]
    for part in PARTS:
        rows = [
            (name, function)
            for path in files
            if (name := path.relative_to(ROOT).as_posix()) and _holds(part, name)
            for function in _functions(path)
        ]
        now = [row for row in rows if row[0] not in whole and row not in single]
        here = len(now) if part.runs == "test" else 0
        also = f"`make gpu`: {part.why}" if part.runs == "gpu" else part.why
        nightly = 0 if part.runs == "gpu" else len(rows)
        lines.append(f"| `{part.path}` | {part.shows} | {here} | {nightly} | {also} |")
    lines += ["", "| left to the night | why |", "|---|---|"]
    for one in marks:
        if one.mark == NIGHTLY:
            name = one.file.removeprefix("tests/") + (f"::{one.test}" if one.test else "")
            lines.append(f"| `{name}` | {one.text} |")
    return "\n".join(lines)


def _holds(part: Part, file: str) -> bool:
    return part_of(file) is part


def _functions(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("def test_")]
    return [line.removeprefix("def ").partition("(")[0] for line in lines]


def with_tables(document: str) -> str:
    """Give the document with the tables of today. Raises ValueError where its marks are gone."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{DOCUMENT.name} has lost {BEGIN} or {END}")
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
    sys.exit()
