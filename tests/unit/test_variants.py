from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import reliability_report
from reliability_report import FAULTS, ROOT, known_rows
from variants import chosen_by_name, declared, summary, varied

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


# What ends most jobs: every `make test` shows these on a real Slurm, the others `make reliability`.
ALWAYS_SHOWN = {
    "cancelled",
    "crash",
    "done",
    "gpu_error",
    "hang",
    "load_failed",
    "node_failure",
    "preempted",
    "prolog_failure",
    "requeued",
    "storage",
    "time_limit",
    "user_error",
}


def test_what_ends_most_jobs_is_shown_by_a_test_that_is_no_variant() -> None:
    variants = declared(TESTS)
    rows = [row for row in known_rows() if reliability_report.test_of(row) not in variants]
    causes = {cause for row in rows for cause in row[2].split(", ")}
    assert causes >= ALWAYS_SHOWN, ALWAYS_SHOWN - causes


def test_what_a_variant_varies_runs_in_make_test() -> None:
    names = {name for path in TESTS for name in _functions(path)}
    variants = declared(TESTS)
    assert variants
    assert {name: test for name, test in variants.items() if test not in names} == {}
    assert {name: test for name, test in variants.items() if test in variants} == {}


def _functions(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("def test_")]
    return [line.removeprefix("def ").partition("(")[0] for line in lines]


def test_marks_are_read_from_the_source(tmp_path: Path) -> None:
    source = tmp_path / "test_it.py"
    source.write_text('@pytest.mark.variant("test_a")\ndef test_b(): ...\ndef test_a(): ...\n')
    assert declared([source]) == {"test_b": "test_a"}


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
    assert chosen_by_name("tests/test_x.py::test_a", ["-x", argument]) is chosen
    assert chosen_by_name("tests/test_x.py::test_a[two]", ["-x", argument]) is chosen


def test_the_end_of_a_run_names_what_it_has_left_out() -> None:
    text = summary(["tests/test_x.py::test_b", "tests/test_x.py::test_a[one]"])
    assert text.splitlines()[0].startswith("not run: 2 variants")
    assert [line.strip() for line in text.splitlines()[1:]] == ["test_a[one]", "test_b"]


@pytest.mark.parametrize(("words", "left_out"), [((), True), (("--variants",), False)])
def test_a_run_of_several_processes_leaves_out_and_says_so(
    words: tuple[str, ...], left_out: bool
) -> None:
    """The worker collects a file with a variant and runs nothing of it."""
    file = str(FAULTS / "test_faults_of_people.py")
    options = ("-q", "-n1", "-k", "no_such_name", "-p", "no:rerunfailures")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, found
    told = "not run: 1 variant" in found.stdout and "during_the_grace" in found.stdout
    assert told is left_out, found.stdout
