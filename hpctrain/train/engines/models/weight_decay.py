"""Select the parameters that weight decay applies to."""

from __future__ import annotations

from typing import Any


def split_by_weight_decay(module: Any) -> tuple[list[Any], list[Any]]:
    """Return (decayed, not decayed) trainable parameters: none on biases and norms.

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
    return decayed, plain
