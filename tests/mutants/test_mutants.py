"""The rows of `mutants.yaml` fit the product; at night, the tests notice each of them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import parts
import pytest
from run_mutants import KILLED, ROOT, Mutant, read_mutants, run_mutant, scratch_copy

MUTANTS = {one.name: one for one in read_mutants()}
LEAST, LEAST_REAL = 40, 8
# Where tests train, or run a real Slurm.
REAL = ("tests/engines/", "tests/slurm/")


def files_of(mutant: Mutant) -> set[str]:
    return {test.partition("::")[0] for test in mutant.killed_by}


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    names = Counter(one.name for one in read_mutants())
    assert len(names) >= LEAST and set(names.values()) == {1}
    real = [one for one in MUTANTS.values() if all(f.startswith(REAL) for f in files_of(one))]
    assert len(real) >= LEAST_REAL, "those that only real training or a real Slurm shows"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_row_changes_one_line_and_names_tests_that_exist(name: str) -> None:
    mutant = MUTANTS[name]
    broken = mutant.text(ROOT)  # raises if the fragment is not there once
    whole = (ROOT / mutant.file).read_text()
    assert broken != whole and len(broken.splitlines()) == len(whole.splitlines())
    if mutant.file.endswith(".py"):
        ast.parse(broken)
    missing = [file for file in files_of(mutant) if not (ROOT / file).exists()]
    assert mutant.killed_by and not missing, missing


def test_tests_that_are_named_run_in_make_test() -> None:
    """What is killed at night only is not noticed by a landing."""
    out = {f"{one.file}::{one.test}" for one in parts.marked(parts.test_files()) if one.test}
    named = {test for one in MUTANTS.values() for test in one.killed_by}
    assert not named & out


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with scratch_copy() as made:
        yield made


@pytest.mark.nightly("minutes: one run of tests per mutant")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_line_is_noticed(name: str, copy: Path) -> None:
    """That the same tests pass on whole code is shown by the run that this test is part of."""
    result = run_mutant(copy, MUTANTS[name])
    assert result.outcome == KILLED, f"{result.outcome}: {result.told}"
