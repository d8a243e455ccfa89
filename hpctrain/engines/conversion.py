"""Decide which models can be converted between Hugging Face's classes and megatron-core.

Belongs here: reasons against a conversion, and the model of a `config.json`. Does not belong here:
weights (see `hpctrain.convert`), files.
"""

from __future__ import annotations

from hpctrain.engines.hugging_face import (
    ACTIVATIONS,
    Config,
    Inexpressible,
    described,
    family_described,
    rope_of,
)
from hpctrain.engines.megatron import MegatronConfig, megatron_model
from hpctrain.plan.abilities.trainable_hugging_face import unrepresentable_model
from hpctrain.spec.model import ModelSpec

CONVERTED_FAMILIES = ("gpt", "llama")


def unconvertible(config: Config) -> list[str]:
    """List why megatron-core cannot compute the model of a `config.json`; empty if it can."""
    family = family_described(config)
    if family not in CONVERTED_FAMILIES:
        return [f"model_type is {config.get('model_type')}: gpt2 and llama can be converted"]
    found, rope, fields = [], rope_of(config), described(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        found.append(f"rotary positions are scaled ({kind}), which hpctrain does not train")
    if not config.get("scale_attn_weights", True):
        found.append("scale_attn_weights is false: megatron-core always scales")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(name):
            found.append(f"{name} is true, which megatron-core's GPT has not")
    if fields["activation"] not in ACTIVATIONS:
        found.append(f"the activation {fields['activation']} is none that hpctrain trains")
    if isinstance(bias := fields.get("bias"), Inexpressible):
        found.append(f"biases are {bias}")
    return found


def shape_described(config: Config) -> ModelSpec:
    """Build the model of a `config.json` in which `unconvertible` finds nothing."""
    return ModelSpec.model_validate(described(config))


def unexportable(model: ModelSpec) -> list[str]:
    """List why no class of Hugging Face computes what megatron-core trains; empty if one does."""
    weights_alone = model.model_copy(update={"dropout": 0.0})
    return [message for _, message in unrepresentable_model(weights_alone)]


def conversion_config(model: ModelSpec, *, half: bool) -> MegatronConfig:
    """Describe a model on one rank, its vocabulary not padded; only fields that building needs.

    `half`: weights in bf16, else fp32.
    """
    return MegatronConfig.model_construct(
        **dict(megatron_model(model, model.vocab, "local")),
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
