"""Detect non-finite gradients, losses and weights, loss spikes, and missing evaluations.

Does not belong here: agreement of ranks (see `step_agreement`), ending the run (see `loop`,
`entry`), the reaction (the supervisor decides).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import StepMetrics, lineage, tail_metrics

WINDOW_STEPS = 64
LEAST_STEPS = 16
# A nearly constant loss (a tiny model that has memorized its data) has a spread near zero, and
# anything would be a spike: the spread is at least this fraction of the median.
_LEAST_SPREAD = 1e-3
_FIRST_TAIL_ROWS = 256


class LossWindow:
    """The last losses. A spike is `limit` median absolute deviations (MAD) above their median.

    Median and MAD are robust against a single outlier, unlike mean and standard deviation (Leys et
    al. 2013, J. Exp. Soc. Psychol. 49, 764-766). `limit` None: nothing is a spike.
    """

    def __init__(self, limit: float | None, losses: Iterable[float] = ()) -> None:
        self._limit = limit
        self._losses = deque(losses, maxlen=WINDOW_STEPS)

    @property
    def last(self) -> float:
        """The last stored loss; nan when there is none."""
        return self._losses[-1] if self._losses else math.nan

    def spike(self, loss: float) -> str | None:
        """Describe a spike of a finished step; for a usual loss, store it and return None."""
        if self._limit is not None:
            deviations = 0.0
            if len(self._losses) >= LEAST_STEPS:
                median = statistics.median(self._losses)
                spread = statistics.median(abs(known - median) for known in self._losses)
                deviations = (loss - median) / max(spread, _LEAST_SPREAD * abs(median))
            if deviations >= self._limit:
                median = statistics.median(self._losses)
                return (
                    f"loss spike: {deviations:.3g} median absolute deviations above the median "
                    f"{median:.7g} of the last {len(self._losses)} losses (limit {self._limit:g})"
                )
        self._losses.append(loss)
        return None


def rows_up_to(
    run: RunLayout, step: int, enough: Callable[[list[StepMetrics]], bool]
) -> list[StepMetrics]:
    """Read the last rows of metrics that led to the weights of `step`, oldest first.

    More and more of the file is read, until the rows are `enough` or all.
    """
    count = _FIRST_TAIL_ROWS
    while True:
        rows = tail_metrics(run, count)
        kept = lineage([row for row in rows if row.step <= step])
        if enough(kept) or len(rows) < count:
            return kept
        count *= 4


def earlier_losses(run: RunLayout, step: int) -> list[float]:
    """Read the losses of the last steps that led to the weights of `step`, oldest first."""

    def losses(rows: list[StepMetrics]) -> list[float]:
        exact = (row.exact_loss for row in rows if row.loss is not None)
        return [loss for loss in exact if loss is not None]

    rows = rows_up_to(run, step, lambda rows: len(losses(rows)) >= WINDOW_STEPS)
    return losses(rows)[-WINDOW_STEPS:]


def evaluation_is_missing(run: RunLayout, step: int) -> bool:
    """Check whether the metrics have the row of `step` without the result of its evaluation.

    Called on rank 0 when a launch resumes at an evaluated step. The launch that trained the step
    may have stopped and saved before the evaluation was complete.
    """
    rows = rows_up_to(run, step, lambda rows: bool(rows) and rows[-1].step == step)
    return bool(rows) and rows[-1].step == step and rows[-1].eval_loss is None


def what_is_not_finite(loss: float, grad_norm: float | None) -> str | None:
    """Name the number of a step that is not finite; None if all are."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    if grad_norm is not None and not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm}"
    return None


@torch.no_grad()
def are_finite(tensors: Sequence[Any]) -> bool:
    """Check tensors of one device in one pass: the largest magnitude is nan or inf if any is.

    A shard of a weight that has fewer rows than there are ranks may be empty.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return True
    largest = torch.stack(torch._foreach_norm(filled, float("inf"))).max()
    return bool(torch.isfinite(largest))
