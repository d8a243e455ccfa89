"""LoRA: frozen weights, and thin matrices beside linear layers that learn in their place.

Hu et al. 2021 (arXiv 2106.09685), as peft builds it. Belongs here: which layers are adapted, what
is frozen, and merging. Does not belong here: the model, the optimizer.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn

from hpctrain.engines.module import ModuleConfig
from hpctrain.spec.tuning import LoraSpec
from hpctrain.train.engines.models.blocks import blocks_of
from hpctrain.train.engines.models.library import alone


def adapted(config: ModuleConfig, lora: LoraSpec, module: Any) -> Any:
    """`module` with thin matrices; only they learn, and of a classifier its last layers.

    The latter are made for the task, so that there is nothing in them to keep.
    """
    with alone():
        peft = importlib.import_module("peft")
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=adapted_layers(module, lora.targets),
    )
    with warnings.catch_warnings():
        # GPT-2's layers keep their matrices the other way round, which peft sees and says
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        wrapped = peft.get_peft_model(module, settings)
    if config.task == "classification":
        for parameter in head_of(module):
            parameter.requires_grad_(True)
    return wrapped


def adapted_layers(module: Any, targets: tuple[str, ...] | str) -> list[str]:
    """Full names of the linear layers in the blocks, of those whose last name is a target."""
    names = {id(one): name for name, one in module.named_modules()}
    inside = [
        names[id(layer)]
        for block in blocks_of(module)
        for layer in block.modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ]
    if targets == "all":
        return inside
    return [name for name in inside if name.rpartition(".")[2] in targets]


def head_of(module: Any) -> list[Any]:
    """Parameters outside of the body that a checkpoint of another task shares."""
    body = {id(parameter) for parameter in module.base_model.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in body]


def merged(module: Any) -> Any:
    """The plain model with the thin matrices added to the weights beside them."""
    return module.merge_and_unload() if hasattr(module, "merge_and_unload") else module
