"""Order of the tests when several processes run them: each begins with files that take long.

pytest-xdist gives every process an equal run of neighbouring tests and lets those that have
finished take some of the others (`--dist worksteal`). In the order of the names one process would
begin its longest file when the others have nothing left. `durations.json` has the seconds of the
files that take some, written by a whole run with `--write-durations`; a file that is not in it
counts as short. Nothing fails when it is old. The tests of a file stay together, for the sake of
its fixtures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

FILE = Path(__file__).with_name("durations.json")
# Shorter files are not worth a line.
LEAST_SECONDS = 5.0
_Item = TypeVar("_Item")


def read_durations() -> dict[str, float]:
    """Read the seconds by file; empty if nothing was ever recorded."""
    if not FILE.exists():
        return {}
    seconds: dict[str, float] = json.loads(FILE.read_text())
    return seconds


def shares(count: int, processes: int) -> list[int]:
    """Compute how many tests pytest-xdist gives each process at first."""
    sizes = []
    for left in range(processes, 0, -1):
        sizes.append((count - sum(sizes)) // left)
    return sizes


def deal(
    items: Sequence[_Item],
    file_of: Callable[[_Item], str],
    seconds: Mapping[str, float],
    processes: int,
) -> list[_Item]:
    """Order items so that the share of each process begins with its part of the long files.

    The longest file goes to the process with the least to do, and so on; the others fill the
    shares in their own order.
    """
    files: dict[str, list[_Item]] = {}
    for item in items:
        files.setdefault(file_of(item), []).append(item)
    sizes = shares(len(items), processes)
    dealt: list[list[_Item]] = [[] for _ in sizes]
    busy_seconds = [0.0] * processes
    for file in sorted(files, key=lambda file: -seconds.get(file, 0.0)):
        free = [p for p in range(processes) if len(dealt[p]) + len(files[file]) <= sizes[p]]
        if file in seconds and free:
            least = min(free, key=lambda process: busy_seconds[process])
            busy_seconds[least] += seconds[file]
            dealt[least] += files.pop(file)
    rest = [item for item in items if file_of(item) in files]
    ordered: list[_Item] = []
    for size, share in zip(sizes, dealt, strict=True):
        missing = size - len(share)
        ordered += share + rest[:missing]
        del rest[:missing]
    return ordered


def order(items: list[pytest.Item], processes: int) -> None:
    """Put the collected tests in the order that `deal` gives, in place."""
    items[:] = deal(items, lambda item: _file(item.nodeid), read_durations(), processes)


def durations_text(seconds: Mapping[str, float]) -> str:
    """Write down the files that take long, the longest first, in whole seconds."""
    long = {file: round(took) for file, took in seconds.items() if took >= LEAST_SECONDS}
    ordered = dict(sorted(long.items(), key=lambda pair: (-pair[1], pair[0])))
    return json.dumps(ordered, indent=1) + "\n"


class DurationsWriter:
    """A plugin that adds up the time of each file and writes it into `durations.json` at the end.

    Files that did not run stay as they were.
    """

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        FILE.write_text(durations_text(read_durations() | self._seconds))


def _file(node_id: str) -> str:
    return node_id.partition("::")[0]
