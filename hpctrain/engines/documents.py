"""Which engine's document a run has: filling it from a plan, and reading it back.

Belongs here: the choice by the engine's name. Does not belong here: what is in the documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import Discriminator, Tag, TypeAdapter

from hpctrain.engines.deepspeed import DeepSpeedConfig, deepspeed_config
from hpctrain.engines.megatron import MegatronConfig, megatron_config
from hpctrain.engines.megatron_lm import MegatronLmConfig, megatron_lm_config
from hpctrain.engines.native import NativeConfig, native_config
from hpctrain.engines.training import TrainConfig
from hpctrain.plan.documents import Plan
from hpctrain.spec.run import RunSpec

_DOCUMENTS = {
    "megatron": "megatron",
    "megatron-lm": "megatron-lm",
    "fsdp": "native",
    "ddp": "native",
    "deepspeed": "deepspeed",
}


def _document_of(value: Any) -> str | None:
    """By the engine's name; a document from before there were several engines has none."""
    name = value.get("engine", "megatron") if isinstance(value, dict) else value.engine
    return _DOCUMENTS.get(name)


AnyTrainConfig = Annotated[
    Annotated[MegatronConfig, Tag("megatron")]
    | Annotated[MegatronLmConfig, Tag("megatron-lm")]
    | Annotated[NativeConfig, Tag("native")]
    | Annotated[DeepSpeedConfig, Tag("deepspeed")],
    Discriminator(_document_of),
]


@cache
def _reader() -> TypeAdapter[AnyTrainConfig]:
    """Build the validator of all engines, which takes longer than to import them."""
    return TypeAdapter(AnyTrainConfig)


def parse_train_config(text: str | bytes) -> TrainConfig:
    """A `train.json`. Raises pydantic.ValidationError."""
    return _reader().validate_json(text)


def train_config(spec: RunSpec, plan: Plan, peak_flops_per_gpu: float | None) -> TrainConfig:
    """What the trainer is told of a plan, in the document of the plan's engine."""
    fill: dict[str, Callable[[RunSpec, Plan, float | None], TrainConfig]] = {
        "megatron": megatron_config,
        "megatron-lm": megatron_lm_config,
        "native": native_config,
        "deepspeed": deepspeed_config,
    }
    return fill[_DOCUMENTS[plan.engine]](spec, plan, peak_flops_per_gpu)
