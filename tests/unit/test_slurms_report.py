"""The table of docs/slurm-versions.md: what ran, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test_slurms.py"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.slurm.test_client" name="a"/>
<testcase classname="tests.slurm.test_client" name="b"><skipped message="NOT REHEARSED"/></testcase>
<testcase classname="tests.slurm.test_watch" name="c"><failure/></testcase>
<testcase classname="tests.slurm.test_watch" name="d"><error/></testcase>
<testcase classname="tests.slurm.faults.test_faults_of_nodes" name="e"/>
</testsuite></testsuites>"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurms_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "slurms_script", module)  # for its dataclasses
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCUMENT", tmp_path / "document.md")
    module.DOCUMENT.write_text(f"before\n{module.BEGIN}\n{module.END}\nafter\n")
    return module


def test_results_are_counted_by_subject(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = script.read_report(tmp_path / "report.xml")
    words = {name: script.in_words(counts) for name, counts in found.items()}
    assert words["client"] == "1, 1 skipped"
    assert words["watch"] == "0, 2 FAILED"
    assert words["node faults"] == "1"
    assert words["team"] == "not run"
    assert not script.Outcome("24.11.5", found, True).good(script.SUBJECTS)


def test_a_subject_that_did_not_run_or_a_failed_demo_is_not_good(script: ModuleType) -> None:
    passed = {name: Counter(passed=1) for name in script.SUBJECTS}
    assert script.Outcome("24.11.5", passed, True).good(script.SUBJECTS)
    assert not script.Outcome("24.11.5", passed, False).good(script.SUBJECTS)
    without = script.Outcome("24.11.5", {**passed, "team": Counter()}, True)
    assert not without.good(script.SUBJECTS)
    assert without.good(["client", "topology"])


def test_a_release_has_one_row_and_the_others_keep_theirs(script: ModuleType) -> None:
    for version, count in (("24.11.4", 1), ("22.05.8", 2), ("24.11.5", 3)):
        results = {name: Counter(passed=count) for name in script.SUBJECTS}
        script.write_row(script.Outcome(version, results, True))
    text = script.DOCUMENT.read_text()
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| 2")]
    assert rows == [["| 22.05.8", "2"], ["| 24.11.5", "3"]]
    assert text.startswith("before\n") and text.endswith("\nafter\n")


def test_what_was_left_out_stays_for_the_same_version_only(script: ModuleType) -> None:
    def row(version: str, ran: str) -> list[str]:
        results = {name: Counter({"passed": 4} if name == ran else {}) for name in script.SUBJECTS}
        script.write_row(script.Outcome(version, results, True))
        (line,) = [one for one in script.DOCUMENT.read_text().splitlines() if "| 24." in one]
        return [cell for cell in line.strip("| ").split(" | ")[1:-1] if cell != "not run"]

    assert len(row("24.11.5", "client")) == 1
    assert len(row("24.11.5", "watch")) == 2
    assert len(row("24.11.6", "team")) == 1


def test_every_subject_has_its_files(script: ModuleType) -> None:
    files = [file for group in script.SUBJECTS.values() for file in group]
    assert all((SCRIPT.parents[1] / file).is_file() for file in files)
