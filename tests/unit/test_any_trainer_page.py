"""docs/any-trainer.md: its first spec is one, its fields and levels exist, its tests are there."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.spec.loader import load_any_run_spec
from hpctrain.spec.trainer import LEVELS, PLACEHOLDERS, CompleteSpec, TrainerRunSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "any-trainer.md").read_text()
SITUATIONS = 13
MOST_LINES = 12


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_first_spec_is_short_and_reaches_level_3(tmp_path: Path) -> None:
    text = PAGE.partition("```yaml\n")[2].partition("```")[0]
    assert len(text.splitlines()) <= MOST_LINES
    (tmp_path / "spec.yaml").write_text(text)
    document = load_any_run_spec(tmp_path / "spec.yaml").document
    assert isinstance(document, TrainerRunSpec) and document.trainer.level == 3


def test_there_is_a_row_for_each_level_name_and_rule() -> None:
    assert [row[0] for row in rows(section("Four levels"))] == [str(n) for n in range(len(LEVELS))]
    names = re.findall(r"`\{(\w+)\}`", section("How it is started").partition("| is |")[2])
    assert {*names} == {*PLACEHOLDERS}
    told = " ".join(row[0] for row in rows(section("When a checkpoint is complete")))
    for name, field in CompleteSpec.model_fields.items():
        assert f"`{field.alias or name}" in told, name


def test_each_public_situation_has_a_test_that_exists() -> None:
    found = rows(section("Thirteen public situations"))
    assert len({where for where, *_ in found}) == len(found) == SITUATIONS
    assert all(len(row) == 4 and row[3].count("::") == 1 for row in found)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > SITUATIONS
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_files_that_the_page_names_are_there() -> None:
    for target in re.findall(r"\]\(([\w/.-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"`((?:tests|examples)/[\w/.-]+\.\w+)`", PAGE):
        assert (ROOT / path).exists(), path
