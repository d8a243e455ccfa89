"""Tiny runs of DeepSpeed: their settings, and the same run on one process for comparison."""

from __future__ import annotations

from typing import Any

from trial_runs import EVALUATING, MODULE_GPT, MODULE_LLAMA, Trial

# fp32 rounding of a mean over other partial sums, after six steps
ROUNDING = 5e-6
PLAIN: dict[str, Any] = dict(MODULE_GPT, model={**MODULE_GPT["model"], "layers": 2})
ZERO: dict[str, Any] = dict(
    PLAIN,
    engine="deepspeed",
    zero_stage=1,
    data_parallel_size=2,
    # several buckets for a model of 100,000 weights, of which the norms stay whole at stage 3
    reduce_bucket_elements=30_000,
    gather_bucket_elements=30_000,
)
PLAIN_LLAMA: dict[str, Any] = dict(PLAIN, model=MODULE_LLAMA["model"])
# Runs that several tests read or go on from, with dropout and evaluations as those of `trial_runs`.
WITH_DROPOUT: dict[str, Any] = dict(model={**ZERO["model"], "dropout": 0.1}, async_save=True)
ZERO3: dict[str, Any] = dict(ZERO, **WITH_DROPOUT, **EVALUATING, zero_stage=3)
ZERO_PP2: dict[str, Any] = dict(
    ZERO, **WITH_DROPOUT, **EVALUATING, pipeline_stages=(1, 1), data_parallel_size=1
)
# Tensors and pipeline: two of each.
ZERO_TP2_PP2: dict[str, Any] = dict(
    ZERO,
    model=PLAIN_LLAMA["model"],
    tensor_parallel=2,
    pipeline_stages=(1, 1),
    data_parallel_size=1,
)


def words_of(trial: Trial) -> str:
    """Everything that the ranks have said."""
    return "".join(path.read_text() for path in sorted(trial.run.logs.rglob("*.log")))
