"""Compute the figures of one trial from its steps. Pure.

Belongs here: which steps count, and the sums over them. Does not belong here: reading them, or
judging them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpctrain.records.run_records import RankTimes, StepMetrics
from hpctrain.trials.documents import Measured, StepShares, StepSpread


def warm_up_steps(steps: int) -> int:
    """Count the warm-up steps of a launch, in which memory and kernels are set up."""
    return max(1, steps // 10)


def counted_steps(rows: Sequence[StepMetrics], warm_up: int) -> list[StepMetrics]:
    """Drop the warm-up steps of every launch; only the very first if no other would be left."""
    seen: dict[int, int] = {}
    counted = []
    for row in rows:
        seen[row.epoch] = seen.get(row.epoch, 0) + 1
        if seen[row.epoch] > warm_up:
            counted.append(row)
    return counted or list(rows[1:])


def measure(
    rows: Sequence[StepMetrics], warm_up: int, global_batch: int, ranks: RankTimes | None
) -> Measured | None:
    """Compute the figures of a trial; None until a step counts."""
    counted = counted_steps(rows, warm_up)
    if not counted:
        return None
    spread = spread_of([row.step_seconds for row in counted])
    own_peak = max(row.memory_bytes for row in rows)
    peaks = ranks.peak_memory_bytes if ranks else ()
    evaluated = [row for row in rows if row.eval_loss is not None]
    return Measured(
        steps=len(counted),
        step_seconds=spread,
        samples_per_second=global_batch / spread.mean,
        peak_bytes=max((own_peak, *peaks)),
        peak_of_all_ranks=bool(peaks),
        shares=shares_of(spread.mean, ranks) if ranks else None,
        eval_loss=evaluated[-1].eval_loss if evaluated else None,
        eval_accuracy=evaluated[-1].eval_accuracy if evaluated else None,
    )


def spread_of(seconds: Sequence[float]) -> StepSpread:
    """Compute quantiles by the nearest rank, so that each is a measured value."""
    ordered = sorted(seconds)

    def quantile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return StepSpread(
        median=statistics.median(ordered),
        p10=quantile(0.1),
        p90=quantile(0.9),
        mean=statistics.fmean(ordered),
    )


def shares_of(step_seconds: float, ranks: RankTimes) -> StepShares | None:
    """Divide the step into its parts; None if no rank reported."""
    if not ranks.compute_seconds:
        return None
    own = statistics.fmean(ranks.compute_seconds)
    compute = own + (_mean(ranks.backward_seconds) or 0.0)
    data, update = _mean(ranks.data_seconds), _mean(ranks.optimizer_seconds)
    # step time of the same window, if the ranks reported it
    rest = (_mean(ranks.step_seconds) or step_seconds) - compute - (data or 0.0) - (update or 0.0)
    return StepShares(
        data=data,
        compute=compute,
        update=update,
        other=max(0.0, rest),
        imbalance=max(ranks.compute_seconds) - own,
    )


def _mean(seconds: Sequence[float]) -> float | None:
    return statistics.fmean(seconds) if seconds else None
