"""Two lanes of tests: what each runs, and what is said when both have ended."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import lanes
import parts
import pytest
from longest_first import deal, durations_text, shares

REPORT = Path("report.xml")
PATHS = {part.path for part in parts.PARTS}


@pytest.mark.parametrize(
    ("options", "runs"), [((), {"test"}), (("--nightly",), {"test", "nightly"})]
)
def test_every_part_is_in_one_lane(options: tuple[str, ...], runs: set[str]) -> None:
    words = [lanes.command(lane, 2, REPORT, options) for lane in ("compute", "wait")]
    named = [word for argv in words for word in argv if word in PATHS]
    assert sorted(named) == sorted(part.path for part in parts.PARTS if part.runs in runs)
    assert all(set(options) <= set(argv) for argv in words)


def test_what_one_lane_runs_the_other_one_leaves_out() -> None:
    """Also where the path of a part lies within that of another one."""
    for part in (part for part in parts.PARTS if part.runs == "test"):
        ran = []
        for lane in ("compute", "wait"):
            argv = lanes.command(lane, 2, REPORT, ())
            out = [word.removeprefix("--ignore=") for word in argv if word.startswith("--ignore=")]
            is_in = any(f"{part.path}/".startswith(f"{path}/") for path in argv if path in PATHS)
            ran += [lane] * (is_in and part.path not in out)
        assert ran == [part.lane], part.path


def test_a_file_is_rewritten_once_and_for_pytest(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_it():\n    assert [1, 2] == [1, 3]\n")
    assert [lanes.rewrite(file), lanes.rewrite(file)] == [True, False]
    (written,) = (tmp_path / "__pycache__").iterdir()
    before = written.stat().st_mtime_ns
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "At index 1 diff: 2 != 3" in told.stdout
    assert written.stat().st_mtime_ns == before, "pytest has rewritten it again"


def test_outcomes_of_both_lanes_are_added_up(tmp_path: Path) -> None:
    first, second = tmp_path / "1.xml", tmp_path / "2.xml"
    suite = (
        '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    )
    first.write_text(suite.format(10, 1, 1, 2))
    second.write_text(suite.format(5, 0, 0, 0))
    found = lanes.counts(first) + lanes.counts(second) + lanes.counts(tmp_path / "none.xml")
    assert lanes.told(found) == "11 passed, 2 failed, 2 skipped"


@pytest.mark.parametrize("ci", ["", "true"])
def test_what_failed_is_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    """By a report that pytest wrote: an assertion, a fixture, and a test that passes.

    With CI in the environment pytest writes the whole difference of two values, line by line.
    """
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv("BUILD_NUMBER", raising=False)
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef broken():\n    raise OSError('no disk')\n\n\n"
        "def test_one():\n    assert list(range(40)) == [*range(39), 3]\n\n\n"
        "def test_two(broken):\n    pass\n\n\ndef test_three():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=r.xml"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    said = lanes.failed(tmp_path / "r.xml")
    assert [line for line in said if line.startswith("FAILED")] == [
        "FAILED test_some::test_one",
        "FAILED test_some::test_two",
    ]
    found = [line for line in said if line.startswith("E ") and "OSError" not in line]
    assert found[0].startswith("E       assert [0, 1, 2, 3, 4, 5, ...] == [0, 1, 2")
    assert len(found) <= lanes.WORDS_OF_FAILURE
    assert "E       OSError: no disk" in said
    assert lanes.failed(tmp_path / "none.xml") == []


@pytest.mark.parametrize(
    ("codes", "found", "code"),
    [
        ([0, 0], {"passed": 9}, 0),
        ([0, 1], {"passed": 9, "failed": 1}, 1),
        ([0, -9], {"passed": 9}, 9),
        ([0, 0], {"passed": 9, "failed": 1}, 1),
        ([0, 0], {}, 1),
    ],
)
def test_a_run_is_good_only_if_both_lanes_are(
    codes: list[int], found: dict[str, int], code: int
) -> None:
    assert lanes.exit_code(codes, Counter(found)) == code


# -- In which order several processes run the tests ----------------------------------------------


def test_shares_are_those_of_xdist() -> None:
    assert shares(10, 3) == [3, 3, 4]
    assert shares(2, 4) == [0, 0, 1, 1]


def test_every_share_begins_with_long_files() -> None:
    tests = ["a1", "a2", "b1", "b2", "b3", "c1", "c2", "d1", "e1", "f1", "f2", "f3"]
    seconds = {"c": 9.0, "d": 8.0, "e": 7.0, "f": 6.0}
    dealt = deal(tests, lambda test: test[0], seconds, 3)
    assert [dealt[:4], dealt[4:8], dealt[8:]] == [
        ["c1", "c2", "a1", "a2"],
        ["d1", "b1", "b2", "b3"],
        ["e1", "f1", "f2", "f3"],
    ]
    assert deal(tests, lambda test: test[0], {}, 3) == tests
    assert deal([], str, seconds, 3) == []


def test_a_file_larger_than_a_share_stays_where_it_is() -> None:
    tests = ["a1", "b1", "b2", "b3"]
    assert deal(tests, lambda test: test[0], {"b": 9.0}, 2) == tests


def test_only_long_files_are_written_down() -> None:
    assert durations_text({"a": 4.9, "b": 5.4, "c": 30.0}) == '{\n "c": 30,\n "b": 5\n}\n'
