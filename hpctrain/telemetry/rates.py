"""Summarize the latest metrics of a run: loss, step time, throughput, MFU. Pure.

Does not belong here: reading files, text.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.records.run_records import StepMetrics


@dataclass(frozen=True)
class Rates:
    """Medians over the last steps; None without any step, and for what is not reported."""

    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None


def recent_rates(rows: Sequence[StepMetrics], window: int = 20) -> Rates:
    """Summarize the last `window` steps of the newest epoch.

    The first step of a launch, which includes warm-up, and profiled steps are left out when there
    are others. The step time is that of earlier epochs while the newest one has none.
    """
    if not rows:
        return Rates(None, None, None, None)
    newest = [row for row in rows if row.epoch == rows[-1].epoch]
    usual = [row for row in newest[1:] if not row.profiled]
    recent = (usual or newest)[-window:]
    return Rates(
        loss=rows[-1].loss,
        step_seconds=median_known(row.step_seconds for row in recent)
        or median_known(row.step_seconds for row in rows[-window:]),
        tokens_per_second=median_known(row.tokens_per_second for row in recent),
        mfu=median_known(row.mfu for row in recent),
    )


def median_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that were reported; None if none was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
