"""Batches that grow: which samples a step has, and that neither a stop nor another size shows."""

from __future__ import annotations

from typing import Any

import pytest
from trial_runs import (
    GPT,
    PLAIN,
    TOLERANCE,
    ZERO,
    MakeTrial,
    assert_near,
    assert_resumes_exactly,
    trained,
)


# Steps of 2, 2, 4, 6, 8 and 8 samples.
RAMP: dict[str, Any] = dict(rampup_batch_size=(2, 2, 12), micro_batch_size=1)
CONSUMED = [2, 4, 8, 14, 22, 30]
TWO: dict[str, Any] = dict(RAMP, data_parallel_size=2)
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": dict(PLAIN, **TWO),
    "fsdp": dict(PLAIN, **TWO, engine="fsdp", shard_size=2),
    "megatron": dict(GPT, **TWO),
    "deepspeed, ZeRO 2": {**ZERO, **RAMP, "zero_stage": 2},
    "deepspeed, ZeRO 3": {**ZERO, **RAMP, "zero_stage": 3},
    "deepspeed, two stages": {**ZERO, **RAMP, "pipeline_stages": (1, 1), "data_parallel_size": 1},
}


@pytest.mark.parametrize("name", list(ENGINES))
def test_steps_grow_in_every_engine(name: str, trial: MakeTrial) -> None:
    whole = trained(ENGINES[name])
    print(name, whole.losses)
    assert [row.consumed_samples for row in whole.rows] == CONSUMED
    base = GPT if name == "megatron" else PLAIN
    assert_near(whole, trained(base, **RAMP), 1, norm=10 * TOLERANCE)
    resumed = trial(ENGINES[name], save_interval_steps=2)
    assert_resumes_exactly(resumed, whole, 2)
    assert [row.consumed_samples for row in resumed.rows] == CONSUMED[2:]
