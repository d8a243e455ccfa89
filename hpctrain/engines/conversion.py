"""Decide which models can be converted between Hugging Face's classes and megatron-core.

Belongs here: reasons against a conversion, and the model of a `config.json`. Does not belong here:
weights (see `hpctrain.convert`), files.
"""

from __future__ import annotations

from pydantic import ValidationError

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.plan.abilities.trainable_hugging_face import unrepresentable_model
from hpctrain.spec.families import Config, family_of, read_config
from hpctrain.spec.families.settings import unusable
from hpctrain.spec.model import ModelSpec

CONVERTED_FAMILIES = ("gpt", "llama")
_ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu", "squared_relu")


def unconvertible(config: Config) -> list[str]:
    """List why megatron-core cannot compute the model of a `config.json`; empty if it can."""
    family = family_of(config)
    if family is None or family.name not in CONVERTED_FAMILIES:
        return [f"model_type is {config.get('model_type')}: gpt2 and llama can be converted"]
    reading = read_config(config, family)
    found = [f"{name} {why}" for name, why in reading.refused]
    found += [f"{name} is {value}, which nobody here knows" for name, value in reading.unknown]
    try:
        model = shape_described(config)
    except ValidationError as error:
        return [*found, *unusable(error, reading.names)]
    if model.rope is not None and model.rope.scaling is not None:
        kind = model.rope.scaling.kind
        found.append(f"rotary positions are scaled ({kind}), which hpctrain does not train")
    if model.activation not in _ACTIVATIONS:
        found.append(f"the activation {model.activation} is none that hpctrain trains")
    if model.bias not in (True, False):
        found.append(f"biases are in one of attention and MLP only ({model.bias})")
    return found


def shape_described(config: Config) -> ModelSpec:
    """Build the model of a `config.json`, as long as it can be. Raises ValidationError."""
    family = family_of(config)
    assert family is not None, "its type is known"
    fields = read_config(config, family).fields
    return ModelSpec.model_validate({"seq": fields.get("max_seq", 2), **fields})


def unexportable(model: ModelSpec) -> list[str]:
    """List why no class of Hugging Face computes what megatron-core trains; empty if one does."""
    weights_alone = model.model_copy(update={"dropout": 0.0})
    return [message for _, message in unrepresentable_model(weights_alone)]


def conversion_config(model: ModelSpec, *, half: bool) -> MegatronConfig:
    """Describe a model on one rank, its vocabulary not padded; only fields that building needs.

    `half`: weights in bf16, else fp32.
    """
    return MegatronConfig.model_construct(
        model=model,
        padded_vocab_size=model.vocab,
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
