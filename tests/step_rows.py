"""A row of metrics, as the trainer writes it after each step."""

from __future__ import annotations

from typing import Any

from hpctrain.records.run_records import StepMetrics


def trained_step(step: int, loss: float | None = 1.0, **changes: Any) -> StepMetrics:
    """Make the row of a step; fields that are not given have a usual value of a small run."""
    usual = dict(
        step=step,
        epoch=1,
        time=0.0,
        loss=loss,
        loss_hex=float("nan" if loss is None else loss).hex(),
        grad_norm=1.0,
        learning_rate=1e-3,
        step_seconds=1.0,
        tokens_per_second=1.0,
        mfu=None,
        memory_bytes=1,
        consumed_samples=8 * step,
    )
    return StepMetrics.model_validate(usual | changes)
