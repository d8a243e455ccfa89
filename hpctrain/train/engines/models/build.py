"""From a `ModuleConfig` to a module: its class, its shape, its first weights.

Belongs here: building. Does not belong here: the settings' names (`hpctrain.engines.hugging_face`),
thin matrices beside frozen weights (see `lora`), spreading a module over GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpctrain.checkpoints.staged import Staged
from hpctrain.engines.hugging_face import fresh_settings, settings_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.models.library import class_named, unset_weights
from hpctrain.train.engines.models.lora import adapted
from hpctrain.train.engines.models.pretrained import load_model
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
    """The model in fp32 on `device`, which may be `meta` (shapes only), ready to be trained.

    Its weights are those of `model.pretrained`, or follow from the seed alone: they are drawn on
    the CPU, whatever the rank, the number of ranks and the device. `initialize` False leaves them
    unset, for a checkpoint that will be loaded; buffers are right in any case. Raises
    InvalidInputError when the pretrained weights are not all there.
    """
    staged = open_weights(config)
    on_meta = device.type == "meta"
    with _building(config.seed, draws=initialize and not on_meta, on_meta=on_meta):
        module = _model(config, staged, loads=initialize and not on_meta)
        if config.lora is not None:
            module = adapted(config, config.lora, module)
    return module.to(device).train()


def _model(config: ModuleConfig, staged: Staged | None, *, loads: bool) -> Any:
    """A module of the task's class; attention whose sums have a fixed order where that is asked.

    `scaled_dot_product_attention` chooses kernels by device and shape, some of which add up in
    any order in the backward pass.
    """
    model_class = class_named(_MODELS[config.model.family, config.task])
    settings = _settings(config.model, staged)
    attends = config.model.family != "resnet"
    settings._attn_implementation = "sdpa" if attends and not config.deterministic_mode else "eager"
    if staged is not None and loads:
        new_head = config.task == "classification"
        return load_model(model_class, settings, staged, new_head=new_head)
    module = model_class._from_config(settings, dtype=torch.float32)
    module.tie_weights()  # left out by transformers where no numbers are drawn
    return module


def empty_model(model: ModelSpec, config: Mapping[str, Any] | None) -> Any:
    """A causal language model on the meta device; `config`: a config.json, if there is one."""
    kind = class_named(_CONFIGURATIONS[model.family])
    settings = kind(**settings_of(model)) if config is None else kind.from_dict(dict(config))
    with torch.device("meta"), unset_weights():
        return class_named(_MODELS[model.family, "language_modeling"])._from_config(settings)


def _settings(model: ModelSpec, staged: Staged | None) -> Any:
    """The directory's own settings where there is one: it may say more than a spec does."""
    kind = class_named(_CONFIGURATIONS[model.family])
    if staged is None:
        return kind(**settings_of(model))
    return kind.from_dict({**staged.config, **fresh_settings(model)})


@contextlib.contextmanager
def _building(seed: int, *, draws: bool, on_meta: bool) -> Iterator[None]:
    """The random numbers of others are as before; none are drawn for weights nobody will see."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(seed)
        if on_meta:
            stack.enter_context(torch.device("meta"))
        if not draws:
            stack.enter_context(unset_weights())
        yield
