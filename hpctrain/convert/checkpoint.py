"""Convert a checkpoint of a run to a Hugging Face directory; one function per format.

Engines name theirs in their abilities (`export`). Belongs here: from an engine's files to a module.
Does not belong here: writing the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from hpctrain.spec.engines.registry import abilities_of, resolve
from hpctrain.store.conversions import ConversionReport
from hpctrain.store.layout import RunLayout
from hpctrain.train.job import read_config


def export(checkpoint: Path, target: Path) -> ConversionReport:
    """Write the model of a published checkpoint to `target`. Raises InvalidInputError."""
    step = step_of(checkpoint.name)
    if step is None:
        problem = Problem("is not the name of a checkpoint", str(checkpoint))
        raise InvalidInputError([problem])
    found = inspect(checkpoint, step, "size")
    if found.problem is not None:
        raise InvalidInputError([Problem(found.problem, str(checkpoint))])
    config = read_config(RunLayout(checkpoint.parent.parent).train_config)
    place = abilities_of(config.engine).export
    if place is None:
        message = f"checkpoints of engine {config.engine} cannot be converted"
        raise InvalidInputError([Problem(message, str(checkpoint))])
    return cast(ConversionReport, resolve(place)(config, checkpoint, target))


def export_megatron(config: MegatronConfig, checkpoint: Path, target: Path) -> ConversionReport:
    """Convert a distributed checkpoint of megatron-core."""
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


def export_distributed(config: ModuleConfig, checkpoint: Path, target: Path) -> ConversionReport:
    """Convert a torch.distributed.checkpoint of FSDP or DDP."""
    return _export_module(config, checkpoint, target, _load_distributed)


def export_deepspeed(config: DeepSpeedConfig, checkpoint: Path, target: Path) -> ConversionReport:
    """Convert DeepSpeed's files."""
    return _export_module(config, checkpoint, target, partial(_load_deepspeed, config))


def _export_module(
    config: ModuleConfig, checkpoint: Path, target: Path, load: Callable[[Any, Path], None]
) -> ConversionReport:
    from hpctrain.convert.weights import report_of
    from hpctrain.train.engines.models.build import build_module
    from hpctrain.train.engines.models.lora import merged

    module = build_module(config, device=torch.device("cpu"), initialize=config.lora is not None)
    load(module, checkpoint)
    plain = merged(module)
    write_model(plain, target)
    _companions_of_the_start(config.model.pretrained, target)
    adapted = config.lora is not None
    return report_of(plain, config.model, checkpoint, "Hugging Face", merged_lora=adapted)


def _load_distributed(module: Any, checkpoint: Path) -> None:
    """Load weights by name; with LoRA a checkpoint has only those that are trained, and the others
    stay as they were built."""
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: tensor for name, tensor in module.state_dict().items() if f"model.{name}" in stored
    }
    _refuse_incomplete(module, set(state), checkpoint)
    dcp.load({"model": state}, storage_reader=reader, no_dist=True)


def _load_deepspeed(config: DeepSpeedConfig, module: Any, checkpoint: Path) -> None:
    """Load weights in fp32 with DeepSpeed's own reader (utils/zero_to_fp32.py) where it applies.

    It reads neither checkpoints without ZeRO, which have one file with all weights, nor those of
    tensor parallelism (a file per rank) or pipelines (a file per layer). These have the precision
    of the training.
    """
    if config.pipeline_stages:
        from hpctrain.train.engines.deepspeed.stages import load_layers

        load_layers(config, module, checkpoint)
        return
    if config.tensor_parallel > 1:
        from hpctrain.train.engines.deepspeed.tensors import joined

        parts = [_weights_in(one) for one in sorted(checkpoint.glob("mp_rank_*_model_states.pt"))]
        state = joined(module.state_dict(), parts)
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
    """Require all trained weights in the checkpoint. Raises InvalidInputError."""
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    if missing := sorted(trained - found):
        message = f"has no weights {', '.join(missing[:3])}: it is of another model"
        raise InvalidInputError([Problem(message, str(checkpoint))])


def _companions_of_the_start(pretrained: str | None, target: Path) -> None:
    """Copy the tokenizer of the run's initial weights, if they still exist."""
    if pretrained is not None and (Path(pretrained) / CONFIG_NAME).exists():
        copy_companions(Path(pretrained), target)
