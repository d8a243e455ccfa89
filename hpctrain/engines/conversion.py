"""Decide which models can be converted between Hugging Face's classes and megatron-core.

Belongs here: reasons against a conversion, and the model of a `config.json`. Does not belong here:
weights (see `hpctrain.convert`), files.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.plan.abilities.trainable_hugging_face import unrepresentable_model
from hpctrain.plan.abilities.trainable_megatron import missing_parts
from hpctrain.spec.families import Config, family_of, read_config
from hpctrain.spec.families.settings import family_by, unusable
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.positions import shorten


def unconvertible(config: Config) -> list[str]:
    """List why megatron-core cannot compute the model of a `config.json`; empty if it can."""
    family = family_of(config)
    if family is None or not family.weights:
        return [f"model_type is {config.get('model_type')}, of which no weights are known"]
    reading = read_config(config, family)
    found = [f"{name} {why}" for name, why in reading.refused]
    found += [
        f"{shorten(name)} is {shorten(str(value))}, which nobody here knows"
        for name, value in reading.unknown
    ]
    try:
        model = shape_described(config)
    except ValidationError as error:
        return [*found, *unusable(error, reading)]
    found += [f"{field}: {why}" for field, why in missing_parts(model)]
    return found


def shape_described(config: Config) -> ModelSpec:
    """Build the model of a `config.json`, as long as it can be. Raises ValidationError."""
    family = family_of(config)
    assert family is not None, "its type is known"
    fields = read_config(config, family).fields
    return ModelSpec.model_validate({"seq": fields.get("max_seq", 2), **fields})


def unexportable(model: ModelSpec) -> list[str]:
    """List why no class of Hugging Face computes what megatron-core trains; empty if one does."""
    family = family_by(model)
    if not family.weights:
        return [f"no weights of {family.title} are known"]
    alone: dict[str, object] = {"dropout": 0.0}
    if "prediction_norm" in family.weights:
        alone["mtp_layers"] = 0  # the class has none, its published files have them
    return [message for _, message in unrepresentable_model(model.model_copy(update=alone))]


def conversion_config(model: ModelSpec, *, half: bool) -> MegatronConfig:
    """Describe a model on one rank, its vocabulary not padded; only fields that building needs.

    `half`: weights in bf16, else fp32.
    """
    shape: dict[str, Any] = dict(model=model, padded_vocab_size=model.vocab)
    return MegatronConfig.model_construct(
        **shape,
        transformer_impl="local",
        vocab_size=model.vocab,
        seq_length=model.seq,
        precision="bf16" if half else "fp32",
        deterministic_mode=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        data_parallel_size=1,
        sequence_parallel=False,
        pipeline_layer_split=((model.layers,),),
        recompute_granularity=None,
        micro_batch_size=1,
    )
