"""Which models Hugging Face's classes can be, out of all shapes that a spec can describe.

Belongs here: one sentence for each choice that a class has no setting for. Does not belong here:
the settings (see `hpctrain.engines.hugging_face`), what trains them (see `trainable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec

# The class that stands for each family, for messages.
CLASSES = {
    "gpt": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BERT of transformers",
    "distilbert": "DistilBERT of transformers",
    "vit": "ViTForImageClassification",
    "resnet": "ResNetForImageClassification",
}
TASKS = {
    "gpt": ("language_modeling",),
    "llama": ("language_modeling",),
    "bert": ("masked_language_modeling", "classification"),
    "distilbert": ("masked_language_modeling", "classification"),
    "vit": ("classification",),
    "resnet": ("classification",),
}
# Last names of the linear layers in the blocks of each class, which LoRA can adapt.
LINEAR_LAYERS: dict[str, tuple[str, ...]] = {
    "gpt": ("c_attn", "c_fc", "c_proj"),
    "llama": ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    "bert": ("dense", "key", "query", "value"),
    "distilbert": ("k_lin", "lin1", "lin2", "out_lin", "q_lin", "v_lin"),
    "vit": ("fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"),
    "resnet": (),
}
# What each class has without a choice: field of the model -> its only values.
_FIXED: dict[str, dict[str, tuple[object, ...]]] = {
    "gpt": dict(norm=("layernorm",), positions=("learned",), bias=(True,)),
    "llama": dict(
        norm=("rmsnorm",), positions=("rope",), activation=("swiglu",), dropout=(0.0,)
    ),
    "bert": dict(norm=("layernorm",), positions=("learned",), bias=(True,)),
    "distilbert": dict(
        norm=("layernorm",),
        norm_epsilon=(1e-12,),
        positions=("learned",),
        activation=("gelu",),
        bias=(True,),
    ),
    "vit": dict(norm=("layernorm",), bias=(True,), tied=(False,)),
    "resnet": dict(dropout=(0.0,)),
}  # fmt: skip

Found = Iterator[tuple[str, str]]


def unrepresentable(spec: RunSpec) -> list[tuple[str, str]]:
    """List (dotted path of the field, why no class of Hugging Face has it); empty when one has."""
    return [*unrepresentable_model(spec.model), *_task(spec), *_lora(spec), *_blocks(spec)]


def unrepresentable_model(model: ModelSpec) -> list[tuple[str, str]]:
    """List the same for the shape alone."""
    return [found for check in _CHECKS for found in check(model)]


def _fixed(model: ModelSpec) -> Found:
    for field, values in _FIXED[model.family].items():
        if getattr(model, field) not in values:
            given, only = _word(getattr(model, field)), " or ".join(map(_word, values))
            yield f"model.{field}", f"{CLASSES[model.family]} has {field} {only}, not {given}"


def _word(value: object) -> str:
    """Write a value as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gated(model: ModelSpec) -> Found:
    if model.gated and model.family not in ("llama", "resnet"):
        yield "model.activation", f"{CLASSES[model.family]} has no gate: swiglu needs family llama"


def _heads(model: ModelSpec) -> Found:
    if model.family == "resnet":
        return
    name = CLASSES[model.family]
    if model.family == "llama":
        if model.hidden % model.heads:  # LlamaConfig.validate_architecture, also with head_dim
            yield "model.heads", f"{name} wants hidden {model.hidden} divisible by heads"
        return
    if model.key_value_heads != model.heads:
        yield "model.kv_heads", f"{name} has as many key/value heads as heads ({model.heads})"
    if model.head_size * model.heads != model.hidden:
        yield "model.head_dim", f"{name} has head_dim hidden / heads = {model.hidden / model.heads}"


def _megatrons(model: ModelSpec) -> Found:
    """Find parts that megatron-core has and these classes have not."""
    given = [("moe", model.moe), ("mla", model.mla), ("mtp_layers", model.mtp_layers)]
    for field, value in given:
        if value:
            yield f"model.{field}", f"{CLASSES[model.family]} has no {field}"


def _task(spec: RunSpec) -> Found:
    model, task = spec.model, spec.learned_task
    if task not in TASKS[model.family]:
        known = " or ".join(TASKS[model.family])
        yield "task", f"a {model.family} learns {known}, not {task}"
    elif task == "classification" and not model.reads_images and model.classes is None:
        yield "task", "classification of texts needs `model.classes`, their number"
    elif task != "classification" and model.classes is not None:
        yield "model.classes", f"classes are for `task: classification`, not for {task}"


def _lora(spec: RunSpec) -> Found:
    family, layers = spec.model.family, LINEAR_LAYERS[spec.model.family]
    if spec.lora is None:
        return
    if not layers:
        yield "lora", f"LoRA adapts linear layers, the blocks of a {family} have none"
    elif spec.lora.targets != "all" and (unknown := set(spec.lora.targets) - set(layers)):
        listed = ", ".join(sorted(unknown))
        words = f"a {family} has no linear layers {listed}; it has {', '.join(layers)}"
        yield "lora.targets", words


def _blocks(spec: RunSpec) -> Found:
    if spec.model.family == "resnet" and spec.recompute == "full":
        yield "recompute", "a resnet has no blocks to compute again: say `none`"


_CHECKS: tuple[Callable[[ModelSpec], Found], ...] = (_fixed, _gated, _heads, _megatrons)
