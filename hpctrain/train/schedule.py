"""Compute the learning rate of a step, for engines without a scheduler of their own.

The numbers equal megatron-core's (optimizer_param_scheduler.py, get_lr), so that losses of
different engines can be compared. A pure function of the step: it has no state in a checkpoint.
Does not belong here: setting the rate of an optimizer.
"""

from __future__ import annotations

import math
from typing import Any

from hpctrain.engines.training import TrainConfig


def learning_rate(config: TrainConfig, finished_steps: int) -> float:
    """Return the rate of the step that follows `finished_steps` steps.

    Linear from 0 up to `lr` over the warm-up, then down to `min_lr` over the decay, of which `wsd`
    has the last steps only; the first step of a warm-up has a rate of 0. Where batches grow, all of
    this is in samples.
    """
    count = config.schedule_count
    finished, warmup, end = map(
        count, (finished_steps, config.lr_warmup_steps, config.lr_decay_steps)
    )
    if warmup > 0 and finished <= warmup:
        return config.lr * finished / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if finished > end:
        return config.min_lr
    style: str = config.lr_decay_style
    begin = warmup
    if style == "wsd":
        assert config.wsd_decay_count is not None, "the spec was checked"
        style, begin = config.lr_wsd_decay_style, end - config.wsd_decay_count
        if finished <= begin:
            return config.lr
    passed = (finished - begin) / (end - begin)
    share = {
        "linear": 1.0 - passed,
        "cosine": 0.5 * (math.cos(math.pi * passed) + 1.0),
        "exponential": 2.0 * 0.5**passed - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(passed),
    }[style]
    return config.min_lr + share * (config.lr - config.min_lr)


# -- Group the parameters by weight decay --------------------------------------------------------


def parameter_groups(config: TrainConfig, module: Any) -> list[dict[str, Any]]:
    """Return the groups of trainable parameters for AdamW: no weight decay on biases and norms.

    As megatron-core does by default (megatron/core/optimizer/__init__.py: names that end in
    `.bias`, and one dimension).
    """
    decayed: list[Any] = []
    plain: list[Any] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ds_shape: of ZeRO stage 3
            small = len(shape) <= 1 or name.endswith(".bias")
            (plain if small else decayed).append(parameter)
    groups = [
        dict(params=decayed, weight_decay=config.weight_decay),
        dict(params=plain, weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]
