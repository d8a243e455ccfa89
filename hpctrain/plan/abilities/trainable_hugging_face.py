"""List what hpctrain cannot train with Hugging Face's classes although it can be planned.

Belongs here: one sentence for each choice that a class has no setting for, and what FSDP and DDP
lack. Does not belong here: the settings (see `hpctrain.spec.families.settings`), DeepSpeed (see
`trainable_deepspeed`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.spec.families.settings import differences, family_by
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec


def unrepresentable(spec: RunSpec) -> list[tuple[str, str]]:
    """List (dotted path of the field, why no class of Hugging Face has it); empty when one has."""
    return [*unrepresentable_model(spec.model), *_task_problems(spec)]


def unrepresentable_model(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield those of `unrepresentable` that concern the fields of `model` alone."""
    family = family_by(model)
    name = family.class_name
    for field, ours, theirs in differences(model):
        has = f"no {field}" if theirs is None else f"{field} {_yaml(theirs)}, not {_yaml(ours)}"
        yield f"model.{field}", f"{name} has {has}"
    if family.whole_heads and model.hidden % model.heads:
        # LlamaConfig.validate_architecture, also with head_dim
        yield "model.heads", f"{name} wants hidden {model.hidden} divisible by heads"
    if model.dropout and not family.hidden_dropout:
        yield "model.dropout", f"{name} has dropout 0.0, not {model.dropout}"
    far, buckets = model.distances.max_distance, model.distances.buckets
    if model.positions == "relative" and far <= buckets // 2:
        # the half of them for near distances ends there (T5Attention._relative_position_bucket)
        yield "model.relative.max_distance", f"{name} wants more than half of the {buckets} buckets"
    if model.mtp_layers:
        yield "model.mtp_layers", f"{name} has no mtp_layers"


def _task_problems(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield problems of task, adapters and recomputation with the class of the model."""
    model, task, name = spec.model, spec.learned_task, spec.model.called
    layers, tasks = family_by(model).linear_names, family_by(model).classes
    if task not in tasks:
        yield "task", f"a {name} learns {' or '.join(tasks)}, not {task}"
    elif task == "classification" and not model.reads_images and model.classes is None:
        yield "task", "classification of texts needs `model.classes`, their number"
    elif task != "classification" and model.classes is not None:
        yield "model.classes", f"classes are for `task: classification`, not for {task}"
    if task == "span_corruption" and spec.data.documents != "joined":
        yield (
            "data.documents",
            f"spans are cut out of joined documents, not of {spec.data.documents}",
        )
    if spec.lora is not None and model.encoder_layers:
        yield "lora", f"hpctrain adapts no encoder-decoders, and a {name} is one"
    elif spec.lora is not None and not layers:
        yield "lora", f"LoRA adapts linear layers, none are known of a {name}"
    elif spec.lora is not None and spec.lora.targets != "all":
        unknown = ", ".join(sorted(set(spec.lora.targets) - set(layers)))
        if unknown:
            message = f"a {name} has no linear layers {unknown}; it has {', '.join(layers)}"
            yield "lora.targets", message
    if not model.recomputes and spec.recompute == "full":
        yield "recompute", f"a {name} has no blocks to compute again: say `none`"
    if model.counted is not None:
        # the class may mix the tokens of neighbours without asking for their positions
        for field, value in (("format", spec.data.format), ("documents", spec.data.documents)):
            if value in ("packed", "separate"):
                yield f"data.{field}", f"a {name} may not keep texts apart: not {value}"


def _yaml(value: object) -> str:
    """Write a value as YAML does."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


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
