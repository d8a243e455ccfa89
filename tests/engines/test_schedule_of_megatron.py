"""Engines without a schedule of their own take megatron-core's numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from trial_runs import MODULE_GPT

from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.schedule import learning_rate

STEPS = 60


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_same_rates(style: str, warmup: int) -> None:
    changes: dict[str, Any] = dict(lr_decay_style=style, lr_warmup_steps=warmup, lr_decay_steps=50)
    config = parse_train_config(json.dumps({**MODULE_GPT, **changes}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=50,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    for step in range(STEPS):
        assert learning_rate(config, step) == optimizer.param_groups[0]["lr"], step
        theirs.step(increment=1)
