"""Formats results of evaluation jobs, for the pages of runs.

Belongs here: columns and sentences. Does not belong here: reading records
(`hpctrain.runs.evaluations`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.page.text import aligned, is_numeric, paragraph

if TYPE_CHECKING:
    from hpctrain.runs.evaluations import EvaluationRow

_WIDTH = 80


def evaluation_lines(rows: Sequence[EvaluationRow], most: int | None = None) -> Iterator[str]:
    """List evaluations, newest step first, at most so many; failures with reason and log."""
    ordered = sorted(rows, key=lambda row: (-row.step, row.name))
    shown = ordered[:most]
    cells = [[f"{row.step:,}", row.name, row.state, *_job(row)] for row in shown]
    grid = [("STEP", "EVALUATION", "STATE", "JOB"), *cells]
    numeric = [is_numeric([line[column] for line in cells]) for column in range(4)]
    metrics = ["METRICS", *(_metrics(row) for row in shown)]
    for line, words in zip(aligned(grid, numeric), metrics, strict=True):
        first = "  ".join(line)
        yield from paragraph(words, f"{first}  ", hang=len(first) + 2) or [first.rstrip()]
    for row in shown:
        if row.state != "done" and row.reason:
            text = f"{row.name} of step {row.step:,}, attempt {row.attempt}: {row.reason}"
            yield from paragraph(text, "", hang=2)
            if row.log is not None:
                yield f"  {row.log}"
    if len(ordered) > len(shown):
        yield f"and {len(ordered) - len(shown)} of older checkpoints"


def _job(row: EvaluationRow) -> tuple[str]:
    return ("-" if row.job_id is None else str(row.job_id),)


def _metrics(row: EvaluationRow) -> str:
    if row.metrics is None:
        return "-"
    return ", ".join(f"{name} {value:.6g}" for name, value in row.metrics.items())
