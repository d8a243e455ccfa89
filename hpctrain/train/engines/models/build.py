"""Build a module from a `ModuleConfig`: its class, its shape, its first weights, its adapters.

Belongs here: building. Does not belong here: the settings' names (`hpctrain.spec.families`), memory
(see `allocation`), distributing a module over GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged
from hpctrain.engines.module import ModuleConfig
from hpctrain.spec.architecture import CountedSpec
from hpctrain.spec.families import block_classes, text_config
from hpctrain.spec.families.settings import family_by, fresh_settings, settings_of
from hpctrain.spec.model import LoraSpec, ModelSpec
from hpctrain.train.engines.models.allocation import allocate
from hpctrain.train.engines.models.count import check_count, class_and_settings
from hpctrain.train.engines.models.transformers_library import (
    class_named,
    hide_optional_packages,
    unset_weights,
)
from hpctrain.train.initial_weights import recording
from hpctrain.train.preflight import open_weights

# -- Find the repeated blocks of a module, which are sharded, recomputed and adapted one by one --


def blocks_of(module: nn.Module, counted: CountedSpec | None = None) -> list[Any]:
    """Return the blocks in the order of the forward pass; `counted`: their classes are there."""
    names = block_classes() if counted is None else counted.blocks
    return [child for child in module.modules() if type(child).__name__ in names]


# -- Add LoRA adapters to a model with frozen weights, and merge them again ----------------------
# Hu et al. 2021 (arXiv 2106.09685), as peft implements it.


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
        target_modules=adapted_layers(
            module, family_by(config.model).linear_names if lora.targets == "all" else lora.targets
        ),
    )
    with warnings.catch_warnings():
        # GPT-2's layers have transposed matrices, which peft detects and warns about
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        wrapped = peft.get_peft_model(module, settings)
    if config.task == "classification":
        for parameter in head_parameters(module):
            parameter.requires_grad_(True)
    return wrapped


def adapted_layers(module: Any, targets: Collection[str]) -> list[str]:
    """Return the full names of linear layers in the blocks whose last name is a target."""
    names = {id(layer): name for name, layer in module.named_modules()}
    inside = [
        names[id(layer)]
        for block in blocks_of(module)
        for layer in block.modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ]
    return [name for name in inside if name.rpartition(".")[2] in targets]


def head_parameters(module: Any) -> list[Any]:
    """Return the parameters outside of the body that checkpoints of other tasks share."""
    body = {id(parameter) for parameter in module.base_model.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in body]


def merge_adapters(module: Any) -> Any:
    """Return the plain model with its adapters, if any, added to the frozen weights."""
    return module.merge_and_unload() if hasattr(module, "merge_and_unload") else module


def build_module(config: ModuleConfig, *, device: torch.device, initialize: bool = True) -> Any:
    """Build the whole model in fp32 on `device`, in training mode; on `meta` it has shapes only.

    Its weights are those of `model.pretrained`, or depend on the seed alone, whatever the rank and
    the number of ranks. `initialize` False leaves them unset, for a checkpoint that will be loaded;
    buffers are set in any case. Raises InvalidInputError if pretrained weights are missing.
    """
    if initialize and device.type != "meta" and starts_whole(config):
        return _whole_module(config).to(device)
    module = build_on_meta(config, record=initialize and device.type != "meta")
    if device.type == "meta":
        return module.to(device)
    allocate(module, device, draw=initialize)
    return module


def import_classes(config: ModuleConfig) -> None:
    """Import the modules that building this model needs, so that forked ranks share them."""
    family = family_by(config.model)
    class_named(family.settings)
    class_named(family.classes[config.task])
    unset_weights()
    if config.lora is not None:
        import_peft()


def starts_whole(config: ModuleConfig) -> bool:
    """Return whether initial weights exist for whole models only.

    Those of `model.pretrained` are read by transformers, and those of older versions and of state
    spaces (which copy sums of random numbers) come from torch's generator on the CPU.
    """
    model = config.model
    computed = model.mamba is not None or model.linear is not None or model.counted is not None
    return config.pretrained is not None or config.initial_weights == "generator" or computed


def build_on_meta(config: ModuleConfig, *, record: bool) -> Any:
    """Build the model in training mode with its weights on `meta`, and its buffers on the CPU.

    `record`: each parameter has an `initial_weight`. Names are those of the model without adapters:
    a frozen weight begins like that of the plain model.
    """
    with _own_random_numbers(config), recording() as recorder:
        with contextlib.nullcontext() if record else unset_weights():
            model_class, settings = _class_and_settings(config, open_weights(config))
            module = model_class._from_config(settings, dtype=torch.float32)
            module.tie_weights()  # transformers does not where no numbers are drawn
            check_count(config.model, module)
            recorder.name_weights(module)
            if config.lora is not None:
                module = add_adapters(config, config.lora, module)
        if record:
            recorder.finish(module, config.seed)
    return module.train()


def _whole_module(config: ModuleConfig) -> Any:
    """Build the model on the CPU with weights of a directory, or of torch's generator."""
    staged = open_weights(config)
    with _own_random_numbers(config):
        model_class, settings = _class_and_settings(config, staged)
        if staged is not None:
            new_head = config.task == "classification"
            module = load_model(model_class, settings, staged, new_head=new_head)
        else:
            module = model_class._from_config(settings, dtype=torch.float32)
        check_count(config.model, module)
        if config.lora is not None:
            module = add_adapters(config, config.lora, module)
    return module.train()


