"""Read of the step metrics only what an account of time needs: several times as fast.

Belongs here: time and tokens of steps, and reading on from a place in the file. Does not belong
here: the other metrics (`run_records`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    EvaluationMetrics,
    StepMetrics,
    parse_record,
    with_measured_seconds,
)


class StepTime(NamedTuple):
    """A step: its end in seconds since the epoch, and its tokens (images of models of images).

    `step_seconds`, `tokens`: None where the trainer did not report them; seconds then as
    `with_measured_seconds` finds them.
    """

    step: int
    epoch: int
    time: float
    step_seconds: float | None
    tokens: int | None


# More of a step are a damaged number.
_MOST_TOKENS = 1e15
_NUMBER = rb"-?(?:0|[1-9]\d{0,17})(?:\.\d+)?(?:[eE][+-]?\d{1,2})?"
_WHOLE = rb"-?(?:0|[1-9]\d{0,17})"
_MAYBE = rb"(?:null|" + _NUMBER + rb")"
# A line as `append_metrics` writes it. All of it is matched: what `run_records` would refuse, such
# as a torn line, is no step here either.
_LINE = re.compile(
    rb'\{(?:"schema_version":1,)?"step":(' + _WHOLE + rb'),"epoch":(' + _WHOLE + rb")"
    rb',"time":(' + _NUMBER + rb'),"loss":' + _MAYBE + rb',"loss_hex":"[ -!#-\[\]-~]*"'
    rb',"grad_norm":' + _MAYBE + rb',"learning_rate":' + _NUMBER + rb',"step_seconds":('
    + _NUMBER + rb'),"tokens_per_second":(' + _NUMBER + rb'),"mfu":' + _MAYBE
    + rb',"memory_bytes":' + _WHOLE + rb',"consumed_samples":' + _WHOLE
    + rb',"eval_loss":' + _MAYBE + rb',"eval_accuracy":' + _MAYBE
    + rb',"profiled":(?:true|false)\}\s*'
)  # fmt: skip


def read_step_times(run: RunLayout) -> list[StepTime]:
    """Read the same rows as `read_metrics`, in the order written.

    Lines that this code has not written itself are read as `read_metrics` reads them. Raises
    NewerFormatError for a format of a newer hpctrain.
    """
    if not run.metrics.exists():
        return []
    rows: list[StepTime] = []
    for line in run.metrics.read_bytes().splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            step, epoch, time, seconds, rate = found.groups()
            row = _step_time(int(step), int(epoch), float(time), float(seconds), float(rate))
        else:
            metrics = parse_record(run.metrics, line, StepMetrics)
            if metrics is None:
                continue
            row = _step_time(
                metrics.step,
                metrics.epoch,
                metrics.time,
                metrics.step_seconds,
                metrics.tokens_per_second,
            )
        rows.append(row)
    return with_measured_seconds(
        rows, lambda row, time, seconds: row._replace(time=time, step_seconds=seconds)
    )


def _step_time(
    step: int, epoch: int, time: float, step_seconds: float | None, tokens_per_second: float | None
) -> StepTime:
    """Make a row; a product of damaged numbers counts as no tokens."""
    if step_seconds is None or tokens_per_second is None:
        return StepTime(step, epoch, time, step_seconds, None)
    tokens = step_seconds * tokens_per_second
    return StepTime(
        step, epoch, time, step_seconds, round(tokens) if 0 <= tokens < _MOST_TOKENS else 0
    )


# -- Read the step metrics of a run from where the last reader ended ----------------------------


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
