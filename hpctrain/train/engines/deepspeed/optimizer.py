"""What is asked of DeepSpeed's optimizers beyond a step: groups, rates, scales, norms.

ZeRO stages 1 to 3 have an optimizer of DeepSpeed's around AdamW, stage 0 has AdamW itself.
Belongs here: these differences. Does not belong here: the schedule (see `hpctrain.train.schedule`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from hpctrain.engines.deepspeed import DeepSpeedConfig


def parameter_groups(config: DeepSpeedConfig, module: Any) -> list[dict[str, Any]]:
    """Weight decay leaves out biases and norms, as megatron-core does by default
    (megatron/core/optimizer/__init__.py: names that end in `.bias`, and one dimension)."""
    decayed: list[Any] = []
    plain: list[Any] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ds_shape: while divided
            small = len(shape) <= 1 or name.endswith(".bias")
            (plain if small else decayed).append(parameter)
    groups = [
        dict(params=decayed, weight_decay=config.weight_decay),
        dict(params=plain, weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


def set_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def settle(config: DeepSpeedConfig, engine: Any, decays: list[float]) -> None:
    """After a checkpoint was loaded: what the run says counts, not what was saved.

    And what runtime/zero/stage3.py leaves wrong when it loads the universal format
    (load_hp_checkpoint_state_from_checkpoint_dir_stage3): all groups get the settings of the first
    one, so that biases and norms would decay; and all get one tensor for the number of steps, which
    AdamW would count up once for each group. Neither shows in the first loss.
    """
    for group, decay in zip(engine.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
        group["betas"] = (config.adam_beta1, config.adam_beta2)
        group["eps"] = config.adam_eps
    if config.zero_stage > 0:
        engine.optimizer.clip_grad = config.clip_grad
    for state in engine.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


@torch.no_grad()
def divide_gradients(engine: Any, divisor: float) -> None:
    """Of the coming step, before its norm is taken and clipped."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        # runtime/bf16_optimizer.py, bf16 at stage 1: knows no scale
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
    elif hasattr(optimizer, "override_loss_scale"):
        # runtime/zero: gradients are divided by the scale of the loss on their way to AdamW
        optimizer.override_loss_scale(divisor)
    else:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


def undivided(engine: Any) -> None:
    """Losses of the coming backward passes are not multiplied."""
    optimizer = engine.optimizer
    if getattr(optimizer, "custom_loss_scaler", False):
        optimizer.override_loss_scale(1.0)


def norm_before_step(engine: Any, tensors: Any) -> Any:
    """Stage 0: of the summed gradients, which every rank has; later it is too late.

    `tensors`: the group that splits weights, so that each rank has a part of some gradients.
    """
    learned = [p for p in engine.module.parameters() if p.grad is not None]
    if tensors is None:
        return torch.nn.utils.get_total_norm([p.grad for p in learned])
    parts = [p.grad for p in learned if is_model_parallel_parameter(p)]
    others = [p.grad for p in learned if not is_model_parallel_parameter(p)]
    squares = torch.nn.utils.get_total_norm(parts).square()
    dist.all_reduce(squares, group=tensors)
    return (squares + torch.nn.utils.get_total_norm(others).square()).sqrt()


def norm_after_step(engine: Any) -> float:
    """Stages 1 to 3: of all ranks' gradients, before clipping.

    DeepSpeed says -1 for what is not finite (runtime/utils.py, is_invalid_grad_norm).
    """
    norm = float(engine.get_global_grad_norm())
    return norm if norm >= 0 else math.nan
