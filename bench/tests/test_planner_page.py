"""The figures of the planner's page: every block has a name that the programs print."""

from __future__ import annotations

from pathlib import Path

import pytest
import row_specimens as specimens

from bench.accuracy_figures import Report
from bench.planner_accuracy import OWN, PRODUCT, UNSEEN, Views
from bench.planner_page import BLOCK, PAGE, figures_of, written
from bench.predictions import predict_file


@pytest.fixture
def views(tmp_path: Path) -> Views:
    path = specimens.write(tmp_path / "t.csv", specimens.GPT, specimens.ALEPH, specimens.BUBBLE)
    runs = predict_file(path)
    return Views({view: runs for view in (PRODUCT, UNSEEN, OWN)}, {PRODUCT: runs, OWN: runs}, 0.5)


def test_every_block_of_the_page_has_figures(views: Views) -> None:
    names = [found.group(2) for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert names[:2] == ["product", "leave one source out"]
    assert set(names) == set(figures_of(views, [Report("peers", {"a": {"rows": 1}})]))


def test_blocks_are_replaced_and_nothing_else() -> None:
    page = "a\n<!-- figures: one -->\n\n```text\nold\nolder\n```\nb\n```text\nkept\n```\n"
    new = "a\n<!-- figures: one -->\n\n```text\nnew  1\n```\nb\n```text\nkept\n```\n"
    assert written(page, {"one": "new  1   "}) == new
    with pytest.raises(KeyError):
        written(page, {"two": "new"})
