"""Name the values of a row as TensorBoard and W&B show them. Pure.

Belongs here: names, which group curves by what stands before the slash. Does not belong here:
which rows are written (`continuous`).
"""

from __future__ import annotations

from hpctrain.records.run_records import EvaluationMetrics, StepMetrics

_EVALUATION = {"eval/loss": "eval_loss", "eval/accuracy": "eval_accuracy"}


def scalars(row: StepMetrics) -> dict[str, float]:
    """The values of a step that are known. The loss may be NaN or infinite: that is shown, too."""
    values: dict[str, float | None] = {
        "train/loss": float.fromhex(row.loss_hex),
        "train/grad_norm": row.grad_norm,
        "train/learning_rate": row.learning_rate,
        "train/consumed_samples": row.consumed_samples,
        "speed/step_seconds": row.step_seconds,
        "speed/tokens_per_second": row.tokens_per_second,
        "speed/mfu": row.mfu,
        "memory/peak_bytes": row.memory_bytes,
        "run/launch": row.epoch,
        **_evaluation(row),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def evaluation_scalars(row: EvaluationMetrics) -> dict[str, float]:
    """The values of an evaluation whose step has been written before."""
    return {name: value for name, value in _evaluation(row).items() if value is not None}


def _evaluation(row: StepMetrics | EvaluationMetrics) -> dict[str, float | None]:
    return {name: getattr(row, field) for name, field in _EVALUATION.items()}
