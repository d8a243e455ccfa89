"""Build a module from a `ModuleConfig`: its class, its shape, its first weights.

Belongs here: building. Does not belong here: the settings' names (`hpctrain.engines.hugging_face`),
adapters (see `lora`), distributing a module over GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.engines.hugging_face import fresh_settings, settings_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.models.lora import add_adapters
from hpctrain.train.engines.models.pretrained import load_model
from hpctrain.train.engines.models.transformers_library import class_named, unset_weights
from hpctrain.train.pretrained_checks import open_weights

_CONFIGURATIONS = {
    "gpt": "GPT2Config",
    "llama": "LlamaConfig",
    "bert": "BertConfig",
    "distilbert": "DistilBertConfig",
    "vit": "ViTConfig",
    "resnet": "ResNetConfig",
}
_MODELS = {
    ("gpt", "language_modeling"): "GPT2LMHeadModel",
    ("llama", "language_modeling"): "LlamaForCausalLM",
    ("bert", "masked_language_modeling"): "BertForMaskedLM",
    ("bert", "classification"): "BertForSequenceClassification",
    ("distilbert", "masked_language_modeling"): "DistilBertForMaskedLM",
    ("distilbert", "classification"): "DistilBertForSequenceClassification",
    ("vit", "classification"): "ViTForImageClassification",
    ("resnet", "classification"): "ResNetForImageClassification",
}


def build_module(config: ModuleConfig, *, device: torch.device, initialize: bool = True) -> Any:
    """Build the model in fp32 on `device`, which may be `meta` (shapes only), in training mode.

    Its weights are those of `model.pretrained`, or depend on the seed alone: they are drawn on
    the CPU, whatever the rank, the number of ranks and the device. `initialize` False leaves them
    unset, for a checkpoint that will be loaded; buffers are set in any case.

    Attention uses kernels with a fixed order of sums in deterministic mode:
    `scaled_dot_product_attention` selects kernels by device and shape, some of which add up in any
    order in the backward pass. Raises InvalidInputError if pretrained weights are missing.
    """
    staged = open_weights(config)
    model, on_meta = config.model, device.type == "meta"
    initialize = initialize and not on_meta
    with contextlib.ExitStack() as stack:
        # other users of the generator get the same numbers as without this function
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(config.seed)
        if on_meta:
            stack.enter_context(torch.device("meta"))
        if not initialize:
            stack.enter_context(unset_weights())

        model_class = class_named(_MODELS[model.family, config.task])
        settings_class = class_named(_CONFIGURATIONS[model.family])
        if staged is None:
            settings = settings_class(**settings_of(model))
        else:  # the directory's own settings may be more complete than a spec
            settings = settings_class.from_dict({**staged.config, **fresh_settings(model)})
        attends = model.family != "resnet"
        fast = attends and not config.deterministic_mode
        settings._attn_implementation = "sdpa" if fast else "eager"
        if staged is not None and initialize:
            new_head = config.task == "classification"
            module = load_model(model_class, settings, staged, new_head=new_head)
        else:
            module = model_class._from_config(settings, dtype=torch.float32)
            module.tie_weights()  # transformers does not where no numbers are drawn
        if config.lora is not None:
            module = add_adapters(config, config.lora, module)
    return module.to(device).train()


def enable_recomputation(config: ModuleConfig, module: Any) -> None:
    """Let blocks keep only their inputs, if the config sets it; names of weights do not change
    (transformers/modeling_utils.py)."""
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})


def empty_model(model: ModelSpec, config: Mapping[str, Any] | None) -> Any:
    """Build a causal language model on the meta device; `config`: its config.json, if any."""
    settings_class = class_named(_CONFIGURATIONS[model.family])
    if config is None:
        settings = settings_class(**settings_of(model))
    else:
        settings = settings_class.from_dict(dict(config))
    with torch.device("meta"), unset_weights():
        return class_named(_MODELS[model.family, "language_modeling"])._from_config(settings)
