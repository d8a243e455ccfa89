"""Handle the differences between DeepSpeed's optimizers: groups, rates, loss scales, norms.

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
from hpctrain.train.engines.models.weight_decay import split_by_weight_decay


def parameter_groups(config: DeepSpeedConfig, module: Any) -> list[dict[str, Any]]:
    """Return the groups of trainable parameters; no weight decay on biases and norms."""
    decayed, plain = split_by_weight_decay(module)
    groups = [
        dict(params=decayed, weight_decay=config.weight_decay),
        dict(params=plain, weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


def set_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def reset_settings(config: DeepSpeedConfig, engine: Any, decays: list[float]) -> None:
    """Set the run's own settings again after a checkpoint was loaded with those it was saved with.

    Corrects two faults of runtime/zero/stage3.py when it loads the universal format
    (load_hp_checkpoint_state_from_checkpoint_dir_stage3). All groups get the settings of the first
    one, so that biases and norms would decay. All get one tensor for the number of steps, which
    AdamW would increment once for each group. Neither shows in the first loss.
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
    """Divide the gradients of the next step, before their norm is computed and clipped."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        # runtime/bf16_optimizer.py, bf16 at stage 1: has no scale
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
    elif hasattr(optimizer, "override_loss_scale"):
        # runtime/zero: gradients are divided by the loss scale on their way to AdamW
        optimizer.override_loss_scale(divisor)
    else:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


def reset_loss_scale(engine: Any) -> None:
    """Set the loss scale of the next backward passes to 1, after `divide_gradients` changed it."""
    optimizer = engine.optimizer
    if getattr(optimizer, "custom_loss_scaler", False):
        optimizer.override_loss_scale(1.0)


def norm_before_step(engine: Any, tensors: Any) -> Any:
    """Compute the norm of the summed gradients at stage 0, where every rank has them.

    The optimizer's step would release them. `tensors`: the group that splits weights, so that each
    rank has a part of some gradients; None for no group.
    """
    trained = [p for p in engine.module.parameters() if p.grad is not None]
    if tensors is None:
        return torch.nn.utils.get_total_norm([p.grad for p in trained])
    parts = [p.grad for p in trained if is_model_parallel_parameter(p)]
    others = [p.grad for p in trained if not is_model_parallel_parameter(p)]
    squares = torch.nn.utils.get_total_norm(parts).square()
    dist.all_reduce(squares, group=tensors)
    return (squares + torch.nn.utils.get_total_norm(others).square()).sqrt()


def norm_after_step(engine: Any) -> float:
    """Return the norm of all ranks' gradients before clipping, at stages 1 to 3.

    DeepSpeed returns -1 for one that is not finite (runtime/utils.py, is_invalid_grad_norm); nan
    here.
    """
    norm = float(engine.get_global_grad_norm())
    return norm if norm >= 0 else math.nan
