"""Export a checkpoint of a run as a Hugging Face directory; one function per format.

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

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.discover import inspect
from hpctrain.checkpoints.foreign import own_name
from hpctrain.checkpoints.staged import CONFIG_NAME
from hpctrain.convert.hugging_face_directory import (
    copy_companions,
    write_model,
    write_settings,
)
from hpctrain.convert.unfinished import UnfinishedConversion
from hpctrain.engines.conversion import unexportable
from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.trainer import is_trainer
from hpctrain.records.conversions import ConversionReport
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import step_of
from hpctrain.spec.engines.registry import abilities_of, resolve
from hpctrain.train.job import read_config


def export(checkpoint: Path, work: UnfinishedConversion) -> ConversionReport:
    """Write the model of a published checkpoint. Raises InvalidInputError."""
    step = step_of(checkpoint.name)
    if step is None:
        problem = Problem("is not the name of a checkpoint", str(checkpoint))
        raise InvalidInputError([problem])
    inspection = inspect(checkpoint, step, "size")
    if inspection.problem is not None:
        raise InvalidInputError([Problem(inspection.problem, str(checkpoint))])
    settings = RunLayout(checkpoint.parent.parent).train_config
    if settings.exists() and is_trainer(settings.read_bytes()):
        name = own_name(checkpoint)
        hint = f"it is as its trainer has written it: {checkpoint / name}" if name else None
        raise InvalidInputError([Problem("is of a trainer of its own", str(checkpoint), hint=hint)])
    config = read_config(settings)
    place = abilities_of(config.engine).export
    if place is None:
        message = f"checkpoints of engine {config.engine} cannot be converted"
        raise InvalidInputError([Problem(message, str(checkpoint))])
    return cast(ConversionReport, resolve(place)(config, checkpoint, work))


def export_megatron(
    config: MegatronConfig, checkpoint: Path, work: UnfinishedConversion
) -> ConversionReport:
    """Convert a distributed checkpoint of megatron-core."""
    from hpctrain.convert.megatron_checkpoint import StoredWeights
    from hpctrain.convert.pretrained_weights import report_of, to_hugging_face

    model = config.model
    if reasons := unexportable(model):
        raise InvalidInputError([Problem(reason, str(checkpoint)) for reason in reasons])
    stored = StoredWeights(checkpoint)
    write_settings(model, stored.dtype, work.directory)
    to_hugging_face(model, stored, work)
    _copy_pretrained_companions(config.pretrained, work.directory)
    return report_of(model, stored.dtype, checkpoint, "Hugging Face")


def export_distributed(
    config: ModuleConfig, checkpoint: Path, work: UnfinishedConversion
) -> ConversionReport:
    """Convert a torch.distributed.checkpoint of FSDP or DDP."""
    return _export_module(config, checkpoint, work, _load_distributed)


def export_deepspeed(
    config: DeepSpeedConfig, checkpoint: Path, work: UnfinishedConversion
) -> ConversionReport:
    """Convert DeepSpeed's files."""
    return _export_module(config, checkpoint, work, partial(_load_deepspeed, config))


def _export_module(
    config: ModuleConfig,
    checkpoint: Path,
    work: UnfinishedConversion,
    load: Callable[[Any, Path], None],
) -> ConversionReport:
    from hpctrain.convert.pretrained_weights import report_of
    from hpctrain.train.engines.models.build import build_module, merge_adapters

    module = build_module(config, device=torch.device("cpu"), initialize=config.lora is not None)
    load(module, checkpoint)
    plain = merge_adapters(module)
    write_model(plain, work.directory)
    _copy_pretrained_companions(config.model.pretrained, work.directory)
    adapted = config.lora is not None
    report = report_of(config.model, plain.dtype, checkpoint, "Hugging Face", merged_lora=adapted)
    # a class may have layers of a task that the record does not count
    return report.model_copy(update={"parameters": sum(one.numel() for one in plain.parameters())})


def _load_distributed(module: Any, checkpoint: Path) -> None:
    """Load a checkpoint of FSDP or DDP, written by torch.distributed.checkpoint.

    With LoRA it holds the trainable weights only; the others stay as they were built.
    """
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: tensor for name, tensor in module.state_dict().items() if f"model.{name}" in stored
    }
    _refuse_incomplete(module, set(state), checkpoint)
    dcp.load({"model": state}, storage_reader=reader, no_dist=True)


def _load_deepspeed(config: DeepSpeedConfig, module: Any, checkpoint: Path) -> None:
    """Load a DeepSpeed checkpoint.

    With ZeRO, DeepSpeed's own reader (utils/zero_to_fp32.py) gives weights in fp32. Otherwise the
    weights are in the precision of the training: in one file, in one per rank with tensor
    parallelism, or in one per layer of a pipeline.
    """
    if config.pipeline_stages:
        from hpctrain.train.engines.deepspeed.pipeline_stages import load_layers

        load_layers(config, module, checkpoint)
        return
    if config.tensor_parallel > 1:
        from hpctrain.train.engines.deepspeed.tensor_parallel import join_parts

        paths = sorted(checkpoint.glob("mp_rank_*_model_states.pt"))
        state = join_parts(module.state_dict(), [_module_weights(path) for path in paths])
    elif any(checkpoint.glob("zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), checkpoint.name)
    else:
        state = _module_weights(checkpoint / "mp_rank_00_model_states.pt")
    _refuse_incomplete(module, set(state), checkpoint)
    module.load_state_dict(state, strict=False)


def _module_weights(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)["module"]
    return state


def _refuse_incomplete(module: Any, loaded: set[str], checkpoint: Path) -> None:
    """Raise InvalidInputError if a trainable weight is missing; a tied weight has two names."""
    trainable = {name for name, weight in module.named_parameters() if weight.requires_grad}
    if missing := sorted(trainable - loaded):
        message = f"has no weights {', '.join(missing[:3])}: it is of another model"
        raise InvalidInputError([Problem(message, str(checkpoint))])


def _copy_pretrained_companions(pretrained: str | None, target: Path) -> None:
    """Copy tokenizer files of the weights that the run started from, if they still exist."""
    if pretrained is not None and (Path(pretrained) / CONFIG_NAME).exists():
        copy_companions(Path(pretrained), target)
