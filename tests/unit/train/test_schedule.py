"""The learning rate by steps, beside megatron-core's own scheduler (tests/engines has that)."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.engines.training import TrainConfig
from hpctrain.train.schedule import learning_rate

PLAN = dict(lr=1.0, min_lr=0.1, lr_warmup_steps=10, lr_decay_steps=110)


def rate(step: int, **changes: Any) -> float:
    values = {**PLAN, "lr_decay_style": "cosine", **changes}
    return learning_rate(TrainConfig.model_construct(**values), step)


@pytest.mark.parametrize(
    ("step", "style", "expected"),
    [
        (0, "cosine", 0.0),
        (5, "cosine", 0.5),
        (10, "cosine", 1.0),
        (60, "cosine", 0.55),
        (110, "cosine", 0.1),
        (111, "cosine", 0.1),
        (60, "linear", 0.55),
        (35, "linear", 0.775),
        (35, "cosine", 0.1 + 0.9 * (1 + 2**-0.5) / 2),
        (500, "constant", 1.0),
        (5, "constant", 0.5),
    ],
)
def test_rates(step: int, style: str, expected: float) -> None:
    assert rate(step, lr_decay_style=style) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_constant_until_its_last_steps(style: str, middle: float) -> None:
    wsd = dict(lr_decay_style="wsd", wsd_decay_steps=20, lr_wsd_decay_style=style)
    assert [rate(step, **wsd) for step in (5, 10, 50, 90)] == pytest.approx([0.5, 1, 1, 1])
    assert rate(100, **wsd) == pytest.approx(0.1 + 0.9 * middle)
    assert rate(110, **wsd) == pytest.approx(0.1)


def test_where_batches_grow_the_rate_follows_samples() -> None:
    # steps of 2, 2, 4, 6 and then 8 samples
    ramp = dict(rampup_batch_size=(2, 2, 12), global_batch_size=8, lr_warmup_steps=3)
    consumed = [0, 2, 4, 8]
    assert [rate(step, **ramp) for step in range(4)] == [samples / 8 for samples in consumed]
    linear = dict(ramp, lr_decay_style="linear", lr_decay_steps=5)
    assert rate(4, **linear) == pytest.approx(1 - 0.9 * (14 - 8) / (22 - 8))
    wsd = dict(lr_decay_style="wsd", wsd_decay_steps=2, lr_wsd_decay_style="linear")
    wsd |= dict(ramp, lr_decay_steps=6)
    assert [rate(step, **wsd) for step in (4, 5, 6)] == pytest.approx([1, 0.55, 0.1])


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert rate(0, lr_warmup_steps=0) == 1.0
