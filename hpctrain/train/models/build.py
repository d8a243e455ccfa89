"""From a `ModuleConfig` to a module: its class, its shape, its first weights.

Belongs here: building. Does not belong here: the settings' names (`hpctrain.engines.hugging_face`),
spreading a module over GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from hpctrain.engines.hugging_face import settings_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.train.models.library import class_named, unset_weights

_CLASSES = {
    "gpt": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}


def build_module(config: ModuleConfig, *, device: torch.device, initialize: bool = True) -> Any:
    """The model in fp32 on `device`, which may be `meta` (shapes only).

    The weights follow from the seed alone: they are drawn on the CPU, whatever the rank, the
    number of ranks and the device. `initialize` False leaves them unset, for a checkpoint that
    will be loaded; buffers are right in any case.
    """
    kind, model_class = (class_named(name) for name in _CLASSES[config.model.family])
    settings = kind(**settings_of(config.model))
    attention = "eager" if config.deterministic_mode else "sdpa"
    if device.type == "meta":
        with torch.device("meta"), unset_weights():
            module = model_class._from_config(settings, attn_implementation=attention)
    else:
        with torch.random.fork_rng(devices=[]), nullcontext() if initialize else unset_weights():
            torch.manual_seed(config.seed)
            module = model_class._from_config(settings, attn_implementation=attention)
    module.tie_weights()  # without drawing numbers, transformers leaves that out, too
    return module.to(device)
