"""Show that the tests can fail: break one line of the product at a time, and run its tests.

The rows of `mutants.yaml` are picked by hand: each is a fault that would hurt a user, with the
cheapest tests that must find it. Tools such as mutmut and cosmic-ray change every operator of a
package, which takes days with tests that train and run Slurm, and tells little about faults that
matter. Each process that a test starts imports the broken copy, for PYTHONPATH leads to it before
an installed package.

    python -m tests.mutants.run_mutants [NAME ...] [--kind KIND] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("mutants.yaml")
# Not tracked, and needed by tests: packages, and releases of Slurm that were fetched before.
_CACHES = (".venv", ".slurm")
_LIMIT_SECONDS, _LIMIT_OF_ALL_SECONDS = 900.0, 3600.0
_TIDYING_SECONDS = 60.0
# Only a test of its own can kill; a file that cannot be collected has no `::` here.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"


@dataclass(frozen=True)
class Mutant:
    """One broken line: `old`, which its file has once, becomes `new`."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]

    def text(self, root: Path) -> str:
        """Return the text of the broken file."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What became of a mutant; `told` is the test that failed, or the end of what pytest said."""

    outcome: str
    told: str
    seconds: float


def read_mutants() -> list[Mutant]:
    """Read the rows of `mutants.yaml`."""
    rows = YAML(typ="safe").load(ROWS.read_text())
    return [Mutant(**{**row, "killed_by": tuple(row["killed_by"])}) for row in rows]


@contextmanager
def scratch_copy() -> Iterator[Path]:
    """Copy the tracked files of the checkout, as they are now, into a directory of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)  # for tests that become another user
        copy = Path(place, "copy")
        for name in filter(None, listed.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        for name in _CACHES:
            if (ROOT / name).exists():
                (copy / name).symlink_to(ROOT / name)
        yield copy


def run_tests(
    copy: Path, tests: Iterable[str], *more: str, limit_seconds: float = _LIMIT_SECONDS
) -> Result:
    """Run tests in a copy up to the first that fails; `more` are options of pytest."""
    began = time.monotonic()
    foreign = ("PYTEST_", "PYTHONDONTWRITEBYTECODE")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    options = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 't'}")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *more, *tests],
        cwd=copy,
        env={**environment, "PYTHONPATH": str(copy), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_seconds)
        outcome = {0: SURVIVED, 1: KILLED}.get(process.returncode, BROKEN)
    except subprocess.TimeoutExpired:
        said, outcome = _end(process), BROKEN
    failed = _FAILED.search(said)
    if outcome == KILLED and failed is None:
        outcome = BROKEN
    told = failed[1] if failed and outcome == KILLED else said[-2000:]
    return Result(outcome, told, time.monotonic() - began)


def _end(process: subprocess.Popen[str]) -> str:
    """End pytest as ^C does, so that fixtures take down what they have started."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=_TIDYING_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def run_mutant(copy: Path, mutant: Mutant) -> Result:
    """Break the copy, run the mutant's tests and mend the copy."""
    path = copy / mutant.file
    whole, stat = path.read_bytes(), path.stat()
    path.write_text(mutant.text(copy))
    try:
        return run_tests(copy, mutant.killed_by)
    finally:
        path.write_bytes(whole)
        # as it was: by time and size Python tells which bytecode is that of this text
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def imported_from(copy: Path) -> Path:
    """Return the root of the package that a process of a test imports, wherever it runs."""
    done = subprocess.run(
        [sys.executable, "-c", "import hpctrain; print(hpctrain.__file__)"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return Path(done.stdout.strip()).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and print a line for each; return 1 unless all are killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run_mutants")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--kind")
    parser.add_argument("--jobs", type=int, default=2, help="copies side by side")
    parser.add_argument("--no-baseline", action="store_true", help="skip the unbroken tests")
    asked = parser.parse_args(arguments)
    mutants = [one for one in read_mutants() if asked.kind in (None, one.kind)]
    unknown = set(asked.names) - {one.name for one in mutants}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    mutants = [one for one in mutants if not asked.names or one.name in asked.names]
    began = time.monotonic()
    if not asked.no_baseline and not _unbroken_pass(mutants, asked.jobs):
        return 1
    outcomes = Counter(_run_all(mutants, asked.jobs))
    told = ", ".join(f"{outcomes[one]} {one}" for one in (KILLED, SURVIVED, BROKEN))
    print(f"{len(mutants)} mutants: {told}; {time.monotonic() - began:.0f} s")
    return 0 if outcomes[KILLED] == len(mutants) else 1


def _unbroken_pass(mutants: Iterable[Mutant], jobs: int) -> bool:
    tests = dict.fromkeys(test for one in mutants for test in one.killed_by)
    with scratch_copy() as copy:
        assert imported_from(copy) == copy.resolve(), "tests would import the checkout"
        together = (f"--numprocesses={jobs}", "--dist=worksteal")
        result = run_tests(copy, tests, *together, limit_seconds=_LIMIT_OF_ALL_SECONDS)
    passed = result.outcome == SURVIVED
    what = "pass" if passed else f"do not pass: {result.told}"
    print(f"unbroken, the tests of all these mutants {what} ({result.seconds:.0f} s)", flush=True)
    return passed


def _run_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[str]:
    """Run mutants on so many copies, each of which one thread has at a time."""
    copies: SimpleQueue[Path] = SimpleQueue()

    def run(mutant: Mutant) -> Result:
        copy = copies.get()
        try:
            result = run_mutant(copy, mutant)
        finally:
            copies.put(copy)
        by = f"by {result.told}" if result.outcome == KILLED else ""
        line = f"{mutant.name} ({mutant.kind}): {result.outcome} {by}"
        print(f"{line.rstrip()} ({result.seconds:.0f} s)", flush=True)
        if result.outcome == BROKEN:
            print(result.told, flush=True)
        return result

    with ExitStack() as stack:
        for _ in range(jobs):
            copies.put(stack.enter_context(scratch_copy()))
        with ThreadPoolExecutor(jobs) as pool:
            yield from (result.outcome for result in pool.map(run, mutants))


if __name__ == "__main__":
    sys.exit(main())
