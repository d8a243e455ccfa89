"""Run the tests in two lanes side by side: those that compute, and those that wait.

    lanes.py --compute N --wait N [--nightly] [OPTION OF PYTEST ...]

Each lane is a pytest with processes of its own, so that each collects its own parts alone
(tests/parts.py). One process a core computes, as each of them imports all that tests use; of those
that wait, for Slurm and for processes of ours, more keep the cores busy.
Prints the lines of both as they come. At the end, for whoever has only the end of a log: each
failed test of either with what it found, and how many passed, failed and were skipped in all.
Exits with 0 if both lanes have passed, else with the worse exit code.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc_fp,
    get_cache_dir,
)
from parts import PARTS, ROOT

from hpctrain.base.durable import replace_bytes

SLOWEST = 12  # tests named at the end of each lane
WORDS_OF_FAILURE = 6  # lines of each failed test at the end of a run


def command(lane: str, processes: int, report: Path, options: Sequence[str]) -> list[str]:
    """The pytest of one lane, with the parts of the lane that such a run has."""
    runs = ("test", "nightly") if "--nightly" in options else ("test",)
    paths = [part.path for part in PARTS if part.lane == lane and part.runs in runs]
    for other in (part.path for part in PARTS if part.lane != lane):
        if any(other.startswith(f"{path}/") for path in paths):
            paths.append(f"--ignore={other}")
    argv = [sys.executable, "-m", "pytest", "-n", str(processes), "--dist", "worksteal"]
    return [*argv, f"--durations={SLOWEST}", f"--junitxml={report}", *options, *paths]


def rewrite(path: Path) -> bool:
    """Rewrite a file's assertions as pytest does when it imports it; False where that was done.

    In a new clone every process would rewrite every file for itself, which takes as long as
    collecting them. pytest has no public function for it (_pytest/assertion/rewrite.py,
    AssertionRewritingHook.exec_module, of the release in constraints.txt).
    """
    rewritten = get_cache_dir(path) / (path.stem + PYC_TAIL)
    if _read_pyc(path, rewritten) is not None:
        return False
    digest, code = _rewrite_test(path, None)  # type: ignore[arg-type]  # the default settings
    content = io.BytesIO()
    _write_pyc_fp(content, digest, code)
    rewritten.parent.mkdir(exist_ok=True)
    replace_bytes(rewritten, content.getvalue(), durable=False)
    return True


def counts(report: Path) -> Counter[str]:
    """Tests by outcome, as pytest's JUnit XML has them; nothing where it wrote none."""
    found: Counter[str] = Counter()
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            found["passed"] += int(suite.get("tests", 0)) - failed - skipped
            found += Counter(failed=failed, skipped=skipped)
    return found


def failed(report: Path) -> list[str]:
    """Each test that failed, with what it found (the lines that pytest marks E).

    Of many lines the first, which have the assertion, and the last: where the environment has CI,
    pytest shows the whole difference of two values.
    """
    if not report.exists():
        return []
    said = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for ending in (*case.iter("failure"), *case.iter("error")):
            lines = (ending.text or "").splitlines()
            found = [line for line in lines if line.startswith("E ")] or lines
            said += [f"FAILED {case.get('classname')}::{case.get('name')}"]
            if len(found) > WORDS_OF_FAILURE:
                found = found[: WORDS_OF_FAILURE // 2] + found[-(WORDS_OF_FAILURE // 2) :]
            said += found
    return said


def told(found: Counter[str]) -> str:
    """The last line of a run."""
    return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"


def exit_code(codes: Sequence[int], found: Counter[str]) -> int:
    """The worst of the lanes' codes; 1 if a lane that ended well has left no report of tests."""
    return max(map(abs, codes)) or int(found["failed"] > 0 or found["passed"] == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests in two lanes side by side.")
    cores = os.cpu_count() or 1
    parser.add_argument("--compute", type=int, required=True, metavar="N")
    parser.add_argument("--wait", type=int, required=True, metavar="N")
    arguments, options = parser.parse_known_args()
    begun = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(cores) as pool:
        tests = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("tests/**/conftest.py")]
        list(pool.map(rewrite, tests, chunksize=8))
    with tempfile.TemporaryDirectory(prefix="hpctrain-tests-") as directory:
        lanes, readers, reports = [], [], []
        for lane, processes in (("compute", arguments.compute), ("wait", arguments.wait)):
            reports.append(Path(directory, f"{lane}.xml"))
            lanes.append(
                subprocess.Popen(
                    command(lane, processes, reports[-1], options),
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
            readers.append(threading.Thread(target=_show, args=(lane, lanes[-1])))
            readers[-1].start()
        try:
            codes = [lane.wait() for lane in lanes]
        except KeyboardInterrupt:  # both lanes have heard it, too
            codes = [lane.wait() for lane in lanes]
        for reader in readers:
            reader.join()
        found = sum(map(counts, reports), Counter[str]())
        failures = [line for report in reports for line in failed(report)]
    print(*failures, sep="\n", end="\n" * bool(failures))
    print(f"in {time.monotonic() - begun:.0f} s: lanes ended with {codes}")
    print(told(found), flush=True)
    return exit_code(codes, found)


def _show(lane: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{lane:7} | {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
