"""Every test runs somewhere, and what `make test` leaves out is chosen by marks that say why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import parts
import pytest
import reliability_report
from reliability_report import FAULTS, ROOT, known_rows
from variants import varied

# Every cause that a rehearsal on a real Slurm shows, but `diverged`: three launches that train.
ALWAYS_SHOWN = {
    "bad_checkpoint",
    "cancelled",
    "config_error",
    "crash",
    "data_changed",
    "deadline",
    "disk_full",
    "done",
    "external_signal",
    "gpu_error",
    "gpu_oom",
    "hang",
    "load_failed",
    "node_failure",
    "port",
    "preempted",
    "prolog_failure",
    "requeued",
    "storage",
    "time_limit",
    "user_error",
    "yielded",
}


@pytest.fixture(scope="module")
def marks() -> list[parts.Marked]:
    return parts.marked(parts.test_files())


def test_what_ends_most_jobs_is_shown_in_make_test(marks: list[parts.Marked]) -> None:
    out = {one.test for one in marks} | _tests_of({one.file for one in marks if not one.test})
    rows = [row for row in known_rows() if reliability_report.test_of(row) not in out]
    causes = {cause for row in rows for cause in row[2].split(", ")}
    assert causes >= ALWAYS_SHOWN, ALWAYS_SHOWN - causes


def test_what_a_variant_varies_runs_in_make_test(marks: list[parts.Marked]) -> None:
    names = {name for path in parts.test_files() for name in parts._functions(path)}
    variants = {one.test: one.text for one in marks if one.mark == parts.VARIANT}
    assert variants
    assert {name: test for name, test in variants.items() if test not in names} == {}
    # in a file that runs at night as a whole, a variant varies a test that does, too
    whole = _tests_of({one.file for one in marks if not one.test})
    variants = {name: test for name, test in variants.items() if name not in whole}
    out = {one.test for one in marks} | whole
    assert {name: test for name, test in variants.items() if test in out} == {}


def test_what_is_left_to_the_night_says_why(marks: list[parts.Marked]) -> None:
    assert [one for one in marks if one.mark == parts.NIGHTLY and len(one.text.split()) < 2] == []
    assert [part for part in parts.PARTS if part.runs != "test" and not part.why] == []


def test_every_file_of_tests_is_in_a_part() -> None:
    for path in parts.test_files():
        parts.part_of(path.relative_to(ROOT).as_posix())
    with pytest.raises(LookupError, match=r"tests/new/test_x\.py belongs to no part"):
        parts.part_of("tests/new/test_x.py::test_a")


def test_the_page_says_what_runs_where() -> None:
    text = parts.DOCUMENT.read_text()
    assert text == parts.with_tables(text), "run `python tests/parts.py`"


def _tests_of(files: set[str]) -> set[str]:
    return {name for file in files for name in parts._functions(ROOT / file)}


def test_marks_are_read_from_the_source(tmp_path: Path) -> None:
    source = tmp_path / "test_it.py"
    source.write_text(
        'pytestmark = [pytest.mark.nightly("all of it"), pytest.mark.stand_in]\n'
        '@pytest.mark.variant("test_a")\ndef test_b(): ...\ndef test_a(): ...\n'
    )
    assert parts.marked([source]) == [
        parts.Marked("test_it.py", "", "nightly", "all of it"),
        parts.Marked("test_it.py", "test_b", "variant", "test_a"),
    ]


def test_parameters_are_variants_but_for_some() -> None:
    plain, variant = varied(["a", "b"], "a")
    assert (plain.id, plain.marks) == ("a", ())
    assert (variant.id, [mark.name for mark in variant.marks]) == ("b", ["variant"])
    with pytest.raises(AssertionError, match="c"):
        varied(["a", "b"], "c")


@pytest.mark.parametrize(
    ("argument", "chosen"),
    [
        ("tests/test_x.py::test_a", True),
        ("test_x.py::test_a", True),
        ("tests/test_x.py", False),
        ("tests", False),
        ("tests/test_x.py::test_b", False),
        ("tests/test_x.py::test_a[one]", False),
    ],
)
def test_who_is_named_on_the_command_line_runs(argument: str, chosen: bool) -> None:
    assert parts.chosen_by_name("tests/test_x.py::test_a", ["-x", argument]) is chosen
    assert parts.chosen_by_name("tests/test_x.py::test_a[two]", ["-x", argument]) is chosen


@pytest.mark.parametrize(
    ("words", "left_out"),
    [((), True), pytest.param(("--nightly",), False, marks=pytest.mark.variant)],
)
def test_a_run_of_several_processes_leaves_out_and_says_so(
    words: tuple[str, ...], left_out: bool
) -> None:
    """The worker collects a file with a variant and runs nothing of it."""
    file = str(FAULTS / "test_faults_of_people.py")
    options = ("-q", "-n1", "-k", "no_such_name")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, found
    assert ("not run: 1 tests that `make nightly` runs" in found.stdout) is left_out, found.stdout
