"""Convert between a Hugging Face directory and starting weights for megatron-core.

Belongs here: converting each tensor by its rule. Does not belong here: the rules (see
`weight_rules`), reading and writing (see `hugging_face_directory`, `megatron_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged
from hpctrain.convert import megatron_checkpoint
from hpctrain.convert.hugging_face_directory import (
    copy_companions,
    dtype_of,
    open_tensors,
    write_model,
)
from hpctrain.convert.weight_rules import rules_of
from hpctrain.engines.conversion import shape_described, unconvertible
from hpctrain.engines.hugging_face import MODEL_TYPES
from hpctrain.records.conversions import ConversionReport, Form
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.models.build import empty_model


def convert_staged(staged: Staged, target: Path) -> ConversionReport:
    """Convert to the other of the two formats. Raises InvalidInputError."""
    if reasons := unconvertible(staged.config):
        raise InvalidInputError([Problem(reason, str(staged.path)) for reason in reasons])
    model = shape_described(staged.config)
    form: Form
    with megatron_checkpoint.one_rank():
        if staged.kind == "hugging_face":
            form = "megatron-core"
            converted = megatron_checkpoint.build(model, dtype_of(staged))
            fill(converted, model, staged)
            megatron_checkpoint.save(converted, target)
        else:
            form = "Hugging Face"
            chunk = megatron_checkpoint.build(model, megatron_checkpoint.stored_dtype(staged.path))
            megatron_checkpoint.load(chunk, staged.path)
            converted = module_of(chunk, model, staged.config)
            write_model(converted, target)
        copy_companions(staged.path, target)
        return report_of(converted, model, staged.path, form)


@torch.no_grad()
def fill(chunk: Any, model: ModelSpec, staged: Staged) -> None:
    """Copy the directory's weights into a GPTModel, one tensor after the other."""
    parameters = dict(chunk.named_parameters())
    with open_tensors(staged) as read:
        for rule in rules_of(model):
            tensor = rule.join([read(name) for name in rule.hugging_face])
            target = parameters.pop(rule.megatron)
            if tensor.shape != target.shape:
                message = (
                    f"{rule.hugging_face[0]} has shape {list(tensor.shape)}, "
                    f"not {list(target.shape)}"
                )
                raise InvalidInputError([Problem(message, str(staged.path))])
            target.copy_(tensor)
    assert not parameters, f"rules for {sorted(parameters)} are missing"


@torch.no_grad()
def module_of(chunk: Any, model: ModelSpec, config: Mapping[str, Any] | None) -> Any:
    """Build a model of Hugging Face's class with the weights of a GPTModel."""
    state = chunk.state_dict()
    tensors: dict[str, Any] = {}
    for rule in rules_of(model):
        parts = rule.split(state[rule.megatron])
        named = zip(rule.hugging_face, parts, strict=True)
        tensors |= {name: part.contiguous() for name, part in named}
    module = empty_model(model, config)
    missing, unexpected = module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return module


def report_of(
    module: Any, model: ModelSpec, source: Path, form: Form, *, merged_lora: bool = False
) -> ConversionReport:
    """Describe the converted model; the caller fills in `target`."""
    parameters = list(module.parameters())
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    return ConversionReport(
        source=str(source),
        target="",
        form=form,
        model_type=MODEL_TYPES[model.family],
        parameters=sum(parameter.numel() for parameter in parameters),
        dtype=" and ".join(sorted(dtypes)),
        merged_lora=merged_lora,
    )