@contextlib.contextmanager
def _own_random_numbers(config: ModuleConfig) -> Iterator[None]:
    """Seed torch's generator, which others find afterwards as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        yield


def _class_and_settings(config: ModuleConfig, staged: Staged | None) -> tuple[Any, Any]:
    """Return the model's class in transformers, and its settings.

    Attention uses kernels with a fixed order of sums in deterministic mode:
    `scaled_dot_product_attention` selects kernels by device and shape, some of which add up in any
    order in the backward pass.
    """
    model, family = config.model, family_by(config.model)
    if model.counted is not None:
        model_class, settings = class_and_settings(model.config or {}, model.counted.remote_code)
    else:
        settings = _settings(model, None if staged is None else staged.config)
        model_class = class_named(family.classes[config.task])
    if model.encoder_layers and not model.tied:
        # T5's classes share the output matrix whatever their config says; files have their own
        tied = {k: v for k, v in model_class._tied_weights_keys.items() if "lm_head" not in k}
        model_class = type(model_class.__name__, (model_class,), {"_tied_weights_keys": tied})
    fast = getattr(model_class, "_supports_sdpa", False) and not config.deterministic_mode
    settings._attn_implementation = "sdpa" if fast else "eager"
    return model_class, settings


def _settings(model: ModelSpec, config: Mapping[str, Any] | None) -> Any:
    """Make the settings of a model; those of a directory may be more complete than a spec."""
    family = family_by(model)
    settings_class = class_named(family.settings)
    if config is None:
        return settings_class(**settings_of(model))
    return settings_class.from_dict({**text_config(config, family), **fresh_settings(model)})


def enable_recomputation(config: ModuleConfig, module: Any) -> None:
    """Let blocks keep only their inputs, if the config sets it; names of weights do not change
    (transformers/modeling_utils.py)."""
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})


# -- Load a model with the weights of a local Hugging Face directory ----------------------------


# Behind the body: made for a task, and so new for another one.
_POOLER = ".pooler."


def load_model(model_class: Any, settings: Any, staged: Staged, *, new_head: bool) -> Any:
    """Return a module of `model_class` in fp32 with the directory's weights, of any stored type.

    `new_head`: the last layers, which are for other classes or another task, may be missing; they
    are drawn from the current random state. Raises InvalidInputError for any other weight that is
    missing or unused.
    """
    try:
        module, report = model_class.from_pretrained(
            staged.path,
            config=settings,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # the report lists all of them
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", str(staged.path))]) from error
    body = f"{module.base_model_prefix}."
    missing = {*report["missing_keys"], *(names[0] for names in report["mismatched_keys"])}
    if new_head:
        missing = {name for name in missing if name.startswith(body) and _POOLER not in name}
    unused = {name for name in report["unexpected_keys"] if name.startswith(body)}
    unused = {name for name in unused if _POOLER not in name}
    reasons = []
    if missing:
        reasons.append(f"the weights {_some(missing)} are missing or of another shape")
    if unused:
        reasons.append(f"the weights {_some(unused)} belong to no part of {type(module).__name__}")
    if reasons:
        raise InvalidInputError([Problem(reason, str(staged.path)) for reason in reasons])
    return module


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
