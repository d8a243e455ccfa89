"""Read the step metrics of a run from where the last reader ended.

Belongs here: lines of `metrics.jsonl` with their places in the file. Does not belong here: which
of them count (`run_records.lineage`, `hpctrain.tracking.continuous`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import EvaluationMetrics, StepMetrics, parse_record


@dataclass(frozen=True)
class PlacedRow:
    """A row, and the offset of its line in the file in bytes."""

    row: StepMetrics | EvaluationMetrics
    offset: int


def rows_from(run: RunLayout, offset: int) -> tuple[list[PlacedRow], int]:
    """Read the complete lines from `offset` on; returns them and the offset behind them.

    A last line without its end is left for the next call. A torn line that a later writer has ended
    is left out. Raises OSError when the file cannot be read.
    """
    rows: list[PlacedRow] = []
    try:
        stream = run.metrics.open("rb")
    except FileNotFoundError:
        return rows, offset
    with stream:
        stream.seek(offset)
        for line in stream:
            if not line.endswith(b"\n"):
                break
            row = parse_record(run.metrics, line, StepMetrics)
            late = None if row else parse_record(run.metrics, line, EvaluationMetrics)
            if (known := row or late) is not None:
                rows.append(PlacedRow(known, offset))
            offset += len(line)
    return rows, offset
