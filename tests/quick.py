"""Run the tests that are nearest to what changed, by imports, within a minute: `make quick`.

pytest-testmon needs a recorded run of all tests, which is old after the next merge; pytest-picked
takes changed test files only. Imports are always there. Belongs here: which tests, in which order.
Does not belong here: who imports what (file_readers.py), and the end of the time (time_limit.py).
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
from file_readers import HOUSE, git, importers_of, is_test
from longest_first import read_durations

STARTED = time.time()
ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
# From the first line of output to the first test, and from the last test to the prompt.
START_SECONDS, END_SECONDS = 9.0, 4.0
HOUSE_DISTANCE = 2  # it reads every file: a candidate for every change
# These need no Slurm and train nothing.
PLAIN = ("tests/unit/", "tests/golden/", "tests/sites/", HOUSE)


@dataclass(frozen=True)
class Reached:
    """A test file, by how many imports it is away from a change, and what it takes."""

    file: str
    distance: int
    seconds: float
    named_after: bool = False
    near: bool = False  # changed, or imports a changed module of the trainer: it may train

    def cost(self, limit_seconds: float) -> float | None:
        """The seconds to plan for it. A plain file that is too long is begun all the same."""
        if self.file.startswith(PLAIN):
            return min(self.seconds, limit_seconds)
        return self.seconds if self.near and self.seconds <= limit_seconds else None


def changed_files(root: Path, since: str | None = None) -> set[str]:
    """List what differs from a revision, deleted files too, and new files that git sees.

    The revision is by default the one where this branch left origin's, or else HEAD.
    """
    left = git(root, "merge-base", "HEAD", "origin/HEAD", may_fail=True)
    differing = git(root, "diff", "--name-only", "--no-renames", since or "".join(left) or "HEAD")
    return {*differing, *git(root, "ls-files", "--others", "--exclude-standard")}


def reached_tests(
    root: Path, changed: Collection[str], seconds: Mapping[str, float]
) -> list[Reached]:
    """Find the test files that a change reaches: changed ones, then the nearest, then the shortest.

    A file that is not in `seconds` is short.
    """
    importers = importers_of(root, changed)
    distances, waiting = dict.fromkeys(changed, 0), list(changed)
    for file in waiting:  # grows
        for importer in importers[file] - distances.keys():
            distances[importer] = distances[file] + 1
            waiting.append(importer)
    distances.setdefault(HOUSE, HOUSE_DISTANCE)
    trained = (importers[file] for file in changed if file.startswith("hpctrain/train/"))
    near = set(changed).union(*trained)
    found = [
        Reached(file, n, seconds.get(file, 1.0), _is_named_after(file, changed), file in near)
        for file, n in distances.items()
        if is_test(file) and (root / file).exists()
    ]
    return sorted(
        found, key=lambda r: (r.distance > 0, not r.named_after, r.distance, r.seconds, r.file)
    )


def choose(reached: Sequence[Reached], limit_seconds: float) -> list[Reached]:
    """Take from the front what fits into the time of all processes."""
    left = limit_seconds * PROCESSES
    taken = []
    for test in reached:
        cost = test.cost(limit_seconds)
        if cost is not None and cost <= left:
            taken.append(test)
            left -= cost
    return taken


def told(changed: int, reached: Sequence[Reached], taken: Sequence[Reached], seconds: float) -> str:
    """Say in a few lines what runs and why."""
    head = f"{changed} changed files reach" if changed > 1 else "1 changed file reaches"
    names = [PurePosixPath(test.file).name for test in taken[:3]]
    long = [test for test in reached if test.file.startswith(PLAIN) and test not in taken]
    text = (
        f"{head} {len(reached)} test files; {len(taken)} of them fit into {seconds:g} s, nearest "
        f"first: {', '.join(names)}{' and so on' if len(taken) > 3 else ''}. Left out: {len(long)} "
        f"for want of time, {len(reached) - len(taken) - len(long)} that train or need Slurm. "
        "`make test` runs all."
    )
    return textwrap.fill(text, 80, break_on_hyphens=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests that are nearest to what changed.")
    parser.add_argument("--since", metavar="REV", help="default: where this branch left origin's")
    parser.add_argument("--seconds", type=float, default=60.0, help="from typing to prompt")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    arguments = parser.parse_args()
    changed = changed_files(ROOT, arguments.since)
    if not changed:
        print("nothing has changed, so nothing runs")
        return 0
    reached = reached_tests(ROOT, changed, read_durations())
    until = STARTED + arguments.seconds - END_SECONDS
    taken = choose(reached, until - time.time() - START_SECONDS)
    print(told(len(changed), reached, taken, arguments.seconds), flush=True)
    if arguments.list or not taken:
        print(*(f"{test.distance:3} {test.seconds:4g} s {test.file}" for test in taken), sep="\n")
        return 0
    options = ["-q", "-x", "--disable-warnings", "-p", "time_limit", "--until", str(until)]
    if sum(test.seconds for test in taken) > START_SECONDS:
        options += ["-n", str(PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder"]
    code = pytest.main([*options, *(test.file for test in taken)])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def _is_named_after(test: str, changed: Collection[str]) -> bool:
    """Whether a test has the name and the room of a changed module."""
    own = PurePosixPath(test)
    return any(
        f"_{module.stem}_" in f"{own.stem}_" and {*module.parts[1:2]} & {*own.parts, module.name}
        for module in map(PurePosixPath, changed)
    )


if __name__ == "__main__":
    sys.exit(main())
