"""Add LoRA adapters to a model with frozen weights, and merge them again.

Hu et al. 2021 (arXiv 2106.09685), as peft implements it. Belongs here: which layers are adapted,
what is frozen, and merging. Does not belong here: the model, the optimizer.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn

from hpctrain.engines.module import ModuleConfig
from hpctrain.spec.model import LoraSpec
from hpctrain.train.engines.models.blocks import blocks_of
from hpctrain.train.engines.models.transformers_library import hide_optional_packages


def import_peft() -> Any:
    """Import peft without what it would import only because it is installed."""
    with hide_optional_packages():
        return importlib.import_module("peft")


def add_adapters(config: ModuleConfig, lora: LoraSpec, module: Any) -> Any:
    """Return `module` with adapters, which alone are trainable; of a classifier, its head is too.

    The head is new for the task, so its weights are not worth freezing.
    """
    peft = import_peft()
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=adapted_layers(module, lora.targets),
    )
    with warnings.catch_warnings():
        # GPT-2's layers have transposed matrices, which peft detects and warns about
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        wrapped = peft.get_peft_model(module, settings)
    if config.task == "classification":
        for parameter in head_parameters(module):
            parameter.requires_grad_(True)
    return wrapped


def adapted_layers(module: Any, targets: tuple[str, ...] | str) -> list[str]:
    """Return the full names of linear layers in the blocks whose last name is a target.

    `targets` "all": every linear layer in the blocks.
    """
    names = {id(layer): name for name, layer in module.named_modules()}
    inside = [
        names[id(layer)]
        for block in blocks_of(module)
        for layer in block.modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ]
    if targets == "all":
        return inside
    return [name for name in inside if name.rpartition(".")[2] in targets]


def head_parameters(module: Any) -> list[Any]:
    """Return the parameters outside of the body that checkpoints of other tasks share."""
    body = {id(parameter) for parameter in module.base_model.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in body]


def merge_adapters(module: Any) -> Any:
    """Return the plain model with its adapters, if any, added to the frozen weights."""
    return module.merge_and_unload() if hasattr(module, "merge_and_unload") else module
