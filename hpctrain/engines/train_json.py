"""Fill the document of a run's engine from a plan, and parse it from `train.json`. Pure.

Callers pass the bytes, because this package opens no files. Belongs here: the choice by the
engine's name. Does not belong here: fields of the documents, the table of engines (see
`hpctrain.spec.engines.registry`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import TypeAdapter

from hpctrain.base.formats import parse_document
from hpctrain.engines.training import TrainConfig
from hpctrain.spec.engines.registry import EngineName, abilities_of, resolve
from hpctrain.spec.loader import forget_former_fields

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob

# The engine of documents that name none: those of the first versions.
_FIRST_ENGINE = "megatron"


def parse_train_config(text: str | bytes) -> TrainConfig:
    """Parse a `train.json` as the document of its engine. Raises pydantic.ValidationError.

    The class comes from the table of engines, never from the text.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}  # pydantic reports what is wrong with the text
    named = fields.get("engine", _FIRST_ENGINE) if isinstance(fields, dict) else _FIRST_ENGINE
    name = TypeAdapter(EngineName).validate_python(named)
    document = cast(type[TrainConfig], resolve(abilities_of(name).document))
    forget_former_fields(fields, only_defaults=False)
    return document.model_validate_json(json.dumps(fields) if fields else text)


def train_config(job: TrainingJob) -> TrainConfig:
    """Fill the document of the plan's engine, which configures the trainer."""
    fill = resolve(abilities_of(job.plan.engine).fill)
    return cast(TrainConfig, fill(job))


def train_config_of(path: Path, text: bytes) -> TrainConfig:
    """Parse the trainer configuration `text`, the content of `path`.

    Raises NewerFormatError if a newer hpctrain wrote it, InvalidInputError with all its problems.
    """
    return parse_document(path, text, TrainConfig, parse_train_config)
