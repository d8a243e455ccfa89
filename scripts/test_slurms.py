"""`make test-slurms`: the rehearsals and the demo on several releases of Slurm, one after another.

    test_slurms.py [--workers N] [--only SUBJECT]... RELEASE...

Prints how many tests passed on each, and writes that into docs/slurm-versions.md: the table there
names no version and no subject that was not run. What --only leaves out stays as it was, for the
same version. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import HpctrainError
from hpctrain.page.output import table
from hpctrain.sandbox.debian import SUITES, fetch_slurm
from hpctrain.sandbox.programs import call

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".slurm"
DOCUMENT = ROOT / "docs" / "slurm-versions.md"
BEGIN, END = "<!-- written by make test-slurms -->", "<!-- end of what make test-slurms writes -->"
FAULTS = "tests/slurm/faults"
_NOT_RUN = "not run"
# The columns of the table, and the files of tests behind each.
SUBJECTS = {
    "client": ("tests/slurm/test_client.py",),
    "sandbox": ("tests/slurm/test_sandbox.py",),
    "continuation": ("tests/slurm/test_continuation.py",),
    "preemption": (
        f"{FAULTS}/test_faults_of_preemption.py",
        f"{FAULTS}/test_faults_of_newer_slurms.py",
        "tests/slurm/test_leaving_in_a_grace.py",
    ),
    "stops": (f"{FAULTS}/test_faults_of_stops.py", f"{FAULTS}/test_faults_of_people.py"),
    "node faults": (f"{FAULTS}/test_faults_of_nodes.py", f"{FAULTS}/test_faults_of_slurm.py"),
    "hold, release": ("tests/slurm/test_hold_release.py",),
    "watch": ("tests/slurm/test_watch.py",),
    "team": ("tests/slurm/test_team_control.py",),
    "two clusters": ("tests/slurm/test_two_clusters.py",),
    "topology": ("tests/slurm/test_topology.py",),
    "accounting": ("tests/slurm/test_accounting.py",),
}


@dataclass(frozen=True)
class Outcome:
    """What one release has shown: tests by result for each subject, and the demo."""

    version: str
    results: dict[str, Counter[str]]
    demo: bool

    def good(self, subjects: Iterable[str]) -> bool:
        """Whether all of these subjects have run, and nothing has failed."""
        bad = sum(counts["failed"] for counts in self.results.values())
        return self.demo and not bad and all(self.results[name] for name in subjects)

    def cells(self) -> list[str]:
        """The row of the table: counts in the order of SUBJECTS."""
        words = [in_words(counts) for counts in self.results.values()]
        return [self.version, *words, "passed" if self.demo else "FAILED"]


def in_words(counts: Counter[str]) -> str:
    """`12`, or `11, 1 FAILED`, or `10, 2 skipped`."""
    if not counts:
        return _NOT_RUN
    parts = [str(counts["passed"])]
    parts += [f"{counts['failed']} FAILED"] if counts["failed"] else []
    parts += [f"{counts['skipped']} skipped"] if counts["skipped"] else []
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(SUITES), metavar="RELEASE")
    parser.add_argument("--workers", default="4")
    parser.add_argument("--only", action="append", choices=list(SUBJECTS), metavar="SUBJECT")
    chosen = parser.parse_args()
    subjects = tuple(chosen.only or SUBJECTS)
    os.chdir(ROOT)
    outcomes = []
    for release in chosen.releases:
        outcomes.append(try_release(release, chosen.workers, subjects))
        if any(outcomes[-1].results.values()):
            write_row(outcomes[-1])
    table(
        ["SLURM", *(name.upper() for name in SUBJECTS), "DEMO"], [one.cells() for one in outcomes]
    )
    return 0 if all(one.good(subjects) for one in outcomes) else 1


def try_release(release: str, workers: str, subjects: Sequence[str]) -> Outcome:
    """Run subjects and the demo on one release. Raises HpctrainError if it cannot be had."""
    directory = fetch_slurm(release, CACHE)
    # `slurm-wlm 24.11.5`
    version = call([str(directory / "bin" / "slurmctld"), "-V"], {}).split()[-1]
    print(f"\n== Slurm {version}", flush=True)
    report = CACHE / f"tests-{release}.xml"
    report.unlink(missing_ok=True)
    files = [file for name in subjects for file in SUBJECTS[name]]
    argv = [sys.executable, "-m", "pytest", "-rfEs", "-n", workers]
    argv += ["--dist", "worksteal", "--nightly", "--slurm", release]
    argv += [f"--junitxml={report}", *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, env=environment, check=False, timeout=None)
    demo = subprocess.run(
        [sys.executable, "scripts/demo.py", "--slurm", release],
        env=environment,
        check=False,
        timeout=None,
    )
    return Outcome(version, read_report(report), demo.returncode == 0)


def read_report(report: Path) -> dict[str, Counter[str]]:
    """Count the results of each subject; a subject of which nothing ran has no counts."""
    results: dict[str, Counter[str]] = {name: Counter() for name in SUBJECTS}
    if not report.exists():
        return results
    subject_of = {
        file.removesuffix(".py").replace("/", "."): name
        for name, files in SUBJECTS.items()
        for file in files
    }
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "skipped" if "skipped" in kinds else "passed"
        kind = "failed" if kinds & {"failure", "error"} else kind
        results[subject_of[case.get("classname", "")]][kind] += 1
    return results


def write_row(outcome: Outcome) -> None:
    """Put one release's row into the document, in the place of that of the same release."""
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    old, _, tail = rest.partition(END)
    release = outcome.version.rpartition(".")[0]
    before = [line.strip("| ").split(" | ") for line in old.splitlines()[3:]]
    cells = outcome.cells()
    for row in before:
        if row[0] == outcome.version:
            pairs = zip(row, cells, strict=True)
            cells = [then if now == _NOT_RUN else now for then, now in pairs]
    others = [row for row in before if row[0].rpartition(".")[0] != release]
    rows = [f"| {' | '.join(row)} |" for row in sorted([*others, cells])]
    titles = ["Slurm", *SUBJECTS, "demo"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *rows]
    DOCUMENT.write_text("\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
