"""Batch scripts of public shapes: what becomes of each line, the spec, and what the site lacks."""

from __future__ import annotations

import pytest
from golden_files import Golden
from job_scripts import SHAPES, adopted

from hpctrain.adopt.command import answer_rows


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[shape.name for shape in SHAPES])
def test_adopted(golden: Golden, number: int) -> None:
    shape = SHAPES[number]
    done = adopted(shape.text, shape.profile)
    rows = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, (4, 72, 44, 0), strict=True))
            for row in answer_rows(done)]  # fmt: skip
    needs = [f"{one.field}: {one.value}" for one in done.profile_needs]
    text = "\n".join(
        (
            *(f"# shaped after {source}" for source in shape.sources),
            *(row.rstrip() for row in rows),
            "",
            f"--- {done.name}.yaml",
            done.spec,
            f"--- {done.name}.profile.yaml" if done.overlay else "--- a profile needs",
            done.overlay or "\n".join(needs),
        )
    )
    golden(f"adopted/{shape.name}.txt", f"{text.rstrip()}\n")
