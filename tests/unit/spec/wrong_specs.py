"""A small valid spec to break on purpose, and a way to see the problems as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.loader import load_run_spec

VALID = """\
name: tiny
model: {layers: 4, hidden: 128, heads: 4, vocab: 1024, seq: 128}
batch: {global: 8}
budget: {steps: 60}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 10}
resources: {gpus: 4}
"""


def problems_of(tmp_path: Path, text: str | bytes, *overrides: str) -> tuple[Problem, ...]:
    """What is wrong with this text as a run spec; fails when nothing is."""
    file = tmp_path / "spec.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidInputError) as caught:
        load_run_spec(file, overrides)
    assert caught.value.exit_code == 3
    return caught.value.problems


def shown(tmp_path: Path, problems: tuple[Problem, ...]) -> list[str]:
    """`line:col: message | hint`, without the directory."""
    lines = []
    for problem in problems:
        text = str(problem).replace(f"{tmp_path}/spec.yaml:", "")
        lines.append(f"{text} | {problem.hint}" if problem.hint else text)
    return lines
