"""List what hpctrain cannot train with Hugging Face's classes although it can be planned.

Belongs here: one sentence for each choice that a class has no setting for, and what FSDP and DDP
lack. Does not belong here: the settings (see `hpctrain.engines.hugging_face`), DeepSpeed (see
`trainable_deepspeed`).
"""

from __future__ import annotations

from collections.abc import Iterator

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
# What each class does not let the user choose: field of the model -> the values it supports.
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


def unrepresentable(spec: RunSpec) -> list[tuple[str, str]]:
    """List (dotted path of the field, why no class of Hugging Face has it); empty when one has."""
    return [*unrepresentable_model(spec.model), *_task_problems(spec)]


def unrepresentable_model(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield those of `unrepresentable` that concern the fields of `model` alone."""
    family, name = model.family, CLASSES[model.family]
    for field, values in _FIXED[family].items():
        if getattr(model, field) not in values:
            given, only = _yaml(getattr(model, field)), " or ".join(map(_yaml, values))
            yield f"model.{field}", f"{name} has {field} {only}, not {given}"
    if model.gated and family not in ("llama", "resnet"):
        yield "model.activation", f"{name} has no gate: swiglu needs family llama"
    if family == "llama" and model.hidden % model.heads:
        # LlamaConfig.validate_architecture, also with head_dim
        yield "model.heads", f"{name} wants hidden {model.hidden} divisible by heads"
    if family not in ("llama", "resnet") and model.key_value_heads != model.heads:
        yield "model.kv_heads", f"{name} has as many key/value heads as heads ({model.heads})"
    if family not in ("llama", "resnet") and model.head_size * model.heads != model.hidden:
        yield "model.head_dim", f"{name} has head_dim hidden / heads = {model.hidden / model.heads}"
    for field, value in dict(moe=model.moe, mla=model.mla, mtp_layers=model.mtp_layers).items():
        if value:
            yield f"model.{field}", f"{name} has no {field}"


def _task_problems(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield problems of task, adapters and recomputation with the class of the model."""
    model, task, family = spec.model, spec.learned_task, spec.model.family
    layers = LINEAR_LAYERS[family]
    if task not in TASKS[family]:
        yield "task", f"a {family} learns {' or '.join(TASKS[family])}, not {task}"
    elif task == "classification" and not model.reads_images and model.classes is None:
        yield "task", "classification of texts needs `model.classes`, their number"
    elif task != "classification" and model.classes is not None:
        yield "model.classes", f"classes are for `task: classification`, not for {task}"
    if spec.lora is not None and not layers:
        yield "lora", f"LoRA adapts linear layers, the blocks of a {family} have none"
    elif spec.lora is not None and spec.lora.targets != "all":
        unknown = ", ".join(sorted(set(spec.lora.targets) - set(layers)))
        if unknown:
            message = f"a {family} has no linear layers {unknown}; it has {', '.join(layers)}"
            yield "lora.targets", message
    if family == "resnet" and spec.recompute == "full":
        yield "recompute", "a resnet has no blocks to compute again: say `none`"


def _yaml(value: object) -> str:
    """Write a value as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- FSDP and DDP: what holds for every engine that trains these classes ---------------------------


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field, what the trainer or the classes lack).

    Settings that only Megatron has are refused, because they would silently do nothing.
    """
    engine, optimizer = spec.engine.name, spec.optimizer
    yield from unrepresentable(spec)
    if spec.engine.implementation != "auto":
        yield "engine.implementation", f"{engine} has one implementation: say `auto`"
    if not optimizer.overlap_grad_reduce and not spec.engine.abilities.chooses_overlap:
        message = f"{engine} always hides the gradient reduction: say `true`"
        yield "optimizer.overlap_grad_reduce", message
    if not optimizer.overlap_param_gather:
        message = f"{engine} decides itself when it gathers weights: say `true`"
        yield "optimizer.overlap_param_gather", message
    if spec.recompute == "selective":
        message = f"{engine} recomputes whole blocks or nothing: say `full` or `none`"
        yield "recompute", message
    if spec.resources.min_nodes is not None and spec.engine.ddp.hook == "powersgd":
        message = "PowerSGD's memory of past errors belongs to one number of ranks"
        yield "engine.ddp.hook", message
