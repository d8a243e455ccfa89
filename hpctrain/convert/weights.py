"""Between a Hugging Face directory and megatron-core's starting weights.

Belongs here: moving each tensor by its rule. Does not belong here: the rules (see `mapping`), how
either form is read and written (see `directory`, `megatron`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoints.staged import Staged
from hpctrain.convert import megatron
from hpctrain.convert.directory import (
    copy_companions,
    dtype_of,
    open_tensors,
    write_model,
)
from hpctrain.convert.mapping import rules_of
from hpctrain.engines.conversion import shape_described, unconvertible
from hpctrain.engines.hugging_face import MODEL_TYPES
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.model import ModelSpec
from hpctrain.store.conversions import ConversionReport, Form
from hpctrain.train.engines.models.build import empty_model


def convert_staged(staged: Staged, target: Path) -> ConversionReport:
    """To the other of the two forms. Raises InvalidInputError."""
    if wrong := unconvertible(staged.config):
        raise InvalidInputError([Problem(words, str(staged.path)) for words in wrong])
    model = shape_described(staged.config)
    with megatron.one_rank():
        if staged.kind == "hugging_face":
            return _to_megatron(staged, model, target)
        return _to_hugging_face(staged, model, target)


def _to_megatron(staged: Staged, model: ModelSpec, target: Path) -> ConversionReport:
    dtype = dtype_of(staged)
    chunk = megatron.build(model, dtype)
    fill(chunk, model, staged)
    megatron.save(chunk, target)
    copy_companions(staged.path, target)
    return report_of(chunk, model, staged.path, "megatron-core")


def _to_hugging_face(staged: Staged, model: ModelSpec, target: Path) -> ConversionReport:
    chunk = megatron.build(model, megatron.stored_dtype(staged.path))
    megatron.load(chunk, staged.path)
    module = module_of(chunk, model, staged.config)
    write_model(module, target)
    copy_companions(staged.path, target)
    return report_of(module, model, staged.path, "Hugging Face")


@torch.no_grad()
def fill(chunk: Any, model: ModelSpec, staged: Staged) -> None:
    """Put the directory's weights into a GPTModel, one tensor after the other."""
    room = dict(chunk.named_parameters())
    with open_tensors(staged) as tensor:
        for rule in rules_of(model):
            found = rule.join([tensor(name) for name in rule.theirs])
            place = room.pop(rule.megatron)
            if found.shape != place.shape:
                words = f"{rule.theirs[0]} has shape {list(found.shape)}, not {list(place.shape)}"
                raise InvalidInputError([Problem(words, str(staged.path))])
            place.copy_(found)
    assert not room, f"rules for {sorted(room)} are missing"


@torch.no_grad()
def module_of(chunk: Any, model: ModelSpec, config: Mapping[str, Any] | None) -> Any:
    """A model of Hugging Face's class with the weights of a GPTModel."""
    state = chunk.state_dict()
    tensors: dict[str, Any] = {}
    for rule in rules_of(model):
        parts = rule.split(state[rule.megatron])
        named = zip(rule.theirs, parts, strict=True)
        tensors |= {name: part.contiguous() for name, part in named}
    module = empty_model(model, config)
    missing, unexpected = module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return module


def report_of(
    module: Any, model: ModelSpec, source: Path, form: Form, *, merged_lora: bool = False
) -> ConversionReport:
    """What was converted; `target` is filled in where it is known."""
    kinds = {str(one.dtype).removeprefix("torch.") for one in module.parameters()}
    return ConversionReport(
        source=str(source),
        target="",
        form=form,
        model_type=MODEL_TYPES[model.family],
        parameters=sum(one.numel() for one in module.parameters()),
        dtype=" and ".join(sorted(kinds)),
        merged_lora=merged_lora,
    )
