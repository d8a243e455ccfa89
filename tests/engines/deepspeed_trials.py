"""Tiny runs of DeepSpeed: their settings, and the same run on one process for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trial_runs import MODULE_GPT, MODULE_LLAMA, Trial, make_trial

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


def alone(directory: Path, base: dict[str, Any] = PLAIN) -> Trial:
    """One process, plain PyTorch."""
    made = make_trial(directory, base)
    assert made.train() == [0]
    return made


def trained(directory: Path, **changes: Any) -> Trial:
    """A whole run with a checkpoint after every second step."""
    made = make_trial(directory, {**ZERO, **changes}, save_interval_steps=2)
    assert made.train() == [0] * made.world_size
    return made


def words_of(trial: Trial) -> str:
    """Everything that the ranks have said."""
    return "".join(path.read_text() for path in sorted(trial.run.logs.rglob("*.log")))
