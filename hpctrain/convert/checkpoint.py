"""A checkpoint of a run as a Hugging Face directory, whatever engine has written it.

Belongs here: from an engine's files to a module. Does not belong here: writing the directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from hpctrain.checkpoints.discover import inspect
from hpctrain.checkpoints.manifest import step_of
from hpctrain.checkpoints.staged import CONFIG_NAME
from hpctrain.convert.directory import copy_companions, write_model
from hpctrain.engines.conversion import unexportable
from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.conversions import ConversionReport
from hpctrain.store.layout import RunLayout
from hpctrain.train.job import read_config


def export(checkpoint: Path, target: Path) -> ConversionReport:
    """Write the model of a published checkpoint. Raises InvalidInputError."""
    _refuse_damaged(checkpoint)
    config = read_config(RunLayout(checkpoint.parent.parent).train_config)
    if isinstance(config, MegatronConfig):
        return _of_megatron(config, checkpoint, target)
    assert isinstance(config, ModuleConfig)
    return _of_module(config, checkpoint, target)


def _refuse_damaged(checkpoint: Path) -> None:
    step = step_of(checkpoint.name)
    if step is None:
        problem = Problem("is not the name of a checkpoint", str(checkpoint))
        raise InvalidInputError([problem])
    found = inspect(checkpoint, step, "size")
    if found.problem is not None:
        raise InvalidInputError([Problem(found.problem, str(checkpoint))])


def _of_megatron(config: MegatronConfig, checkpoint: Path, target: Path) -> ConversionReport:
    from hpctrain.convert import megatron
    from hpctrain.convert.weights import module_of, report_of

    model = config.model
    if wrong := unexportable(model):
        raise InvalidInputError([Problem(words, str(checkpoint)) for words in wrong])
    with megatron.one_rank():
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        chunk = megatron.build(model, dtype)
        megatron.load(chunk, checkpoint)
        module = module_of(chunk, model, None)
    write_model(module, target)
    _companions_of_the_start(config.pretrained, target)
    return report_of(module, model, checkpoint, "Hugging Face")


def _of_module(config: ModuleConfig, checkpoint: Path, target: Path) -> ConversionReport:
    from hpctrain.convert.weights import report_of
    from hpctrain.train.engines.models.build import build_module
    from hpctrain.train.engines.models.lora import merge_adapters

    module = build_module(config, device=torch.device("cpu"), initialize=config.lora is not None)
    _load(config, module, checkpoint)
    plain = merge_adapters(module)
    write_model(plain, target)
    _companions_of_the_start(config.model.pretrained, target)
    adapted = config.lora is not None
    return report_of(plain, config.model, checkpoint, "Hugging Face", merged_lora=adapted)


def _load(config: ModuleConfig, module: Any, checkpoint: Path) -> None:
    if isinstance(config, DeepSpeedConfig):
        _load_deepspeed(config, module, checkpoint)
    else:
        _load_distributed(module, checkpoint)


def _load_distributed(module: Any, checkpoint: Path) -> None:
    """FSDP's and DDP's checkpoints are torch.distributed.checkpoint's, by name; with LoRA they
    hold what is learned, and the rest is as it was built."""
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: tensor for name, tensor in module.state_dict().items() if f"model.{name}" in stored
    }
    _refuse_incomplete(module, set(state), checkpoint)
    dcp.load({"model": state}, storage_reader=reader, no_dist=True)


def _load_deepspeed(config: DeepSpeedConfig, module: Any, checkpoint: Path) -> None:
    """By DeepSpeed's own reader of its files (utils/zero_to_fp32.py): weights in fp32.

    Without ZeRO there are none that it knows, and the weights are whole in one file; where ranks
    split weights it knows not how, and each has a file; a pipeline has one for each layer. These
    are in the precision of the training.
    """
    if config.pipeline_stages:
        from hpctrain.train.engines.deepspeed.pipeline_stages import load_layers

        load_layers(config, module, checkpoint)
        return
    if config.tensor_parallel > 1:
        from hpctrain.train.engines.deepspeed.tensor_parallel import join_parts

        parts = [_weights_in(one) for one in sorted(checkpoint.glob("mp_rank_*_model_states.pt"))]
        state = join_parts(module.state_dict(), parts)
    elif any(checkpoint.glob("zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), checkpoint.name)
    else:
        state = _weights_in(checkpoint / "mp_rank_00_model_states.pt")
    _refuse_incomplete(module, set(state), checkpoint)
    module.load_state_dict(state, strict=False)


def _weights_in(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)["module"]
    return state


def _refuse_incomplete(module: Any, found: set[str], checkpoint: Path) -> None:
    """Everything that learns must come from the checkpoint; a tied weight has two names."""
    wanted = {name for name, one in module.named_parameters() if one.requires_grad}
    if lost := sorted(wanted - found):
        words = f"has no weights {', '.join(lost[:3])}: it is of another model"
        raise InvalidInputError([Problem(words, str(checkpoint))])


def _companions_of_the_start(pretrained: str | None, target: Path) -> None:
    """The tokenizer of the weights that the run has started from, if they are still there."""
    if pretrained is not None and (Path(pretrained) / CONFIG_NAME).exists():
        copy_companions(Path(pretrained), target)
