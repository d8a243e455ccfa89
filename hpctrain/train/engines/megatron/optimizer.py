"""Build AdamW and its learning-rate schedule with megatron-core; the schedule counts steps.

Belongs here: building both. Does not belong here: stepping and saving them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.engines.megatron.model import ModelChunks
from hpctrain.train.engines.megatron.option_settings import optimizer_format_settings


@dataclass(frozen=True)
class MegatronOptimizer:
    """megatron-core's optimizer and its scheduler."""

    inner: Any
    schedule: Any

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(get_canonical_lr_for_logging(self.inner.param_groups) or 0.0)


def build_optimizer(config: MegatronConfig, model: ModelChunks) -> MegatronOptimizer:
    """Build both; no weight decay on biases and norms (optimizer/__init__.py, standard
    overrides)."""
    inner = get_megatron_optimizer(
        optimizer_settings(config), model.wrapped, use_gloo_process_groups=False
    )
    model.settings.grad_scale_func = inner.scale_loss
    schedule = OptimizerParamScheduler(
        inner,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=config.lr_decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.train_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return MegatronOptimizer(inner, schedule)


def optimizer_settings(config: MegatronConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.precision == "bf16",
        params_dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
        **optimizer_format_settings(config),
    )
