"""What the metrics of a run say in a few numbers: rate, loss, time left. Pure.

Belongs here: summaries of metric rows. Does not belong here: reading files or showing anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The part of one step's metrics that summaries need."""

    step: int
    epoch: int
    loss: float | None
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    profiled: bool = False


@dataclass(frozen=True)
class Rates:
    """Medians over the last steps; None without any step."""

    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None


def recent_rates(rows: Sequence[Row], window: int = 20) -> Rates:
    """Summarise the last `window` steps of the newest epoch.

    The first step of a launch is left out when there are others: it includes warm-up; so are
    steps at which a profiler was at work.
    """
    if not rows:
        return Rates(None, None, None, None)
    newest = [row for row in rows if row.epoch == rows[-1].epoch]
    usual = [row for row in newest[1:] if not row.profiled]
    recent = (usual or newest)[-window:]
    mfus = [row.mfu for row in recent if row.mfu is not None]
    return Rates(
        loss=rows[-1].loss,
        step_seconds=statistics.median(row.step_seconds for row in recent),
        tokens_per_second=statistics.median(row.tokens_per_second for row in recent),
        mfu=statistics.median(mfus) if mfus else None,
    )
